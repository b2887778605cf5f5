"""The trainer on traces sampled by the tiny model itself, through TRL's own training loop, in
float32 on the CPU."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, Qwen3ForCausalLM
from trl import GRPOConfig

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.traces.build import GroupReward, Trace, build_traces
from rolltap.trainer.training.step.config import TraceGRPOConfig
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.factories import make_call
from tests.trainer.training.step.small_models import COMMON, small_model
from tests.trainer.training.step.tiny import (
    GROUPS,
    batch_of,
    gradients,
    largest_difference,
    make_trainer,
    record,
    relative_difference,
    sample,
    tiny_model,
    trained,
)

LORA = LoraConfig(r=4, target_modules="all-linear")
TRUNCATED = {"vllm_importance_sampling_correction": True}
MASKED = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_mask",
}
RANDOM_LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
# peft 0.21 uses a name that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return tiny_model()


@pytest.fixture
def traces(model) -> list[Trace]:
    return record(model, random.Random(0))


def number_sampled(traces: list[Trace]) -> int:
    return sum(sum(trace.completion_mask) for trace in traces)


def test_training_makes_the_rewarded_token_likelier(model, tmp_path):
    def probability() -> float:
        with torch.no_grad():
            return float(
                trainer.model(input_ids=torch.tensor([[2, 3, 4]])).logits[0, -1].softmax(-1)[7]
            )

    def roll_out(rows: list[dict]) -> list[Trace]:
        recorded = []
        for row in rows:
            for i in range(8):
                ids, logprobs = sample(trainer.model, [2, 3, 4], 4)
                call = make_call(
                    0, [2, 3, 4], ids, session_id=f"{row['task_id']}{i}", logprobs=logprobs
                )
                traces, _ = build_traces([call], "prefix_merging")
                recorded += [
                    replace(trace, group_id=row["task_id"], reward=ids.count(7) / 4)
                    for trace in traces
                ]
        return recorded

    trainer = make_trainer(model, tmp_path, roll_out, max_steps=12)
    before = probability()
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 12
    assert probability() > 3 * before
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_several_iterations_reuse_the_traces_and_the_recorded_logprobs(model, traces, tmp_path):
    asked = []
    config = {"num_iterations": 2, "max_steps": 4, "shuffle_dataset": False, "groups_per_step": 1}
    trainer = trained(model, tmp_path, lambda rows: asked.extend(rows) or traces, **config)
    assert asked == [{"task_id": "a"}, {"task_id": "b"}]
    clipped = [
        entry["clip_ratio/region_mean"] for entry in trainer.state.log_history if "reward" in entry
    ]
    assert clipped[0] == 0
    assert clipped[1] > 0
    assert largest_difference(trainer.spy.gradients[0], trainer.spy.gradients[1]) > 1e-3


@pytest.mark.parametrize("without", ["traces", "signal"])
def test_a_batch_that_trains_nothing_changes_neither_weights_nor_optimizer(
    model, traces, tmp_path, caplog, without
):
    nothing = [] if without == "traces" else [replace(trace, reward=0.5) for trace in traces]
    batches = iter([traces, nothing, traces])
    trainer = trained(
        model,
        tmp_path,
        lambda rows: next(batches),
        max_steps=3,
        weight_decay=0.1,
        max_grad_norm=1.0,
    )
    assert largest_difference(trainer.spy.weights[0], trainer.spy.weights[1]) == 0
    assert largest_difference(trainer.spy.weights[1], trainer.spy.weights[2]) > 0
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}
    assert [entry["tokens_trained"] > 0 for entry in trainer.state.log_history[:3]] == [
        True,
        False,
        True,
    ]
    why = (
        "its sessions have no token to train on"
        if without == "traces"
        else "all rewards of each group are equal"
    )
    assert f"step 2 was skipped: {why}\n" in caplog.text


@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
    ],
)
def test_lora_trains_the_adapter_alone(model, traces, tmp_path, adapter):
    trainer = make_trainer(model, tmp_path, traces, peft_config=LoraConfig(r=4, **adapter))
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    changed = {
        name
        for name, weight in trainer.spy.weights[0].items()
        if not torch.equal(weight, before[name])
    }
    assert changed
    assert all("lora_" in name or "trainable_tokens_delta" in name for name in changed)
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize(
    ("config", "groups_per_step", "message"),
    [
        (TraceGRPOConfig, 3, "groups_per_step=3 must be between 1 and the 2 rows"),
        (TraceGRPOConfig, 0, "groups_per_step=0 must be between 1 and the 2 rows"),
        (GRPOConfig, 1, r"args is a GRPOConfig: give a rolltap\.TraceGRPOConfig"),
    ],
)
def test_rows_that_cannot_fill_a_step_and_trls_config_are_refused(
    model, tmp_path, config, groups_per_step, message
):
    args = config(str(tmp_path), use_cpu=True, report_to="none", activation_checkpointing=False)
    with pytest.raises(ValueError, match=message):
        TraceGRPOTrainer(
            model, args, GROUPS, trace_source=lambda rows: [], groups_per_step=groups_per_step
        )


def test_a_session_that_left_no_trace_counts_in_its_groups_mean(model, tmp_path):
    """Leaving out a harness that crashed before its first call would raise its group's mean
    reward."""
    batch = batch_of([trace for trace in record(model, random.Random(5)) if trace.group_id == "a"])
    batch.rewards["crashed"] = GroupReward(group_id="a", reward=-10.0)
    trainer = make_trainer(model, tmp_path, batch)
    [part] = trainer._divide(batch)
    seen = torch.tensor([session.advantage for each in part for session in each.sessions])
    assert (seen >= 0).all()
    assert seen.max() > 0


def test_sessions_without_an_advantage_are_not_computed_and_count_in_the_mean(
    model, traces, tmp_path
):
    """A reference needs all of a group with signal."""
    rewards = {"a0": 0.0, "a1": 1.0, "a2": 2.0, "b0": 1.0, "b1": 1.0, "b2": 1.0}
    rewarded = [replace(trace, reward=rewards[trace.session_id]) for trace in traces]
    group = [trace for trace in rewarded if trace.group_id == "a"]
    computed = [trace for trace in group if trace.session_id != "a1"]

    def lengths(traces) -> int:
        return sum(len(trace.prompt_ids) + len(trace.completion_ids) for trace in traces)

    trainer = trained(model, tmp_path, rewarded, scale_rewards="none")
    logged = trainer.state.log_history[0]
    number, fewer = number_sampled(group), number_sampled(computed)
    assert (logged["tokens_in_rows"], logged["tokens_trained"]) == (lengths(computed), number)
    assert logged["tokens_computed"] == fewer
    # the same advantages over another mean
    alone = gradients(model, tmp_path, computed, scale_rewards="none")
    scaled = {name: gradient * fewer / number for name, gradient in alone.items()}
    assert largest_difference(trainer.spy.gradients[0], scaled) < 1e-6
    with_reference = trained(model, tmp_path, rewarded, beta=0.1, peft_config=LORA)
    assert with_reference.state.log_history[0]["tokens_in_rows"] == lengths(group)


def test_dropout_never_acts_and_that_of_an_adapter_is_refused(model, traces, tmp_path):
    expected = gradients(model, tmp_path, traces)
    dropping = copy.deepcopy(model)
    dropping.model.layers[1].self_attn.attention_dropout = 0.5
    dropping.model.layers[0].mlp.act_fn = torch.nn.Sequential(
        dropping.model.layers[0].mlp.act_fn, torch.nn.Dropout()
    )
    for checkpointing in (False, True):
        found = gradients(dropping, tmp_path, traces, activation_checkpointing=checkpointing)
        assert largest_difference(expected, found) < 1e-6
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    with pytest.raises(InputError, match=r"lora\.lora_dropout = 0\.1 has no effect"):
        make_trainer(model, tmp_path, [], peft_config=adapter)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            {"bias": "all"},
            "bias = 'all', the model without its adapter is not the model that was given",
        ),
        ({"bias": "lora_only"}, "bias = 'lora_only', the model without"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', the model without"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora', the model without"),
    ],
)
def test_an_adapter_without_which_the_model_is_another_one_gives_no_reference(
    model, tmp_path, adapter, message
):
    lora = LoraConfig(r=2, target_modules=["q_proj"], **adapter)
    make_trainer(model, tmp_path, [], peft_config=lora)
    with pytest.raises(InputError, match=message):
        make_trainer(model, tmp_path, [], peft_config=lora, beta=0.1)
    with pytest.raises(InputError, match=f"{message}|only 1 adapter with bias"):
        make_trainer(get_peft_model(copy.deepcopy(model), lora), tmp_path, [], beta=0.1)


@pytest.mark.filterwarnings("ignore:.*corda_config. is not specified:UserWarning")
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"target_modules": ["lm_head"]}, "cannot be trained: .* `lm_head` is not supported"),
        (
            {"target_modules": ["q_proj"], "init_lora_weights": "corda"},
            "cannot be trained: .*preprocess_corda",
        ),
        ({"target_modules": ["nope"]}, "cannot be trained: .*not found"),
    ],
)
def test_an_adapter_that_trl_or_peft_refuse_is_a_users_mistake(model, tmp_path, adapter, message):
    with pytest.raises(InputError, match=message):
        make_trainer(model, tmp_path, [], peft_config=LoraConfig(**adapter))


@pytest.mark.parametrize("each_layer", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_row_are_refused(model, tmp_path, kind, each_layer):
    model = copy.deepcopy(model)
    table = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    default = {"rope_type": "default", "rope_theta": 10000.0}
    model.config.rope_parameters = (
        {"full_attention": default, "sliding_attention": table} if each_layer else table
    )
    with pytest.raises(
        ValueError, match=f"rope_type = '{kind}': the positions of a trace would depend"
    ):
        make_trainer(model, tmp_path, [], forward="padded")


@pytest.mark.parametrize("setting", ["no", "bf16", "fp16"])
def test_the_type_of_the_weights_decides_the_precision_whatever_accelerate_is_set_to(
    model, tmp_path, monkeypatch, setting
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", setting)
    for dtype, lora, precision in [
        (torch.float32, None, "no"),
        (torch.bfloat16, None, "bf16"),
        (torch.bfloat16, LORA, "bf16"),
    ]:
        trainer = make_trainer(copy.deepcopy(model).to(dtype), tmp_path, [], peft_config=lora)
        assert trainer.accelerator.mixed_precision == precision, dtype


def test_a_model_on_the_disk_has_the_type_that_its_arguments_say(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    for init, precision in [(None, "no"), ({"dtype": "bfloat16"}, "bf16")]:
        trainer = make_trainer(str(tmp_path / "model"), tmp_path, [], model_init_kwargs=init)
        assert trainer.accelerator.mixed_precision == precision


@pytest.mark.parametrize("forward", ["packed", "padded"])
def test_a_model_that_computes_otherwise_in_training_mode_runs_as_engines_run_it(tmp_path, forward):
    """Gemma 3n clips some weights, which an adapter does not train, in training mode."""
    options = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
    }
    options |= {
        "altup_coef_clip": 0.02,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    }
    words = {"vocab_size": 32, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8}
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**COMMON | options | words)).float().eval()
    clipped = model.model.layers[0].altup.prediction_coefs.weight.data.fill_(0.3).clone()
    traces = record(model, random.Random(0))
    trainer = trained(
        model, tmp_path, traces, forward=forward, peft_config=LORA, activation_checkpointing=True
    )
    assert trainer.state.log_history[0]["difference_max"] < 1e-5
    altup = trainer.model.get_base_model().model.layers[0].altup
    assert torch.equal(altup.prediction_coefs.base_layer.weight, clipped)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_experts_have_the_same_gradient_packed_and_padded(tmp_path, checkpointing):
    model = small_model("qwen3-moe").eval()
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False
    )
    found = []
    for forward in ("padded", "packed"):
        torch.manual_seed(5)  # for the adapter
        options = {
            "forward": forward,
            "peft_config": lora,
            "activation_checkpointing": checkpointing,
        }
        found.append(gradients(model, tmp_path, record(model, random.Random(3)), **options))
    assert sum("experts" in name for name in found[0]) == 12
    assert relative_difference(*found) < 1e-5


def test_padded_rows_compute_their_layers_again_in_the_backward_pass(model, traces, tmp_path):
    calls = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            model, tmp_path, traces, forward="padded", activation_checkpointing=checkpointing
        )
        trainer.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_: calls.append(checkpointing)  # noqa: B023
        )
        trainer.train()
    assert calls.count(True) == 2 * calls.count(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_checkpoints_of_layers_rest_in_host_memory(model, traces, tmp_path):
    """Their gradient is the same, and the device holds less."""
    found = []
    peaks = []
    for offload in (False, True):
        options = {
            "use_cpu": False,
            "activation_checkpointing": True,
            "offload_checkpoints": offload,
        }
        trainer = trained(model, tmp_path, traces, **options)
        found.append(trainer.spy.gradients[0])
        peaks.append(trainer.state.log_history[0]["peak_memory_gib"])
    assert largest_difference(*found) < 1e-6
    assert peaks[1] <= peaks[0]


def test_a_training_that_was_stopped_goes_on_with_the_next_rows(model, traces, tmp_path):
    asked = []
    config = {"groups_per_step": 1, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}

    def train(steps, checkpoint=None):
        trainer = make_trainer(
            model, tmp_path, lambda rows: asked.extend(rows) or traces, max_steps=steps, **config
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.spy.weights[-1]

    whole, order = train(12), list(asked)
    asked.clear()
    train(5)
    resumed = train(12, str(tmp_path / "checkpoint-5"))
    # the third rows are asked for again: step 6 is their second iteration
    assert asked == [*order[:3], *order[2:]]
    assert largest_difference(whole, resumed) == 0


def test_a_resumed_training_has_the_coefficient_of_the_entropy_where_it_was(
    model, traces, tmp_path
):
    config = {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.05,
        "entropy_target": 9.0,
        "gradient_accumulation_steps": 1,
    }
    config |= {"save_strategy": "steps", "save_steps": 2}
    whole = trained(model, tmp_path, traces, max_steps=3, **config)
    resumed = make_trainer(model, tmp_path, traces, max_steps=3, **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.entropy_coef == whole.entropy_coef > 0.06
    assert largest_difference(whole.spy.weights[-1], resumed.spy.weights[-1]) == 0


def test_a_model_that_a_packed_row_would_change_runs_padded_and_says_why(
    model, traces, tmp_path, monkeypatch, caplog
):
    expected = gradients(model, tmp_path, traces, forward="padded")
    monkeypatch.setattr(
        "rolltap.trainer.training.step.trainer.probe", lambda *args, **kwargs: "its memory is short"
    )
    assert largest_difference(expected, gradients(model, tmp_path, traces)) == 0
    assert "traces run as padded rows, not as one packed row: its memory is short" in caplog.text


def test_a_step_of_which_every_token_is_masked_moves_no_weight(model, traces, tmp_path, caplog):
    stale = [
        replace(trace, logprobs=[logprob - 5.0 for logprob in trace.logprobs]) for trace in traces
    ]
    batches = iter([traces, stale])
    trainer = trained(model, tmp_path, lambda rows: next(batches), max_steps=2, **MASKED)
    logged = trainer.state.log_history[1]
    assert logged["tokens_masked"] == logged["tokens_trained"] > 0
    assert largest_difference(trainer.spy.weights[0], trainer.spy.weights[1]) == 0
    assert "step 2 was skipped: the importance correction left no token\n" in caplog.text


@pytest.mark.parametrize("correction", [{}, TRUNCATED, MASKED])
def test_a_token_that_the_engine_thought_impossible_does_not_spoil_the_gradient(
    model, traces, tmp_path, correction
):
    traces[0].logprobs[0] = -150.0
    found = gradients(model, tmp_path, traces, **correction)
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_a_corrected_batch_is_not_taken_up_in_the_middle_of_its_iterations(model, traces, tmp_path):
    config = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, **TRUNCATED}
    trained(model, tmp_path, traces, max_steps=3, **config)
    trainer = make_trainer(model, tmp_path, traces, max_steps=4, **config)
    with pytest.raises(ValueError, match="step 3 is in the middle of the 2 iterations of a batch"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_micro_batch_that_does_not_fit_is_said_with_what_to_do(model, traces, tmp_path):
    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    trainer = make_trainer(model, tmp_path, traces)
    trainer.before_batch = lambda: trainer.model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(
        InputError, match=r"\d+ tokens in one pass do not fit .*: raise gradient_accumulation_steps"
    ):
        trainer.train()


def test_a_second_training_has_batches_of_its_own(model, traces, tmp_path):
    asked = []
    trained(model, tmp_path, lambda rows: asked.append(rows) or traces).train()
    assert len(asked) == 2


def test_the_reference_of_a_given_adapter_is_that_adapter(model, traces, tmp_path):
    torch.manual_seed(2)
    adapted = get_peft_model(copy.deepcopy(model), RANDOM_LORA)
    trainer = trained(adapted, tmp_path, traces, beta=0.1)
    assert trainer.state.log_history[0]["kl"] < 1e-6


def test_before_each_batch_and_not_before_each_step_something_is_called(model, traces, tmp_path):
    called = []
    config = {"num_iterations": 2, "max_steps": 4, "before_batch": lambda: called.append("before")}
    trained(model, tmp_path, lambda rows: called.append("batch") or traces, **config)
    assert called == ["before", "batch"] * 2


def test_metrics_from_outside_are_logged_with_the_step_as_means(model, traces, tmp_path):
    trainer = make_trainer(model, tmp_path, traces)
    trainer.before_batch = lambda: [
        trainer.log_metrics({"engine_difference": value}) for value in (0.5, 1.5)
    ]
    trainer.train()
    assert trainer.state.log_history[0]["engine_difference"] == 1.0


def test_a_step_that_its_check_refuses_ends_the_training_before_the_weights_change(
    model, traces, tmp_path
):
    checked = []

    def check_step(step, metrics):
        checked.append(
            (step, sorted(name for name in metrics if name.startswith(("difference/", "tokens/"))))
        )
        if step == 1:
            raise EngineError("the engine sampled other tokens")

    trainer = make_trainer(model, tmp_path, traces, max_steps=3)
    trainer.check_step = check_step
    with pytest.raises(EngineError, match="sampled other tokens"):
        trainer.train()
    kinds = ["difference/root", "tokens/root"]
    assert checked == [(0, kinds), (1, kinds)]
    once = make_trainer(model, tmp_path / "once", traces, max_steps=3)
    once.check_step = lambda step, metrics: setattr(once.control, "should_training_stop", True)
    once.train()
    assert once.state.global_step == 1
    for name, weight in once.model.state_dict().items():
        assert torch.equal(weight, trainer.model.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainer_scores_any_ids_with_its_present_weights_at_temperature_1(
    model, traces, tmp_path, dtype
):
    trainer = make_trainer(copy.deepcopy(model).to(dtype), tmp_path, traces, temperature=0.5)
    ids, logprobs = sample(model, [2, 3, 4], 20)
    before = trainer.score([2, 3, 4, *ids])
    assert len(before) == 22
    assert before[2:] == pytest.approx(logprobs, abs=1e-5 if dtype == torch.float32 else 0.1)
    trainer.train()
    after = trainer.score([2, 3, 4, *ids])
    assert after != pytest.approx(before, abs=1e-3)
    assert trainer.model.training


def test_a_base_is_scored_without_its_adapter(model, tmp_path):
    torch.manual_seed(0)
    trainer = make_trainer(model, tmp_path, [], peft_config=RANDOM_LORA)
    ids = list(range(2, 12))
    expected = make_trainer(model, tmp_path, []).score(ids)
    assert trainer.score(ids, base=True) == pytest.approx(expected, abs=1e-6)
    assert trainer.score(ids) != pytest.approx(expected, abs=1e-2)
    assert all(
        weight.requires_grad for name, weight in trainer.model.named_parameters() if "lora_" in name
    )


def test_the_reference_of_a_full_model_is_the_model_as_it_was_given(model, traces, tmp_path):
    """Its folder may hold another class, or other weights: nothing is loaded."""
    given = copy.deepcopy(model)
    given.config._name_or_path = str(tmp_path / "not there")
    trainer = trained(given, tmp_path, traces, beta=0.1, max_steps=2, learning_rate=0.1)
    first, second = (entry["kl"] for entry in trainer.state.log_history[:2])
    assert first < 1e-6 < 1e-3 < second
    reference = trainer.ref_model
    assert largest_difference(reference.state_dict(), model.state_dict()) == 0
    assert not any(weight.requires_grad for weight in reference.parameters())


@pytest.mark.parametrize("forward", ["packed", "padded"])
def test_the_reference_has_a_head_of_its_own(model, traces, tmp_path, forward):
    trainer = make_trainer(model, tmp_path, traces, beta=0.1, forward=forward)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(3)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] > 0.1


def test_an_optimizer_that_is_given_steps_as_it_is(model, traces, tmp_path):
    trainer = make_trainer(model, tmp_path, traces)
    given = trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train()
    assert trainer.optimizer.optimizer is given


def test_what_fails_before_a_batch_ends_the_training(model, tmp_path):
    def fail():
        raise OSError("the engine is gone")

    trainer = make_trainer(
        model, tmp_path, lambda rows: pytest.fail("the batch was fetched"), before_batch=fail
    )
    with pytest.raises(OSError, match="the engine is gone"):
        trainer.train()


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])
def test_steps_of_a_full_model_in_bfloat16_follow_those_in_float32(model, traces, tmp_path, optim):
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        config = {"optim": optim, "max_steps": 3, "max_grad_norm": 1.0, "learning_rate": 3e-3}
        trainer = trained(copy.deepcopy(model).to(dtype), tmp_path, traces, **config)
        masters = [p.detach() for group in trainer.optimizer.param_groups for p in group["params"]]
        assert all(master.dtype == torch.float32 for master in masters)
        moved.append(torch.cat([master.flatten() for master in masters]))
    begun = make_trainer(model, tmp_path, traces)
    begun.create_optimizer()
    start = torch.cat(
        [p.detach().flatten() for group in begun.optimizer.param_groups for p in group["params"]]
    )
    rounded = start.to(torch.bfloat16).float()
    steps = torch.nn.functional.cosine_similarity(moved[0] - start, moved[1] - rounded, dim=0)
    assert steps > 0.9
