"""Publication of new weights to running engines: of a full checkpoint, which they reload, or of a
LoRA adapter.

The engines read weights from a folder, which they must see under the publisher's path.
"""

import math
import shutil
from pathlib import Path
from typing import Literal, Protocol

from peft import PeftModel
from transformers import PreTrainedModel

from rolltap.addons.errors import InputError, RunError
from rolltap.trainer.engine import weights
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines, Weights
from rolltap.trainer.engine.weights import Agrees
from rolltap.trainer.models.loading import stored_weights
from rolltap.trainer.models.saving import save_adapter, save_weights

_BYTES = 2
"""Bytes of a value in a checkpoint, at least."""


class CheckpointPublisher:
    """Saves the model, and makes the engines reload it. An adapter is merged into the saved copy.

    During the reload all engines are paused: they finish the requests in flight first, and new ones
    wait. So no engine request is sampled by two versions. A call that is continued after an engine
    failure takes several requests. Adapters are unloaded: they were made for other weights of the
    base model. `folder` may be shared with other runs. The published checkpoint stays there: a
    publication that fails goes back to it, or to the model in `base` if there is none. The
    constructor raises `RunError` for a folder without room.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        folder: Path,
        run: Path,
        base: Path,
    ) -> None:
        self._engines = engines
        self._run = run
        self._base = base
        self._folder = folder.absolute()
        self._served: Weights | None = None
        _require_room(self._folder, base)

    def publish(self, model: PreTrainedModel | PeftModel, version: str, agrees: Agrees) -> None:
        """See `Publisher.publish`."""
        if model.config.tie_word_embeddings and any(self._engines.each(EngineAdmin.runs_on_cpu)):
            raise InputError(
                "the model ties its input and output embeddings, and vLLM on CPU keeps the old"
                " output embeddings on a reload: untie them before the engine is started"
                " (tie_word_embeddings=false and a saved lm_head), or publish LoRA adapters"
            )
        self._engines.require_owned()
        old = self._served or Weights(self._base, weights.base_version(version))
        weights.keep_only(self._folder, version, [old.folder])
        new = Weights(self._folder / weights.published_name(version), version)
        with weights.new_folder(new.folder) as folder:
            save_weights(model, folder, self._base)
        has_config = (new.folder / "config.json").is_file()
        if not has_config or not any(new.folder.glob("*.safetensors")):
            # vLLM 0.32 drops its weights before it looks for new ones
            raise InputError(
                f"{new.folder} is not a checkpoint: it needs config.json and *.safetensors; the"
                " engines are unchanged"
            )
        with self._engines.reloaded(new, old):
            agrees(None)
            weights.write_policy(self._run, None, version)
        self._served = new

        def is_unwanted(_: str) -> bool:
            return True

        self._engines.unload(is_unwanted, weights.OTHER_BASE)
        weights.keep_only(self._folder, version, [new.folder])


def _require_room(folder: Path, base: Path) -> None:
    """Raise `RunError` unless two checkpoints fit into a folder: the served one, and the next."""
    values = 0
    for shape in stored_weights(base).shapes.values():
        values += math.prod(shape)
    needed = 2 * _BYTES * values
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    free += sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if free < needed:
        raise RunError(
            f"{folder} has {free / 2**30:.1f} GiB for checkpoints, and two of them take "
            f"{needed / 2**30:.1f} GiB or more: choose another publish_folder, or give a container "
            "more memory for /dev/shm (docker run --shm-size; its default is 64 MB)"
        )


class LoraPublisher:
    """Saves the adapter, and loads it into the engines under a new name, `policy-<version>`.

    Publishing does not wait for requests in flight: an engine request keeps the adapter that it
    started with. The newest `adapters` of the run stay loaded and on the disk, and an engine that
    was started again gets them back. The engines need `--max-cpu-loras` for one more: the oldest is
    unloaded last. Other runs may share `folder`. Without a `run`, the function `agrees` of
    `publish` sets the policy.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        folder: Path,
        run: Path | None,
        base: Path,
        adapters: int,
    ) -> None:
        self._engines = engines
        self._run = run
        self._base = base
        self._adapters = adapters
        self._folder = folder.absolute()
        self._kept: dict[str, Path] = {}

    def publish(self, model: PreTrainedModel | PeftModel, version: str, agrees: Agrees) -> str:
        """See `Publisher.publish`."""
        if not isinstance(model, PeftModel):
            raise InputError(
                "the model has no LoRA adapter: train with a peft_config, or publish checkpoints"
            )
        self._engines.require_owned()
        name = weights.published_name(version)
        adapter = self._folder / name
        with weights.new_folder(adapter) as folder:
            save_adapter(model, folder, self._base)
        published = {**self._kept, name: adapter}
        with self._engines.loaded(published):
            agrees(name)
            if self._run is not None:
                weights.write_policy(self._run, name, version)

        self._kept = dict(list(published.items())[-self._adapters :])
        names = weights.names_of_run(version)

        def is_old(loaded: str) -> bool:
            return loaded.startswith(names) and loaded not in self._kept

        self._engines.unload(is_old)
        weights.keep_only(self._folder, version, self._kept.values())
        return name


Way = Literal["checkpoint", "lora"]


class Publisher(Protocol):
    """Interface of the classes that publish a model's weights to the engines."""

    def publish(
        self, model: PreTrainedModel | PeftModel, version: str, agrees: Agrees
    ) -> str | None:
        """Publish the weights of `model` as `version`, on all engines or none. No version is
        published twice.

        `agrees` is called when all engines serve the weights, and before they are the run's policy.
        It raises `EngineError` for engines that do not agree with the trainer. Calls that start
        after the return are sampled by the weights. Returns the name under which the engines serve
        them, None for the base model's. When it raises, policy and engines are as before. Calls
        that were sampled meanwhile have the version of their weights.

        `model` is unwrapped and its parameters are not sharded. Call it on the main process only.
        Raises `InputError` for a model that cannot be published this way, `RunError` when it cannot
        be saved, and `EngineError`, which names an engine that has lost its weights.
        """


def make_publisher(
    kind: Way,
    engines: Engines,
    *,
    folder: Path,
    run: Path,
    base: Path,
    adapters: int,
) -> Publisher:
    """Return the publisher of a recipe's `publish`.

    `folder` is for weights on their way to the engines, `run` the run folder, and `base` the
    recipe's model. `adapters` stay loaded. Raises `RunError` when checkpoints have no room in
    `folder`.
    """
    if kind == "lora":
        return LoraPublisher(
            engines,
            folder=folder,
            run=run,
            base=base,
            adapters=adapters,
        )
    return CheckpointPublisher(engines, folder=folder, run=run, base=base)
