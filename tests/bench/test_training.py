import json

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from tests.bench import training
from tests.bench.flops import Work, costs, of_padded, of_pieces, step_flops
from tests.bench.gradients import RUNS, distance
from tests.bench.groups import LONG, SHAPES, SHORT, SHORT_SCALE, generate, rows_of, single
from tests.bench.measurements import Measurements
from tests.bench.networks import NETWORKS, network, state_bytes
from tests.bench.peaks import cuda_peak, longest, slope
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


def test_short_sessions_have_about_200_tokens():
    rows = rows_of(generate(SHORT, scale=SHORT_SCALE, vocabulary=128, seed=0))
    assert len(rows) == 8
    assert 150 < sum(len(row.ids) for row in rows) / 8 < 300


def test_a_single_trace_has_the_asked_length_and_a_signal():
    batch = single(1000, vocabulary=128)
    (row,) = rows_of(batch)
    assert len(row.ids) == 1000
    assert {reward.reward for reward in batch.rewards.values()} == {0.0, 1.0}


def test_operations_are_those_that_torch_counts():
    model = network("tiny", **CPU)
    model.config._attn_implementation = "eager"
    model_costs = costs(model)
    # eager attention computes every pair, and its backward pass two products for each of forward's
    rows, length = 2, 96
    work = Work(rows * length, rows * length * length, 0)
    with FlopCounterMode(display=False) as forward:
        hidden = model.get_decoder()(input_ids=torch.ones(rows, length, dtype=torch.long)).last_hidden_state
    with FlopCounterMode(display=False) as backward:
        hidden.sum().backward()
    pairs = work.pairs * model_costs.pair
    assert forward.get_total_flops() == work.tokens * model_costs.forward + pairs
    assert backward.get_total_flops() == work.tokens * model_costs.backward + 2 * pairs


def test_an_adapter_saves_the_operations_of_the_weights_gradients():
    full, adapter = (costs(network("tiny", **CPU | {"lora": lora})) for lora in (False, True))
    assert full.backward == 2 * full.forward
    assert adapter.backward < 2 * adapter.forward
    assert adapter.pair == full.pair


def test_linear_attention_has_no_pairs():
    dense, hybrid = (costs(network(name, **CPU)) for name in ("tiny", "tiny-hybrid"))
    assert hybrid.pair == dense.pair / 4
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
    pieces = of_pieces([(0, 10), (10, length - 10)], len(rows[0].scored))
    assert pieces == of_padded(rows[:1], [[0]])


def test_checkpointing_runs_all_but_the_last_linear_layer_of_a_layer_again():
    model = network("tiny", **CPU)
    model.config._attn_implementation = "eager"
    model.activation_checkpointing_enable()
    model_costs = costs(model)
    work = Work(96, 0, 0)
    with FlopCounterMode(display=False) as counter:
        model.get_decoder()(input_ids=torch.ones(1, 96, dtype=torch.long)).last_hidden_state.sum().backward()
    pairs = 96 * 96 * model_costs.pair
    assert counter.get_total_flops() == step_flops(model_costs, work, "layers") + 4 * pairs
    once, twice = (step_flops(model_costs, work, again) for again in ("nothing", "segments"))
    assert twice - once == work.tokens * model_costs.forward


def test_every_way_to_run_a_group_has_the_same_gradients():
    model, batch = network("tiny", **CPU), small_group()
    expected = run_steps(model, batch, Variant("padded"), 1, gradients=True).gradients
    for variant in (
        Variant("trl", 3),
        Variant("segments", tokens_per_segment=16),
        Variant("segments", 2, checkpointing=False, tokens_per_segment=64),
    ):
        watch = run_steps(model, batch, variant, 2, gradients=True)
        assert len(watch.seconds) == 2
        assert distance(watch.gradients, expected) < 1e-5, variant


@pytest.mark.parametrize("limit", [4096, 5000, 70_000])
def test_the_longest_length_that_fits_is_found_by_doubling_and_bisecting(limit):
    asked = []

    def fits(length):
        asked.append(length)
        return length <= limit

    found, bounded = longest(fits, 4096)
    assert bounded
    assert 0.95 * limit <= found <= limit
    assert len(asked) < 12


def test_a_search_without_time_says_so():
    assert longest(lambda length: True if length < 10_000 else None, 1024) == (8192, False)


def test_nothing_fits():
    found, bounded = longest(lambda length: False, 1024)
    assert bounded
    assert found < 1024


def test_the_slope_is_that_of_a_line():
    assert slope([1, 2, 4], [15, 25, 45]) == pytest.approx(10)


@pytest.mark.deep
def test_every_part_is_measured(tmp_path, monkeypatch):
    name = "tiny-hybrid"
    monkeypatch.setattr(training, "LENGTHS", [200, 300, 400, 600])
    monkeypatch.setattr(training, "SINGLE", {"cpu": [100]})
    monkeypatch.setattr(training, "MEMORY_NETWORK", "tiny")
    monkeypatch.setattr("tests.bench.measurements.LAYOUT_GROUPS", 1)
    monkeypatch.setattr("tests.bench.measurements.FULL_SCALE", 100)
    monkeypatch.setattr("tests.bench.measurements.SHORTEST", 200)
    monkeypatch.setattr("tests.bench.peaks.WARM_UP", 64)

    def limited(model, batch, *arguments, **options):
        if len(batch.traces) == 1 and len(rows_of(batch)[0].ids) > 350:
            raise torch.OutOfMemoryError("a device that is full")
        return run_steps(model, batch, *arguments, **options)

    monkeypatch.setattr("tests.bench.measurements.run_steps", limited)
    out = tmp_path / "figures.json"
    parts = [option for part in training.PARTS for option in ("--part", part)]
    options = ["--model", name, "--scale", "200", "--rounds", "1", "--tokens-per-segment", "64", "--json", str(out)]
    result = CliRunner().invoke(training.main, [*parts, *options], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(out.read_text())
    assert set(found) == {"environment", *training.PARTS}
    assert [row["group"] for row in found["groups"]] == list(SHAPES)
    for row in found["groups"]:
        assert 0 < row["flops_ratio"] < 1
        assert row["tokens_segments"] < row["tokens"]
        assert row["trl_seconds"].keys() == {"1", "2", "4"}
        assert row["segments"] > 0
    assert [(row["forward"], row["dtype"]) for row in found["gradients"]] == RUNS
    assert found["gradients"][0]["difference"] < 2e-4
    assert all(row["difference"] < 0.5 for row in found["gradients"])
    assert [(row["forward"], len(row["mib"])) for row in found["memory"]] == [("segments", 4), ("trl", 2)]
    assert all(0.9 * 350 < row["tokens"] <= 350 and row["ended_by"] == "memory" for row in found["longest"])


@pytest.mark.deep
@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_the_parts_of_a_cuda_device_run_with_its_options(name, monkeypatch):
    bench = Measurements(name, "cpu", scale=400, rounds=1, tokens_per_segment=None)
    bench.options = {"dtype": torch.bfloat16, "lora": True}
    monkeypatch.setattr("tests.bench.measurements.MICRO_BATCH_ROWS", (4,))
    assert all(row["segments"] > 0 for row in bench.groups())
    assert all(row["difference"] < 0.2 for row in bench.gradients(4))


def test_the_peak_of_a_cuda_device_is_that_of_its_allocator(monkeypatch):
    for function in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, function, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 150)
    assert cuda_peak(network("tiny", **CPU), 64, Variant("segments")) == 50


@pytest.mark.deep
def test_a_step_that_does_not_fit_has_no_time(monkeypatch):
    def full(model, batch, variant, steps):
        if variant.forward == "trl" and len(batch.traces) > 1:
            raise torch.OutOfMemoryError("a device that is full")
        return run_steps(model, batch, variant, steps)

    monkeypatch.setattr("tests.bench.measurements.run_steps", full)
    (row, _) = Measurements("tiny", "cpu", scale=400, rounds=1, tokens_per_segment=None).groups()
    assert row["padded"] is None
    assert row["ratio"] is None
    assert row["segments"] > 0


def test_a_machine_without_a_cuda_device_is_told_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = CliRunner().invoke(training.main, ["--device", "cuda"])
    assert result.exit_code == 1
    assert "torch finds no CUDA device" in result.output


def test_the_models_of_real_dimensions_have_four_billion_parameters():
    for name in ("4b", "4b-hybrid"):
        model = network(name, device="meta", dtype=torch.bfloat16, lora=False)
        assert 3.5e9 < sum(parameter.numel() for parameter in model.parameters()) < 5e9
    assert state_bytes(network("4b", device="meta", dtype=torch.bfloat16, lora=False)) == 147_456
    assert state_bytes(network("4b-hybrid", device="meta", dtype=torch.bfloat16, lora=False)) == 32_768
    assert set(NETWORKS) >= {"4b", "4b-hybrid"}
    assert isinstance(Measurements("tiny", "cpu", scale=1, rounds=1, tokens_per_segment=1).vocabulary, int)
