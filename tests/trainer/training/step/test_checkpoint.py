"""Trainings by DDP and FSDP2 are those of one process, and any number of processes resumes them."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.checkpoint import load_trained, save_trained
from rolltap.trainer.training.step.distributed import is_main
from tests.deep import DEEP, cases
from tests.trainer.training.step.gloo import run_ranks
from tests.trainer.training.step.sharded import (
    CASES,
    SHARDINGS,
    folder_of,
    make_model,
    make_trainer,
    results,
    resumed,
    started,
)
from tests.trainer.training.step.tiny import largest_difference, relative_difference

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]

CHOSEN = cases(CASES, CASES.index("qwen3, an expert"), CASES.index("qwen3-moe, LoRA"))
RANKS = (2, 3) if DEEP else (2,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


def by_ranks(number, file, function):
    """Return what rank 0 of several finds."""

    def run(rank):
        torch.manual_seed(0)
        found = function()
        if is_main():
            torch.save(found, file)

    assert run_ranks(run, number, seconds=600) == [None] * number
    return torch.load(file)


@pytest.fixture(scope="module")
def one(folder):
    """Return what one process trains."""
    return started(folder, CHOSEN, 1, ["none"])


@pytest.fixture(scope="module")
def several(folder):
    """Return what several ranks train: number -> what rank 0 has."""
    found = {}
    for number in RANKS:
        train = partial(started, folder, CHOSEN, number)
        found[number] = by_ranks(number, folder / f"{number}.pt", train)
    return found


def assert_near(given, expected, case):
    """Assert that weights after a training, of about three steps of 1e-3, differ by rounding."""
    assert largest_difference(given, expected) < (2e-3 if "bfloat16" in case else 1e-6)


@pytest.mark.parametrize("case", CHOSEN)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_and_weights_are_those_of_one_process(one, several, ranks, sharding, case):
    expected = one["start", "none", case]
    near = 0.05 if "bfloat16" in case else 5e-6
    for rows in ("start", "empty"):
        given = several[ranks][rows, sharding, case]
        assert relative_difference(expected["gradients"], given["gradients"]) < near
    assert_near(several[ranks]["start", sharding, case]["weights"], expected["weights"], case)


@pytest.mark.parametrize("case", CHOSEN)
def test_a_training_that_is_resumed_is_bit_for_bit_the_one_without_a_break(one, several, case):
    for found in (one, *several.values()):
        for sharding in SHARDINGS:
            if ("start", sharding, case) in found:
                whole = found["start", sharding, case]["weights"]
                after = found["resumed", sharding, case]["weights"]
                assert largest_difference(whole, after) == 0


@pytest.mark.parametrize("case", CHOSEN)
def test_one_process_goes_on_from_what_several_saved(one, several, folder, case):
    ways = [(ranks, began, "none") for ranks in several for began in SHARDINGS]
    for weights in resumed(folder, case, ways).values():
        assert_near(weights, one["start", "none", case]["weights"], case)


EVERY_WAY = [
    (1, "none", "full"),
    (2, "full", "none"),
    (1, "none", "none"),
    (2, "full", "full"),
    (2, "none", "full"),
]
WAYS = cases(EVERY_WAY, 0, 1)


@pytest.mark.parametrize("case", CHOSEN if DEEP else CHOSEN[:1])
def test_three_processes_go_on_from_what_one_and_two_saved(one, several, folder, case):
    found = by_ranks(3, folder / "3-resumed.pt", partial(resumed, folder, case, WAYS))
    assert len(found) == len(WAYS)
    for weights in found.values():
        assert_near(weights, one["start", "none", case]["weights"], case)


def files(folder: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for file in (folder / "model").glob("*.safetensors"):
        weights |= load_file(file)
    return weights


@pytest.mark.parametrize("case", CHOSEN)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharded_weights_are_published_as_one_process_does_it(one, several, folder, sharding, case):
    expected = files(folder_of(folder, 1, "none", case))
    given = files(folder_of(folder, 2, sharding, case))
    assert given.keys() == expected.keys()
    is_low = "bfloat16" in case
    for name, weight in given.items():
        full = "lora" in name or not is_low
        assert weight.dtype == (torch.float32 if full else torch.bfloat16)
        apart = (weight.float() - expected[name].float()).abs().max()
        assert apart < (0.02 if is_low else 1e-6)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_process_writes_its_part(several, folder, sharding):
    parts = folder_of(folder, 2, sharding, CHOSEN[0]) / "checkpoint-2" / "trained"
    sizes = [file.stat().st_size for file in parts.glob("*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.4 * sum(sizes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint of one process."""
    out = tmp_path_factory.mktemp("saved")
    results(make_trainer("qwen3", "none", out, max_steps=2))
    return out / "checkpoint-2"


def test_the_state_of_transformers_marks_a_whole_checkpoint_and_is_written_last(saved):
    times = {path.name: path.stat().st_mtime_ns for path in saved.iterdir()}
    assert times.keys() == {"trained", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert max(times, key=times.get) == "trainer_state.json"
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 2


def test_the_oldest_checkpoints_beyond_the_limit_are_removed(tmp_path):
    make_trainer("qwen3", "none", tmp_path, save_steps=1, save_total_limit=2).train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-3"}


def test_a_checkpoint_of_another_kind_is_refused(tmp_path, saved):
    before = shutil.copytree(saved, tmp_path / "checkpoint-2")
    shutil.rmtree(before / "trained")
    with pytest.raises(InputError, match="is of another version of rolltap, or not whole"):
        make_trainer("qwen3", "none", tmp_path).train(resume_from_checkpoint=str(before))


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("more", torch.nn.Linear(2, 2), r"2 weights .* such as model\.more\.bias"),
        ("norm", torch.nn.Identity(), r"1 weights .* such as model\.norm\.weight"),
        ("norm", torch.nn.LayerNorm(7, bias=False), "cannot be written or read"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, name, layer, message):
    model = make_model("qwen3")
    setattr(model.model, name, layer)
    with pytest.raises(InputError, match=message):
        load_trained(model, saved)


def test_a_folder_that_cannot_be_written_ends_with_its_name(tmp_path):
    (tmp_path / "checkpoint-1").write_text("a file")
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InputError, match="checkpoint-1 cannot be written or read"):
        save_trained(model, tmp_path / "checkpoint-1", optimizer)


def test_the_weights_alone_are_loaded_into_a_model(saved):
    model = make_model("qwen3")
    before = model.model.norm.weight.clone()
    load_trained(model, saved)
    assert not torch.equal(model.model.norm.weight, before)
