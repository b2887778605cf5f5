"""Publication of a full checkpoint, which the engines reload."""

from pathlib import Path

from peft import PeftModel
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from rolltap.addons.errors import InputError
from rolltap.trainer.engine.engines import Engines, Weights
from rolltap.trainer.engine.published import base_version, keep_only, published_name, save, write_policy
from rolltap.trainer.models.saving import save_weights


class CheckpointPublisher:
    """Saves the model, and makes the engines reload it. An adapter is merged into the saved copy.

    During the reload all engines are paused: they finish the requests in flight first, and new ones wait. So no engine
    request is sampled by two versions. A call that is continued after an engine failure takes several requests.
    `folder` may be shared with other runs. The published checkpoint stays there: a publication that fails goes back
    to it, or to the model in `base` if there is none.
    """

    def __init__(self, engines: Engines, *, folder: Path, run: Path, base: Path) -> None:
        self._engines, self._run, self._base = engines, run, base
        self._folder = folder.absolute()
        self._served: Weights | None = None

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
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
        require_fits(new.folder, self._base)
        self._engines.reload(new, old)
        write_policy(self._run, None, version)
        self._served = new
        keep_only(self._folder, version, [new.folder])


def require_fits(checkpoint: Path, base: Path) -> None:
    """Raise `InputError` for a checkpoint that would destroy an engine which serves `base`.

    A missing or a damaged file leaves vLLM 0.32 without weights, and so does a tensor of another shape, after which it
    cannot even load the old ones again.
    """
    if not (checkpoint / "config.json").is_file() or not any(checkpoint.glob("*.safetensors")):
        raise InputError(
            f"{checkpoint} is not a checkpoint: it needs config.json and *.safetensors; the engines are unchanged"
        )
    known = _shapes(base)
    for name, shape in _shapes(checkpoint).items():
        if known.get(name, shape) != shape:
            raise InputError(
                f"{checkpoint}: {name} has the shape {shape}, and {known[name]} in {base}; the engines are unchanged"
            )


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return tensor name -> shape from the headers of a folder's *.safetensors. Raises `InputError`."""
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file} cannot be read: {error}; the engines are unchanged") from error
    return shapes
