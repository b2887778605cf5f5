import json

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from rolltap.trainer.training.step.pack import Pack, TraceRow
from tests.bench import training
from tests.bench.flops import Work, costs, of_pack, of_padded, step_flops
from tests.bench.groups import (
    LONG,
    SHAPES,
    SHORT,
    SHORT_SCALE,
    generate,
    rows_of,
    sessions_of,
    single,
)
from tests.bench.networks import network
from tests.bench.steps import Variant, run_steps

# PEFT asks for it
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def make_network(name="tiny", device="cpu", dtype=torch.float32, lora=False):
    return network(name, device=device, dtype=dtype, lora=lora)


@pytest.fixture(scope="module")
def batch():
    return generate(SHAPES["8k, 20 to 40"], scale=200, vocabulary=128, seed=0)


@pytest.fixture(scope="module")
def rows(batch):
    return rows_of(batch)


def long_group(seed=0):
    return generate(LONG, scale=100, vocabulary=128, seed=seed)


def test_a_group_has_a_shared_prompt_forks_and_the_same_tokens_for_the_same_seed():
    batch = long_group()
    assert len(batch.rewards) == 8
    # two sessions are compacted, one has a sub-agent
    assert len(batch.traces) == 11
    assert {trace.role for trace in batch.traces} == {"agent", "compaction", "subagent"}
    assert batch.ledger.trained == sum(len(row.scored) for row in rows_of(batch))
    prompts = {tuple(trace.prompt_ids[:200]) for trace in batch.traces if trace.role != "subagent"}
    assert len(prompts) == 1
    assert long_group() == batch != long_group(seed=1)


def test_short_sessions_have_about_200_tokens_and_a_single_trace_as_many_as_asked():
    rows = rows_of(generate(SHORT, scale=SHORT_SCALE, vocabulary=128, seed=0))
    assert len(rows) == 8
    assert 150 < sum(len(row.ids) for row in rows) / 8 < 300
    batch = single(1000, vocabulary=128)
    assert [len(row.ids) for row in rows_of(batch)] == [1000]
    assert {reward.reward for reward in batch.rewards.values()} == {0.0, 1.0}


def test_operations_are_those_that_torch_counts():
    model = make_network()
    model.config._attn_implementation = "eager"
    model_costs = costs(model)
    ids = torch.ones(2, 96, dtype=torch.long)
    tokens = ids.numel()
    # eager attention computes every pair, and its backward pass two products for each of forward's
    pairs = tokens * 96 * model_costs.pair
    with FlopCounterMode(display=False) as forward:
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state
    with FlopCounterMode(display=False) as backward:
        hidden.sum().backward()
    assert forward.get_total_flops() == tokens * model_costs.forward + pairs
    assert backward.get_total_flops() == tokens * model_costs.backward + 2 * pairs
    # checkpointing runs all but the last linear layer of a layer again
    model.activation_checkpointing_enable()
    with FlopCounterMode(display=False) as counter:
        model.get_decoder()(input_ids=ids).last_hidden_state.sum().backward()
    work = Work(tokens, 0, 0)
    assert counter.get_total_flops() == step_flops(model_costs, work) + 4 * pairs


def test_an_adapter_saves_the_weights_gradients_and_linear_attention_has_no_pairs():
    full = costs(make_network())
    adapter = costs(make_network(lora=True))
    hybrid = costs(make_network("tiny-hybrid"))
    assert full.backward == 2 * full.forward
    assert adapter.backward < 2 * adapter.forward
    assert adapter.pair == full.pair == 4 * hybrid.pair


def test_work_of_padded_rows_has_padding_and_work_of_a_pack_has_each_shared_token_once(rows):
    whole = of_padded(rows, [[i] for i in range(len(rows))])
    together = of_padded(rows, [range(len(rows))])
    assert whole.tokens == sum(len(row.ids) for row in rows)
    assert together.tokens == len(rows) * max(len(row.ids) for row in rows)
    assert whole.scored == together.scored == sum(len(row.scored) for row in rows)
    packed = of_pack(Pack([rows]))
    assert packed.tokens < whole.tokens
    assert packed.scored == whole.scored
    # a row alone is the same work, but for the tokens after its last scored one
    alone = of_pack(Pack([rows[:1]]))
    cut = TraceRow(rows[0].ids[: rows[0].scored[-1]], rows[0].scored)
    assert alone == of_padded([cut], [[0]])


def test_micro_batches_have_all_rows_of_their_sessions(batch):
    sessions = sessions_of(batch)
    assert [len(rows) for rows in sessions].count(2) == 3
    for number in (1, 3, 20):
        parts = training.row_parts(sessions, number)
        assert len(parts) == number
        assert sorted(row for part in parts for row in part) == [*range(len(batch.traces))]


def test_every_way_to_run_a_group_has_the_same_gradients(batch):
    model = make_network()
    expected = run_steps(model, batch, Variant("padded"), 1, gradients=True).gradients
    norm = torch.nn.utils.get_total_norm(expected.values())
    unchecked = Variant("packed", 2, checkpointing=False)
    for variant in (Variant("padded", 3), Variant("packed"), unchecked):
        watch = run_steps(model, batch, variant, 2, gradients=True)
        assert len(watch.seconds) == 2
        assert watch.gradients.keys() == expected.keys()
        differences = [watch.gradients[name] - expected[name] for name in expected]
        assert torch.nn.utils.get_total_norm(differences) < 1e-5 * norm, variant


@pytest.fixture
def small(monkeypatch):
    """Make all batches small."""
    sizes = {
        "SINGLE": {"cpu": 100},
        "BRANCHES": (2, 3),
        "SESSIONS_AT_ONCE": (2, 4),
    }
    for name, size in sizes.items():
        monkeypatch.setattr(training, name, size)


@pytest.mark.deep
def test_every_part_is_measured(small, tmp_path):
    out = tmp_path / "figures.json"
    options = ["--model", "tiny-hybrid", "--scale", "200", "--rounds", "1", "--json", str(out)]
    result = CliRunner().invoke(training.main, options, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(out.read_text())
    assert set(found) == {"environment", *training.PARTS}
    batches = [*SHAPES, "one trace", "short, no checkpointing"]
    assert [row["batch"] for row in found["groups"]] == batches
    for row in found["groups"]:
        assert 0 < row["flops_ratio"] < 1
        assert row["forwarded"] == row["tokens_packed"] < row["tokens"]
        assert min(row["packed"], row["padded"]) > 0
    assert [row["segments"] for row in found["trees"]] == [7, 13]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_a_step_that_does_not_fit_has_no_time_with_the_options_of_a_cuda_device(
    name, small, monkeypatch
):
    def full(model, batch, variant, steps):
        if variant.forward == "padded":
            raise torch.OutOfMemoryError("a device that is full")
        return run_steps(model, batch, variant, steps)

    monkeypatch.setattr(training, "run_steps", full)
    bench = training.Training(name, "cpu", scale=400, rounds=1)
    bench.options = {"dtype": torch.bfloat16, "lora": True}
    for row in bench.groups():
        assert (row["padded"], row["ratio"]) == (None, None)
        assert row["packed"] > 0


def test_a_machine_without_a_cuda_device_is_told_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = CliRunner().invoke(training.main, ["--device", "cuda"])
    assert result.exit_code == 1
    assert "torch finds no CUDA device" in result.output


@pytest.mark.parametrize("name", ["4b", "4b-hybrid"])
def test_the_models_of_real_dimensions_have_four_billion_parameters(name):
    model = make_network(name, device="meta", dtype=torch.bfloat16)
    assert 3.5e9 < sum(parameter.numel() for parameter in model.parameters()) < 5e9
