"""Trainings on two gloo ranks, resumed ones and skipped steps."""

import math
import random

import pytest
import torch
from peft import LoraConfig
from rich.console import Console
from safetensors.torch import load_file, save_file

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import load_policy
from rolltap.trainer.training.loop import train_to_end
from tests.deep import cases
from tests.trainer.models.conftest import MAKERS
from tests.trainer.training.grpo.gloo import run_two
from tests.trainer.training.grpo.replicated import CASES, RESUMED, resumed, spoil, two_steps, whole
from tests.trainer.training.grpo.tiny import largest_difference, make_trainer, record, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the weights of one rank, of rank 0 of two, and of rank 1 of two."""
    folder = tmp_path_factory.mktemp("replicated")
    one = {"two steps": two_steps(folder, 1), "whole": whole(folder, 1), "resumed": resumed(folder, 1, 1)}
    run_two("tests.trainer.training.grpo.replicated", str(folder))
    one["resumed from two"] = resumed(folder, 2, 1)
    return one, torch.load(folder / "rank-0.pt"), torch.load(folder / "rank-1.pt"), folder


@pytest.mark.parametrize("case", CASES)
def test_two_steps_of_two_ranks_are_those_of_one(found, case):
    one, first, second, _ = found
    assert largest_difference(first["two steps"][case], second["two steps"][case]) == 0
    assert largest_difference(one["two steps"][case], first["two steps"][case]) < 1e-5


@pytest.mark.parametrize("case", RESUMED)
def test_a_training_that_is_resumed_is_the_training_without_a_break(found, case):
    one, first, second, _ = found
    assert largest_difference(one["whole"][case], one["resumed"][case]) == 0
    assert largest_difference(first["whole"][case], first["resumed"][case]) == 0
    assert largest_difference(second["whole"][case], first["resumed"][case]) == 0


@pytest.mark.parametrize("case", RESUMED)
def test_another_number_of_ranks_may_resume_it(found, case):
    one, first, second, _ = found
    assert largest_difference(one["whole"][case], one["resumed from two"][case]) < 1e-5
    assert largest_difference(one["whole"][case], first["resumed from one"][case]) < 1e-5
    assert largest_difference(second["resumed from one"][case], first["resumed from one"][case]) == 0


def test_a_gradient_that_is_no_number_on_one_rank_skips_the_step_of_all(found):
    _, first, second, _ = found
    for ours, others in zip(first["spoiled"], second["spoiled"], strict=True):
        assert largest_difference(ours, others) == 0
        assert all(weight.isfinite().all() for weight in ours.values())
    assert largest_difference(*first["spoiled"]) > 0


def test_each_rank_saves_its_own_share_of_a_full_model(found):
    folder = found[-1]
    for case in RESUMED:
        names = {file.name for file in (folder / "2" / case / "checkpoint-2" / "state").glob("*.distcp")}
        assert names == (set() if "LoRA" in case else {"__0_0.distcp", "__1_0.distcp"})


CHECKPOINTS = ("qwen3-tied", "qwen3.5", "qwen3.5-tied", "qwen3-moe", "gemma3")
LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


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
    """Return a trainer of four steps on a folder and its traces."""
    folder, traces = recorded
    torch.manual_seed(0)
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    return make_trainer(load_policy(folder, dtype), out, traces, peft_config=lora, **settings | config)


def weights_of(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "dtype", "lora"),
    cases(
        [
            *((name, "bfloat16", None) for name in CHECKPOINTS),
            *((name, "float32", None) for name in ("qwen3.5", "qwen3-moe")),
            ("qwen3.5", "bfloat16", LORA),
        ],
        *(0, 6, 7),
    ),
)
def test_a_training_of_a_checkpoint_is_resumed_as_if_without_a_break(tmp_path, recorded, name, dtype, lora):
    whole = trainer_of(recorded(name), dtype, tmp_path / "whole", lora)
    whole.train()
    seen = whole.spy.weights
    assert largest_difference(seen[0], seen[1]) > 0

    resumed = trainer_of(recorded(name), dtype, tmp_path / "resumed", lora)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert len(resumed.spy.weights) == 2
    assert largest_difference(seen[-1], resumed.spy.weights[-1]) == 0

    finished = trainer_of(recorded(name), dtype, tmp_path / "whole", lora)  # stopped before the model was saved
    assert largest_difference(weights_of(finished), seen[-1]) > 0
    assert train_to_end(finished, Console(quiet=True)) == 4
    assert largest_difference(weights_of(finished), seen[-1]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), r"lacks 1 weights that .*model\.norm\.weight"),
        (lambda weights: weights.update(other=torch.ones(1)), r"has 1 weights that .*other"),
    ],
)
def test_a_checkpoint_of_other_weights_is_refused(tmp_path, recorded, change, message):
    trainer = trainer_of(recorded("qwen3-tied"), "float32", tmp_path, max_steps=2)
    trainer.train()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    resumed = trainer_of(recorded("qwen3-tied"), "float32", tmp_path)
    with pytest.raises(ValueError, match=message):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_a_model_as_sharded_trainings_save_it_is_refused(tmp_path, recorded):
    trainer_of(recorded("qwen3-tied"), "float32", tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    resumed = trainer_of(recorded("qwen3-tied"), "float32", tmp_path)
    with pytest.raises(InputError, match=r"checkpoint-2 has no weights: .*; resume with the sharding that saved it"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_model_that_is_saved_on_request_has_the_names_of_its_checkpoint(tmp_path, recorded):
    trainer = trainer_of(recorded("qwen3.5"), "float32", tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert any(name.startswith("model.language_model.") for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_the_card_beside_the_checkpoints_names_the_folder_of_the_base_model(tmp_path, recorded):
    trainer = trainer_of(recorded("qwen3-tied"), "float32", tmp_path)
    trainer.create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    assert f"fine-tuned version of `{recorded('qwen3-tied')[0].name}`" in card
    assert "None" not in card


def changed(trainer):
    """Return the names of the weights that the second step changed."""
    first, second = trainer.spy.weights
    return {name for name in first if not torch.equal(first[name], second[name])}


def steps_skipped(trainer):
    return [entry["steps_skipped"] for entry in trainer.state.log_history if "steps_skipped" in entry]


TRAINED = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, LORA)]


@pytest.mark.parametrize(
    ("dtype", "lora", "bad"),
    cases([(*kind, bad) for bad in (math.nan, math.inf, -math.inf) for kind in TRAINED], 0, 2, 4, 6),
)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_and_the_next_does(
    tmp_path, caplog, dtype, lora, bad
):
    model = tiny_model()
    traces = record(model, random.Random(0))
    settings = {"max_steps": 2, "weight_decay": 0.1, "max_grad_norm": 1.0}
    trainer = make_trainer(model.to(dtype), tmp_path, traces, peft_config=lora, **settings)
    begun = weights_of(trainer)
    spoil(trainer, bad)
    trainer.train()
    assert trainer.spy.gradients[0] == {}
    assert all(torch.equal(begun[name], weight) for name, weight in trainer.spy.weights[0].items())
    assert changed(trainer)
    assert all(weight.isfinite().all() for weight in trainer.spy.weights[1].values())
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {1}
    assert steps_skipped(trainer) == [1, 0]
    assert "step 1 was skipped: its gradients are not finite" in caplog.text


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_model_in_float16_is_refused_with_an_adapter_too(tmp_path, lora):
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is in float16, .*: load the model in bfloat16 or"):
        make_trainer(tiny_model().half(), tmp_path, [], peft_config=lora)
