"""The model card that TRL writes beside checkpoints."""

from pathlib import Path
from typing import Any

from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from rolltap.trainer.model_names import public_model

_NO_BASE = "[None](https://huggingface.co/None)"
"""What TRL 1.16 calls a base model that is a local folder."""


class CardTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose model card names a base model that is a local folder. TRL leaves it out."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's card, with the name of the base model."""
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir, "README.md")
        base = public_model(get_config_model_id(self.model.config))
        if self.is_world_process_zero() and base:
            card.write_text(card.read_text(encoding="utf-8").replace(_NO_BASE, f"`{base}`"), encoding="utf-8")
