"""The base weights of a training: does an engine serve them? If not, it loads them again."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.agreement import mean_difference
from rolltap.trainer.engine.owner import noted_base
from rolltap.trainer.versions import Version

LOADED = "default"
"""The version that vLLM reports for the weights that it loaded when it started."""
_DESCRIPTIVE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of a model's config.json that do not change which weights fit."""


@dataclass(frozen=True, slots=True)
class Base:
    """The base model, and how the trainer scores a fixed text by it."""

    model: Path
    """Folder of the base model."""
    version: str
    """Version of weights that are loaded from the folder: `<run>.0.<attempt>`."""
    ids: Sequence[int]
    """The text's token ids, shape (T,)."""
    own: Sequence[float]
    """The trainer's log-probabilities of `ids[1:]`, shape (T - 1,)."""
    limit: float
    """Largest mean difference in nats that is agreement."""

    def names(self, version: str) -> bool:
        """Return True when a version that an engine reports is that of base weights, as far as a name tells."""
        served, own = Version.parse(version), Version.parse(self.version)
        return version == LOADED or (
            served is not None and own is not None and (served.run, served.step) == (own.run, 0)
        )


def difference(engine: EngineAdmin, name: str | None, ids: Sequence[int], own: Sequence[float]) -> float:
    """Return the mean difference of an engine's log-probabilities of `ids[1:]` from `own`, in nats.

    `name` is the model's name in the engine, None for the base model. Raises `EngineError`.
    """
    return mean_difference(own, engine.score(name or engine.models().base, ids[:1], ids[1:]))


def verify_base(engine: EngineAdmin, base: Base, say: Callable[[str], None]) -> None:
    """Make sure that an engine serves the base model and is not paused: see `Engines.verify_base`."""
    version, root = engine.weight_version(), engine.models().root
    if engine.is_paused():
        why = "is paused, as a killed training leaves it"
    elif not base.names(version):
        why = f"serves the published weights {version}"
    elif (differs := difference(engine, None, base.ids, base.own)) <= base.limit:
        if not same_folder(root, str(base.model)):
            say(f"the engine at {engine.url} serves {root}: taken for {base.model}, {differs:.2g} nats from it")
        return
    else:
        why = f"serves the weights {version}, which differ from {base.model} by {differs:.2g} nats"
    fix = f"start it again with `rolltap serve {base.model}`"
    if not _same_model(root, base.model) and not _same_model(noted_base(engine), base.model):
        raise EngineError(
            f"the engine at {engine.url} {why}, and cannot load {base.model}: its own model is {root}, and there is "
            f"no sign here that it is the same; {fix}"
        )
    say(f"the engine at {engine.url} {why}: it loads {base.model} again")
    engine.serve(base.model, base.version)
    differs = difference(engine, None, base.ids, base.own)
    if not differs <= base.limit:
        raise EngineError(
            f"the engine at {engine.url} (model {root}, weights {engine.weight_version()}) has loaded {base.model}, "
            f"and still differs from the trainer by {differs:.2g} nats (limit {base.limit:g}): is its --dtype the "
            f"recipe's, and the folder the same on both sides? Then {fix}, or raise max_difference"
        )


def _same_model(root: str | None, model: Path) -> bool:
    """Return True when an engine's model has the shape of a folder's: loading other shapes destroys the engine."""
    return root is not None and (same_folder(root, str(model)) or _config(Path(root)) == _config(model) is not None)


def same_folder(first: str, second: str) -> bool:
    """Return True for two names of one model, each of which is a folder or a name on the Hub."""
    return first == second or Path(first).resolve() == Path(second).resolve()


def _config(folder: Path) -> dict[str, Any] | None:
    """Return what decides the shapes of a model; None for a folder that cannot be read here."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return {key: value for key, value in config.items() if key not in _DESCRIPTIVE}
    except (OSError, ValueError, AttributeError):
        return None
