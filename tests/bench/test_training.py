import json

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from tests.bench import training
from tests.bench.flops import Work, costs, of_padded, of_pieces, step_flops
from tests.bench.groups import LONG, SHAPES, SHORT, SHORT_SCALE, generate, rows_of, single
from tests.bench.networks import network, state_bytes
from tests.bench.steps import Variant, run_steps

# PEFT asks for it
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CPU = {"device": "cpu", "dtype": torch.float32, "lora": False}


def small_group():
    return generate(SHAPES["8k, 20 to 40"], scale=200, vocabulary=128, seed=0)


def test_a_group_has_a_shared_prompt_forks_and_the_same_tokens_for_the_same_seed():
    batch = generate(LONG, scale=100, vocabulary=128, seed=0)
    assert len(batch.rewards) == 8
    # two sessions are compacted, one has a sub-agent
    assert len(batch.traces) == 11
    assert {trace.role for trace in batch.traces} == {"agent", "compaction", "subagent"}
    assert batch.ledger.trained == sum(len(row.scored) for row in rows_of(batch))
    prompts = [tuple(trace.prompt_ids[:200]) for trace in batch.traces if trace.role != "subagent"]
    assert len(set(prompts)) == 1
    assert generate(LONG, scale=100, vocabulary=128, seed=0) == batch
    assert generate(LONG, scale=100, vocabulary=128, seed=1) != batch


def test_short_sessions_have_about_200_tokens_and_a_single_trace_as_many_as_asked():
    rows = rows_of(generate(SHORT, scale=SHORT_SCALE, vocabulary=128, seed=0))
    assert len(rows) == 8
    assert 150 < sum(len(row.ids) for row in rows) / 8 < 300
    batch = single(1000, vocabulary=128)
    assert [len(row.ids) for row in rows_of(batch)] == [1000]
    assert {reward.reward for reward in batch.rewards.values()} == {0.0, 1.0}


def test_operations_are_those_that_torch_counts():
    model = network("tiny", **CPU)
    model.config._attn_implementation = "eager"
    model_costs = costs(model)
    # eager attention computes every pair, and its backward pass two products for each of forward's
    rows, length = 2, 96
    tokens, pairs = rows * length, rows * length * length * model_costs.pair
    with FlopCounterMode(display=False) as forward:
        hidden = model.get_decoder()(input_ids=torch.ones(rows, length, dtype=torch.long)).last_hidden_state
    with FlopCounterMode(display=False) as backward:
        hidden.sum().backward()
    assert forward.get_total_flops() == tokens * model_costs.forward + pairs
    assert backward.get_total_flops() == tokens * model_costs.backward + 2 * pairs
    # checkpointing runs all but the last linear layer of a layer again; segments run all again
    model.activation_checkpointing_enable()
    with FlopCounterMode(display=False) as counter:
        model.get_decoder()(input_ids=torch.ones(rows, length, dtype=torch.long)).last_hidden_state.sum().backward()
    work = Work(tokens, 0, 0)
    layers = step_flops(model_costs, work, "layers")
    assert counter.get_total_flops() == layers + 4 * pairs
    assert step_flops(model_costs, work, "segments") == layers + tokens * model_costs.last


def test_an_adapter_saves_the_weights_gradients_and_linear_attention_has_no_pairs():
    full, adapter, hybrid = (
        costs(network(name, **CPU | {"lora": lora}))
        for name, lora in (("tiny", False), ("tiny", True), ("tiny-hybrid", False))
    )
    assert full.backward == 2 * full.forward
    assert adapter.backward < 2 * adapter.forward
    assert adapter.pair == full.pair == 4 * hybrid.pair
    assert state_bytes(network("tiny-hybrid", **CPU)) == state_bytes(network("tiny", **CPU)) / 4


def test_work_of_padded_rows_has_padding_and_work_of_pieces_has_what_they_follow():
    rows = rows_of(small_group())
    whole = of_padded(rows, [[i] for i in range(len(rows))])
    together = of_padded(rows, [range(len(rows))])
    assert whole.tokens == sum(len(row.ids) for row in rows)
    assert together.tokens == len(rows) * max(len(row.ids) for row in rows)
    assert whole.scored == together.scored == sum(len(row.scored) for row in rows)
    # one row as two pieces is the same work
    length = len(rows[0].ids)
    assert of_pieces([(0, 10), (10, length - 10)], len(rows[0].scored)) == of_padded(rows[:1], [[0]])


def test_every_way_to_run_a_group_has_the_same_gradients():
    model, batch = network("tiny", **CPU), small_group()
    expected = run_steps(model, batch, Variant("padded"), 1, gradients=True).gradients
    norm = torch.nn.utils.get_total_norm(expected.values())
    for variant in (
        Variant("trl", 3),
        Variant("segments", tokens_per_segment=16),
        Variant("segments", 2, checkpointing=False, tokens_per_segment=64),
    ):
        watch = run_steps(model, batch, variant, 2, gradients=True)
        assert len(watch.seconds) == 2
        assert watch.gradients.keys() == expected.keys()
        differences = [watch.gradients[name] - expected[name] for name in expected]
        assert torch.nn.utils.get_total_norm(differences) < 1e-5 * norm, variant


@pytest.mark.deep
def test_every_part_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LENGTHS", [200, 300, 400, 600])
    monkeypatch.setattr(training, "SINGLE", {"cpu": [100]})
    monkeypatch.setattr(training, "MEMORY_NETWORK", "tiny")
    monkeypatch.setattr(training, "LAYOUT_GROUPS", 1)
    monkeypatch.setattr(training, "LAYOUT_SCALE", 100)
    monkeypatch.setattr("tests.bench.steps.WARM_UP", 64)
    out = tmp_path / "figures.json"
    options = ["--scale", "200", "--rounds", "1", "--tokens-per-segment", "64", "--json", str(out)]
    result = CliRunner().invoke(training.main, ["--model", "tiny-hybrid", *options], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(out.read_text())
    assert set(found) == {"environment", *training.PARTS}
    assert [row["group"] for row in found["groups"]] == list(SHAPES)
    for row in found["groups"]:
        assert 0 < row["flops_ratio"] < 1
        assert row["tokens_segments"] < row["tokens"]
        assert row["trl_seconds"].keys() == {"1", "2", "4"}
        assert row["segments"] > 0
    assert [(row["forward"], len(row["mib"])) for row in found["memory"]] == [("segments", 4), ("trl", 2)]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_groups_are_measured_with_the_options_of_a_cuda_device_and_a_step_that_does_not_fit_has_no_time(
    name, monkeypatch
):
    def full(model, batch, variant, steps):
        if variant.forward == "trl" and len(batch.traces) > 1:
            raise torch.OutOfMemoryError("a device that is full")
        return run_steps(model, batch, variant, steps)

    monkeypatch.setattr(training, "run_steps", full)
    monkeypatch.setattr(training, "MICRO_BATCH_ROWS", (4,))
    bench = training.Training(name, "cpu", scale=400, rounds=1, tokens_per_segment=None)
    bench.options = {"dtype": torch.bfloat16, "lora": True}
    for row in bench.groups():
        assert (row["padded"], row["ratio"]) == (None, None)
        assert row["segments"] > 0


def test_a_machine_without_a_cuda_device_is_told_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = CliRunner().invoke(training.main, ["--device", "cuda"])
    assert result.exit_code == 1
    assert "torch finds no CUDA device" in result.output


def test_the_models_of_real_dimensions_have_four_billion_parameters():
    for name, state in (("4b", 147_456), ("4b-hybrid", 32_768)):
        model = network(name, device="meta", dtype=torch.bfloat16, lora=False)
        assert 3.5e9 < sum(parameter.numel() for parameter in model.parameters()) < 5e9
        assert state_bytes(model) == state
