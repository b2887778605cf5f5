"""Trainings of checkpoints whose weights have other names than the model's own, resumed."""

import random
from functools import partial

import pytest
import torch
from peft import LoraConfig
from rich.console import Console
from safetensors.torch import load_file, save_file

from rolltap.trainer.models.loading import load_policy
from rolltap.trainer.training.loop import train_to_end
from tests import tiny_checkpoints
from tests.trainer.training.grpo.tiny import Spy, largest_difference, make_trainer, record

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MAKERS = {
    "qwen3, tied": partial(tiny_checkpoints.qwen3, tied=True),
    "qwen3.5": tiny_checkpoints.qwen35,
    "qwen3.5, tied": partial(tiny_checkpoints.qwen35, tied=True),
    "qwen3-moe": tiny_checkpoints.qwen3_moe,
    "gemma3": tiny_checkpoints.gemma3,
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tokenizer_folder):
    """Return a function: name of a checkpoint -> its folder, and traces of its model."""
    made = {}

    def recorded(name):
        if name not in made:
            folder = MAKERS[name](tmp_path_factory.mktemp("model"), tokenizer_folder)
            made[name] = folder, record(load_policy(folder, "float32").eval(), random.Random(7))
        return made[name]

    return recorded


def trainer_of(recorded, dtype, out, lora=None, **config):
    """Return a trainer of four steps on a folder and its traces, and what it will see."""
    folder, traces = recorded
    torch.manual_seed(0)
    spy = Spy()
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    trainer = make_trainer(
        load_policy(folder, dtype), out, lambda rows: traces, spy=spy, peft_config=lora, **settings | config
    )
    return trainer, spy


def weights_of(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "dtype", "lora"),
    [(name, "bfloat16", None) for name in MAKERS]
    + [("qwen3.5", "float32", None), ("qwen3-moe", "float32", None), ("qwen3.5", "bfloat16", LORA)],
)
def test_a_training_that_is_resumed_is_the_training_without_a_break(tmp_path, recorded, name, dtype, lora):
    whole, seen = trainer_of(recorded(name), dtype, tmp_path / "whole", lora)
    whole.train()
    assert largest_difference(seen.weights[0], seen.weights[1]) > 0

    resumed, after = trainer_of(recorded(name), dtype, tmp_path / "resumed", lora)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert len(after.weights) == 2
    assert largest_difference(seen.weights[-1], after.weights[-1]) == 0

    finished, _ = trainer_of(recorded(name), dtype, tmp_path / "whole", lora)  # stopped before the model was saved
    assert largest_difference(weights_of(finished), seen.weights[-1]) > 0
    assert train_to_end(finished, Console(quiet=True)) == 4
    assert largest_difference(weights_of(finished), seen.weights[-1]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), r"lacks 1 weights that .*model\.norm\.weight"),
        (lambda weights: weights.update(other=torch.ones(1)), r"has 1 weights that .*other"),
    ],
)
def test_a_checkpoint_of_other_weights_is_refused(tmp_path, recorded, change, message):
    trainer, _ = trainer_of(recorded("qwen3, tied"), "float32", tmp_path, max_steps=2)
    trainer.train()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    resumed, _ = trainer_of(recorded("qwen3, tied"), "float32", tmp_path)
    with pytest.raises(ValueError, match=message):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_model_that_is_saved_on_request_has_the_names_of_its_checkpoint(tmp_path, recorded):
    trainer, _ = trainer_of(recorded("qwen3.5"), "float32", tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert any(name.startswith("model.language_model.") for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_the_card_beside_the_checkpoints_names_the_folder_of_the_base_model(tmp_path, recorded):
    trainer, _ = trainer_of(recorded("qwen3, tied"), "float32", tmp_path)
    trainer.create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    assert f"fine-tuned version of `{recorded('qwen3, tied')[0].name}`" in card
    assert "None" not in card
