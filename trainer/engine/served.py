"""The weights that engines serve, by version: which calls of a run did they sample?"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltap.addons.engine.policy import PolicyFile
from rolltap.trainer.engine.admin import Models
from rolltap.trainer.engine.base_weights import LOADED, same_folder
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.published import published_version
from rolltap.trainer.versions import Version


@dataclass(frozen=True, slots=True)
class Served:
    """Weights that engines serve."""

    names: dict[str, str | None]
    """Version -> the model's name in requests, None for the base model, of weights that every engine serves."""
    root: str
    """Folder or full name of the first engine's base model."""
    max_model_len: int
    """The smallest context window, in tokens."""
    found: str
    """Account of what each engine serves, in words."""


def served_weights(engines: Engines, run: Path, models: Collection[str]) -> Served:
    """Return the weights that engines serve under versions that mean the same in `run`. Raises `EngineError`.

    These are the base model, and published adapters where its weights are not published ones: on other weights they
    mean nothing. A training's version names the same weights everywhere. Another name, as vLLM's `default`, does so
    only where the engine's model is one of `models`, and for an adapter only where the run's `policy.json` names it.
    """
    policy = PolicyFile(run).read()
    served = engines.models()
    every: list[dict[str, str | None]] = []
    found = []
    for engine, there in zip(engines.admins, served, strict=True):
        version = engine.weight_version()
        names: dict[str, str | None] = {}
        if _is_base(version):
            names |= _adapters(there)
            if policy.model in there.adapters:
                names[policy.version] = policy.model
        words = f"the engine at {engine.url} serves"
        for name in sorted(names):
            words += f" {name} (an adapter),"
        words += f" {version} (its base model, {there.root})"
        if Version.parse(version) or any(same_folder(there.root, model) for model in models):
            names[version] = None
        else:
            words += f", and the run was recorded with {' and '.join(sorted(models))}"
        every.append(names)
        found.append(words)
    common = {version: name for version, name in every[0].items() if all(version in names for names in every)}
    return Served(common, served[0].root, min(there.max_model_len for there in served), "; ".join(found))


def recorded_models(metadata: Mapping[str, Any]) -> set[str]:
    """Return the models of a run's `run.json`: the recorder's, and those of its engines."""
    engines = metadata.get("engines", {}).values()
    return {str(model) for model in (metadata.get("model"), *(engine.get("model") for engine in engines)) if model}


def _is_base(version: str) -> bool:
    """Return True for the version of a base model's weights on which adapters are trained, as far as a name tells."""
    parsed = Version.parse(version)
    return version == LOADED or (parsed is not None and parsed.step == 0)


def _adapters(models: Models) -> dict[str, str]:
    """Return version -> name of the adapters that trainings published."""
    versions = {name: published_version(name) for name in models.adapters}
    return {str(version): name for name, version in versions.items() if version is not None}
