"""New weights into a running vLLM: as a checkpoint that it reloads, or as a LoRA adapter that it adds.

The engine reads the weights from disk: it must see the publisher's folder under the same path.
"""

import copy
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from peft import PeftModel
from transformers import PreTrainedModel

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.engine.admin import EngineAdmin


class Publisher(Protocol):
    """Brings a model's weights into the engine."""

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """Returns when every call that starts from now on is sampled by `model`, under the name `version`.

        `model` is the unwrapped model with whole parameters; call it on the main process only. Raises `InputError`.
        """


class CheckpointPublisher:
    """Saves the whole model and has the engine reload it; an adapter is merged into the saved copy.

    The engine finishes the calls in flight first, and holds new ones back, so that no call mixes versions. `folder`
    holds the newest checkpoint.
    """

    def __init__(self, engine_url: str, folder: Path, run: Path) -> None:
        self._engine = EngineAdmin(engine_url)
        self._folder = folder.absolute()
        self._run = run
        self._previous: Path | None = None

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """See `Publisher.publish`. A failure after the engine began to reload leaves it without a usable model."""
        if model.config.tie_word_embeddings and self._engine.runs_on_cpu():
            raise InputError(
                "the model ties its input and output embeddings, and vLLM on CPU keeps the old output embeddings on a "
                "reload: untie them before the engine is started (tie_word_embeddings=false and a saved lm_head), or "
                "publish LoRA adapters"
            )
        checkpoint = self._folder / f"policy-{version}"
        _save(checkpoint, _merged(model).save_pretrained)
        # a reload that fails leaves vLLM 0.32 without weights, and the next call ends it
        if not (checkpoint / "config.json").is_file() or not any(checkpoint.glob("*.safetensors")):
            raise InputError(
                f"{checkpoint} is not a checkpoint: it needs config.json and *.safetensors; the engine was not touched"
            )
        with self._engine.paused():
            self._engine.reload_weights(checkpoint)
            self._engine.reset_prefix_cache()
            self._engine.set_weight_version(version)
        _write_policy(self._run, None, version)
        if self._previous not in (None, checkpoint):
            shutil.rmtree(self._previous)
        self._previous = checkpoint


class LoraPublisher:
    """Saves the adapter and adds it to the engine under a name of its own, `policy-<version>`.

    Nothing waits: a call keeps the adapter that it started with. The newest two stay loaded, so the engine needs
    `--max-cpu-loras` 3 or more.
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
        # vLLM's prefix cache knows an adapter by name and path, and a resumed run publishes a version again
        adapter = self._folder / f"{name}-{time.time_ns():x}"
        _save(adapter, lambda folder: model.save_pretrained(folder, save_embedding_layers=False))
        loaded = self._engine.models().adapters
        if name in loaded:
            self._engine.unload_adapter(name)
        self._engine.load_adapter(name, adapter)
        _write_policy(self._run, name, version)

        self._kept.append((name, adapter))
        dropped, self._kept = self._kept[:-2], self._kept[-2:]
        for old in loaded - {name for name, _ in self._kept}:
            if old.startswith("policy-"):
                self._engine.unload_adapter(old)
        for _, folder in dropped:
            shutil.rmtree(folder)


def _merged(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    # a copy, because merge_adapter and unmerge_adapter leave rounding errors in the weights that are trained
    return copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model


def _save(target: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder that appears as `target`, in the place of an older one, when it is complete."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise RunError(f"{target} could not be written: {error}; the engine was not touched") from error


def _write_policy(run: Path, model: str | None, version: str) -> None:
    """Tell the recorder which weights are the policy now, and under which model name the engine serves them."""
    write_atomically(run / POLICY_FILE, json.dumps({"model": model, "version": version}) + "\n")
