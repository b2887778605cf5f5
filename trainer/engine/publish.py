"""Publication of new weights to running engines: the interface of its ways.

The engines read weights from disk, unless these are transferred between GPUs. They must see the publisher's folder
under the same path.
"""

from pathlib import Path
from typing import Literal, Protocol

from peft import PeftModel
from transformers import PreTrainedModel

from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish_checkpoint import CheckpointPublisher
from rolltap.trainer.engine.publish_lora import LoraPublisher
from rolltap.trainer.engine.publish_transfer import TransferPublisher
from rolltap.trainer.engine.published import Agrees

Way = Literal["checkpoint", "lora", "nccl"]


class Publisher(Protocol):
    """Interface of the classes that publish a model's weights to the engines."""

    def publish(self, model: PreTrainedModel | PeftModel, version: str, agrees: Agrees) -> str | None:
        """Publish the weights of `model` as `version`, on all engines or none. No version is published twice.

        `agrees` is called when all engines serve the weights, and before they are the run's policy. It raises
        `EngineError` for engines that do not agree with the trainer. Calls that start after the return are sampled by
        the weights. Returns the name under which the engines serve them, None for the base model's. When it raises,
        the run's policy and what the engines serve are as before. Calls that were sampled meanwhile have the version
        of their weights.

        `model` is unwrapped and its parameters are not sharded. Call it on the main process only. Raises `InputError`
        for a model that cannot be published this way, `RunError` when it cannot be saved, and `EngineError`, which
        names an engine that has lost its weights.
        """


def make_publisher(kind: Way, engines: Engines, *, folder: Path, run: Path, base: Path, adapters: int) -> Publisher:
    """Return the publisher of a recipe's `publish`.

    `folder` is for weights on their way to the engines, `run` the run folder, and `base` the recipe's model. `adapters`
    stay loaded. Raises `InputError` when the machine lacks what a transfer over NCCL needs.
    """
    if kind == "lora":
        return LoraPublisher(engines, folder=folder, run=run, base=base, adapters=adapters)
    if kind == "nccl":
        return TransferPublisher(engines, run=run, base=base)
    return CheckpointPublisher(engines, folder=folder, run=run, base=base)
