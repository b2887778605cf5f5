"""The model card that TRL writes beside checkpoints."""

from pathlib import Path
from typing import Any

from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from rolltap.trainer.model_names import public_model

_NO_BASE = "[None](https://huggingface.co/None)"
_NO_HUB = 'model="None"'
"""TRL 1.16 writes these for a base model in a local folder, and for a model that is not pushed to the Hub."""


class CardTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose model card names a base model that is a local folder. TRL leaves it out."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's card, with the name of the base model."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            card = Path(self.args.output_dir, "README.md")
            base = public_model(get_config_model_id(self.model.config)) or "a model without a name"
            text = card.read_text(encoding="utf-8").replace(_NO_BASE, f"`{base}`")
            card.write_text(text.replace(_NO_HUB, 'model="path/to/this/folder"'), encoding="utf-8")
