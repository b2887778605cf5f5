"""Status of one engine: what it serves, in one line, and its way back to its base weights."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rolltap.addons.engine.policy import Policy
from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.weights import LOADED, Owner, claim, is_base, published_version, release
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
        if self.version is None or is_base(self.version):
            return "its base weights" if self.version else "weights that it does not name"
        known = Version.parse(self.version)
        return f"the weights {self.version}" + (
            f" (step {known.step} of the training {known.run})" if known else ""
        )

    def __str__(self) -> str:
        adapters = f"; adapters: {some(self.adapters)}" if self.adapters else ""
        owner = f"; {'owned' if self.owner else 'last owned'} by {self.about}" if self.about else ""
        state = "; it is paused: calls wait" * self.paused + "; it is not healthy" * (
            not self.healthy
        )
        return (
            f"the engine at {self.url} serves {self.model}:"
            f" {self.weights()}{adapters}{owner}{state}"
        )

    def mismatch(self, policy: Policy) -> str | None:
        """Return in words that it does not serve the policy of a run, or None."""
        if policy.model is not None:
            lacks = (
                f"the engine at {self.url} lacks the adapter {policy.model}, which is the run's"
                " policy"
            )
            return None if policy.model in self.adapters else lacks
        if self.version in (None, policy.version) or (
            is_base(self.version) and is_base(policy.version)
        ):
            return None
        if not is_base(policy.version):
            wanted = f"the run's policy {policy.version}"
        elif self.owner:
            wanted = (
                f"the base weights: wait for the end of {self.about or 'the training'}, which owns"
                " the engine"
            )
        else:
            wanted = f"the base weights: `rolltap engine reset {self.url}` brings them back"
        return f"the engine at {self.url} samples by {self.weights()}, not by {wanted}"


def engine_status(engine: EngineAdmin) -> EngineStatus:
    """Ask an engine for its status. Raises `EngineError` when it does not name its models."""
    models, version, paused, register = engine.models(), None, False, {}
    with suppress(EngineError):  # its development routes are off
        version = engine.weight_version()
        paused = engine.is_paused()
    with suppress(EngineError):
        register = engine.register("GET")[1]
    served = models.root, models.max_model_len, version, sorted(models.adapters)
    return EngineStatus(
        engine.url, engine.healthy(), paused, *served, register.get("owner"), register.get("about")
    )


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
    owner = Owner(
        "reset", f"`rolltap engine reset` on {socket.gethostname()}, process {os.getpid()}"
    )
    claim(engine, owner, steal=steal)
    try:
        before = engine_status(engine)
        for name in filter(published_version, before.adapters):
            engine.unload_adapter(name)
        if before.paused or before.version != LOADED:
            engine.serve(Path(before.model), LOADED)
    finally:
        release(engine, owner)
