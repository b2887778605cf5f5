"""Status of engines: what one serves, in one line, what all of them serve for a run, and the way
back to the base weights."""

import os
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rolltap.addons.engine.policy import Policy, PolicyFile
from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.owners import Owner, claim, release
from rolltap.trainer.engine.weights import LOADED, is_base, published_version, same_folder
from rolltap.trainer.names import Version, some


class EngineStatus(NamedTuple):
    """The model and the weights of an engine. `str` says it in one line.

    `model` is the base model's folder or full name, `version` that of its weights, and `owner` the
    id of the training that owns the engine; they are None when it tells none. `about` says where
    its owner, or the last one, runs.
    """

    url: str
    healthy: bool
    paused: bool
    model: str
    max_model_len: int
    version: str | None
    adapters: list[str]
    owner: str | None
    about: str | None

    def weights(self) -> str:
        """Return words for the weights of the base model."""
        if not self.version:
            return "weights that it does not name"
        if is_base(self.version):
            return "its base weights"
        known = Version.parse(self.version)
        if known is None:
            return f"the weights {self.version}"
        return f"the weights {self.version} (step {known.step} of the training {known.run})"

    def __str__(self) -> str:
        parts = [f"the engine at {self.url} serves {self.model}: {self.weights()}"]
        if self.adapters:
            parts.append(f"adapters: {some(self.adapters)}")
        if self.about and self.owner:
            parts.append(f"owned by {self.about}")
        elif self.about:
            parts.append(f"last owned by {self.about}")
        if self.paused:
            parts.append("it is paused: calls wait")
        if not self.healthy:
            parts.append("it is not healthy")
        return "; ".join(parts)

    def mismatch(self, policy: Policy) -> str | None:
        """Return in words that it does not serve the policy of a run, or None."""
        if policy.model is not None:
            if policy.model in self.adapters:
                return None
            return (
                f"the engine at {self.url} lacks the adapter {policy.model}, which is the run's"
                " policy"
            )
        if self.version is None or self.version == policy.version:
            return None
        wanted = f"the run's policy {policy.version}"
        if is_base(policy.version):
            if is_base(self.version):
                return None
            wanted = f"the base weights: `rolltap engine reset {self.url}` brings them back"
            if self.owner:
                wanted = (
                    f"the base weights: wait for the end of {self.about or 'the training'}, which"
                    " owns the engine"
                )
        return f"the engine at {self.url} samples by {self.weights()}, not by {wanted}"


def engine_status(engine: EngineAdmin) -> EngineStatus:
    """Ask an engine for its status. Raises `EngineError` when it does not name its models."""
    models = engine.models()
    version = None
    paused = False
    register: dict[str, str | None] = {}
    with suppress(EngineError):  # its development routes are off
        version = engine.weight_version()
        paused = engine.is_paused()
    with suppress(EngineError):
        _, register = engine.register("GET")
    return EngineStatus(
        url=engine.url,
        healthy=engine.healthy(),
        paused=paused,
        model=models.root,
        max_model_len=models.max_model_len,
        version=version,
        adapters=sorted(models.adapters),
        owner=register.get("owner"),
        about=register.get("about"),
    )


@dataclass(frozen=True, slots=True)
class Served:
    """Weights that engines serve."""

    names: dict[str, str | None]
    """Version -> the model's name in requests, None for the base model, of weights that every
    engine serves."""
    root: str
    """Folder or full name of the first engine's base model."""
    max_model_len: int
    """The smallest context window, in tokens."""
    found: str
    """Account of what each engine serves, in words."""


def served_weights(engines: Engines, run: Path, models: Collection[str]) -> Served:
    """Return the weights that engines serve under versions that mean the same in `run`. Raises
    `EngineError`.

    These are the base model, and published adapters where its weights are not published ones: on
    other weights they mean nothing. A training's version names the same weights everywhere. Another
    name, as vLLM's `default`, does so only where the engine's model is one of `models`, and for an
    adapter only where the run's `policy.json` names it.
    """
    policy = PolicyFile(run).read()
    served = engines.each(engine_status)
    common = _names(served[0], policy, models)
    for status in served[1:]:
        names = _names(status, policy, models)
        common = {version: name for version, name in common.items() if version in names}
    recorded = " and ".join(sorted(models)) or "no named model"
    found = [str(status) for status in served]
    found.append(f"the run was recorded with {recorded}")
    return Served(
        names=common,
        root=served[0].model,
        max_model_len=min(status.max_model_len for status in served),
        found="; ".join(found),
    )


def _names(status: EngineStatus, policy: Policy, models: Collection[str]) -> dict[str, str | None]:
    """Return version -> the model's name in requests, of one engine."""
    names: dict[str, str | None] = {}
    if not status.version:
        return names
    if is_base(status.version):  # adapters are trained on these
        for name in status.adapters:
            version = published_version(name)
            if version is not None:
                names[str(version)] = name
        if policy.model in status.adapters:
            names[policy.version] = policy.model
    is_recorded = any(same_folder(status.model, model) for model in models)
    if is_recorded or Version.parse(status.version):
        names[status.version] = None
    return names


def recorded_models(metadata: Mapping[str, Any]) -> set[str]:
    """Return the models of a run's `run.json`: the recorder's, and those of its engines."""
    models = [metadata.get("model")]
    for engine in metadata.get("engines", {}).values():
        models.append(engine.get("model"))
    return {str(model) for model in models if model}


def served_by(urls: str) -> str:
    """Return the end of a message about a model: the models of the engines that answer."""
    served = ""
    for url in urls.split(","):
        with suppress(EngineError, InputError):
            served += f"; the engine at {url} serves {EngineAdmin(url).models().root}"
    return served


def reset_engine(engine: EngineAdmin, *, steal: bool = False) -> None:
    """Unload the adapters of trainings, and load the weights of the engine's own model if it is
    paused or has others.

    Raises `EngineError` when the engine refuses, and when a training owns it, unless `steal` takes
    it.
    """
    about = f"`rolltap engine reset` on {socket.gethostname()}, process {os.getpid()}"
    owner = Owner("reset", about)
    claim(engine, owner, steal=steal)
    try:
        before = engine_status(engine)
        for name in filter(published_version, before.adapters):
            engine.unload_adapter(name)
        if before.paused or before.version != LOADED:
            engine.serve(Path(before.model), LOADED)
    finally:
        release(engine, owner)
