"""Publication of a LoRA adapter, which the engines load beside the base model."""

from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from rolltap.addons.errors import InputError
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.published import Agrees, keep_only, names_of_run, published_name, save, write_policy
from rolltap.trainer.models.saving import save_adapter


class LoraPublisher:
    """Saves the adapter, and loads it into the engines under a new name, `policy-<version>`.

    Publishing does not wait for requests in flight: an engine request keeps the adapter that it started with. The
    newest `adapters` of the run stay loaded and on the disk, and an engine that was started again gets them back. The
    engines need `--max-cpu-loras` for one more: the oldest is unloaded last. Adapters of other runs stay. `folder` may
    be shared with other runs.
    """

    def __init__(self, engines: Engines, *, folder: Path, run: Path, base: Path, adapters: int) -> None:
        self._engines, self._run, self._base, self._adapters = engines, run, base, adapters
        self._folder = folder.absolute()
        self._kept: dict[str, Path] = {}

    def publish(self, model: PreTrainedModel | PeftModel, version: str, agrees: Agrees) -> str:
        """See `Publisher.publish`."""
        if not isinstance(model, PeftModel):
            raise InputError("the model has no LoRA adapter: train with a peft_config, or publish checkpoints")
        self._engines.require_owned()
        name = published_name(version)
        adapter = self._folder / name
        save(adapter, lambda folder: save_adapter(model, folder, self._base))
        published = {**self._kept, name: adapter}
        with self._engines.loaded(published):
            agrees(name)
            write_policy(self._run, name, version)

        self._kept = dict(list(published.items())[-self._adapters :])
        names = names_of_run(version)
        self._engines.unload(lambda loaded: loaded.startswith(names) and loaded not in self._kept)
        keep_only(self._folder, version, self._kept.values())
        return name
