"""Publication of new weights to a running vLLM: as a checkpoint that it reloads, or as a LoRA adapter that it loads.

The engine reads the weights from disk. It must see the publisher's folder under the same path.
"""

import copy
import json
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from peft import PeftModel
from transformers import PreTrainedModel

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.engine.admin import EngineAdmin


class Publisher(Protocol):
    """Interface of the classes that publish a model's weights to the engine."""

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """Publish the weights of `model` as `version`. Calls that start after the return are sampled by them.

        `model` is unwrapped and its parameters are not sharded. Call it on the main process only. Raises `InputError`
        for a model that cannot be published this way, `RunError` when it cannot be saved, and `EngineError`.
        """


class CheckpointPublisher:
    """Saves the full model, and makes the engine reload it. An adapter is merged into the saved copy.

    During the reload the engine is paused: it finishes the requests in flight first, and new ones wait. So no engine
    request is sampled by two versions. A call that is continued after an engine failure takes several requests.
    `folder` is the publisher's own: it keeps the newest checkpoint and nothing else.
    """

    def __init__(self, engine_url: str, folder: Path, run: Path) -> None:
        self._engine = EngineAdmin(engine_url)
        self._folder = folder.absolute()
        self._run = run

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """See `Publisher.publish`. A failure during the reload may leave the engine without usable weights."""
        if model.config.tie_word_embeddings and self._engine.runs_on_cpu():
            raise InputError(
                "the model ties its input and output embeddings, and vLLM on CPU keeps the old output embeddings on a "
                "reload: untie them before the engine is started (tie_word_embeddings=false and a saved lm_head), or "
                "publish LoRA adapters"
            )
        checkpoint = self._folder / f"policy-{version}"
        _save(checkpoint, _merged(model).save_pretrained)
        # after a failed reload vLLM 0.32 has no weights, and the next call crashes it
        if not (checkpoint / "config.json").is_file() or not any(checkpoint.glob("*.safetensors")):
            raise InputError(
                f"{checkpoint} is not a checkpoint: it needs config.json and *.safetensors; the engine is unchanged"
            )
        with self._engine.paused():
            self._engine.reload_weights(checkpoint)
            self._engine.reset_prefix_cache()
            self._engine.set_weight_version(version)
        _write_policy(self._run, None, version)
        _keep_only(self._folder, [checkpoint])


class LoraPublisher:
    """Saves the adapter, and loads it into the engine under a new name, `policy-<version>`.

    Publishing does not wait for requests in flight: an engine request keeps the adapter that it started with. The two
    newest adapters of the run stay loaded, and a third is loaded before the oldest is unloaded: the engine needs
    `--max-cpu-loras` 3 or more. Adapters of other runs (`policy-<run>.`) stay. `folder` is the publisher's own: it
    keeps these two adapters and nothing else.
    """

    def __init__(self, engine_url: str, folder: Path, run: Path) -> None:
        self._engine = EngineAdmin(engine_url)
        self._folder = folder.absolute()
        self._run = run
        self._kept: list[tuple[str, Path]] = []

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """See `Publisher.publish`."""
        if not isinstance(model, PeftModel):
            raise InputError("the model has no LoRA adapter: train with a peft_config, or publish checkpoints")
        name = f"policy-{version}"
        # vLLM's prefix cache identifies an adapter by name and path: a version that is published again has a new path
        adapter = self._folder / f"{name}-{time.time_ns():x}"
        _save(adapter, lambda folder: model.save_pretrained(folder, save_embedding_layers=False))
        loaded = self._engine.models().adapters
        if name in loaded:
            self._engine.unload_adapter(name)
        self._engine.load_adapter(name, adapter)
        _write_policy(self._run, name, version)

        self._kept.append((name, adapter))
        self._kept = self._kept[-2:]
        of_this_run = f"policy-{version.partition('.')[0]}."
        for old in loaded - {name for name, _ in self._kept}:
            if old.startswith(of_this_run):
                self._engine.unload_adapter(old)
        _keep_only(self._folder, [folder for _, folder in self._kept])


def _merged(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    # a copy: merge_adapter followed by unmerge_adapter would leave rounding errors in the trained weights
    return copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model


def _save(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a hidden folder, then rename it to `target`, replacing an older one."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise RunError(f"{target} could not be written: {error}; the engine is unchanged") from error


def _keep_only(folder: Path, kept: Collection[Path]) -> None:
    """Remove all other weights from a publisher's folder: older ones, and those that a killed training left there."""
    for path in [*folder.glob("policy-*"), *folder.glob(".policy-*")]:
        if path not in kept:
            shutil.rmtree(path)


def _write_policy(run: Path, model: str | None, version: str) -> None:
    """Write the policy file, from which the recorder reads the current version and its model name in the engine.

    `model` None is the base model.
    """
    write_atomically(run / POLICY_FILE, json.dumps({"model": model, "version": version}) + "\n")


def make_publisher(kind: str, engines: Any, *, folder: Path, run: Path, base: Path, adapters: int) -> Publisher:
    return _Named(
        LoraPublisher(engines.urls[0], folder, run)
        if kind == "lora"
        else CheckpointPublisher(engines.urls[0], folder, run),
        kind,
    )


class _Named:
    def __init__(self, publisher: Any, kind: str) -> None:
        self.publisher, self.kind = publisher, kind

    def publish(self, model: Any, version: str) -> Any:
        self.publisher.publish(model, version)
        return f"policy-{version}" if self.kind == "lora" else None
