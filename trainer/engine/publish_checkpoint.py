"""Publication of a full checkpoint, which the engines reload."""

from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from rolltap.addons.errors import InputError
from rolltap.trainer.engine.engines import Engines, Weights
from rolltap.trainer.engine.published import (
    OTHER_BASE,
    Agrees,
    base_version,
    keep_only,
    published_name,
    save,
    write_policy,
)
from rolltap.trainer.models.saving import save_weights


class CheckpointPublisher:
    """Saves the model, and makes the engines reload it. An adapter is merged into the saved copy.

    During the reload all engines are paused: they finish the requests in flight first, and new ones wait. So no engine
    request is sampled by two versions. A call that is continued after an engine failure takes several requests.
    Adapters are unloaded: they were made for other weights of the base model.
    `folder` may be shared with other runs. The published checkpoint stays there: a publication that fails goes back
    to it, or to the model in `base` if there is none.
    """

    def __init__(self, engines: Engines, *, folder: Path, run: Path, base: Path) -> None:
        self._engines, self._run, self._base = engines, run, base
        self._folder = folder.absolute()
        self._served: Weights | None = None

    def publish(self, model: PreTrainedModel | PeftModel, version: str, agrees: Agrees) -> None:
        """See `Publisher.publish`."""
        if model.config.tie_word_embeddings and self._engines.runs_on_cpu():
            raise InputError(
                "the model ties its input and output embeddings, and vLLM on CPU keeps the old output embeddings on a "
                "reload: untie them before the engine is started (tie_word_embeddings=false and a saved lm_head), or "
                "publish LoRA adapters"
            )
        self._engines.require_owned()
        old = self._served or Weights(self._base, base_version(version))
        keep_only(self._folder, version, [old.folder])
        new = Weights(self._folder / published_name(version), version)
        save(new.folder, lambda folder: save_weights(model, folder, self._base))
        require_complete(new.folder)
        with self._engines.reloaded(new, old):
            agrees(None)
            write_policy(self._run, None, version)
        self._served = new
        self._engines.unload(lambda _: True, OTHER_BASE)
        keep_only(self._folder, version, [new.folder])


def require_complete(checkpoint: Path) -> None:
    """Raise `InputError` for a folder without a model: vLLM 0.32 drops its weights before it looks for new ones."""
    if not (checkpoint / "config.json").is_file() or not any(checkpoint.glob("*.safetensors")):
        raise InputError(
            f"{checkpoint} is not a checkpoint: it needs config.json and *.safetensors; the engines are unchanged"
        )
