"""The trainer on traces sampled by the tiny model itself, through TRL's own training loop, in
float32 on the CPU."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cosine_similarity, pad
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig
from trl import GRPOConfig

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.traces.build import GroupReward
from rolltap.trainer.training.step.config import TraceGRPOConfig
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.factories import make_call
from tests.trainer.training.step.small_models import COMMON, small_model
from tests.trainer.training.step.tiny import (
    GROUPS,
    Recorded,
    batch_of,
    largest_difference,
    record,
    relative_difference,
    sample,
)

LORA = LoraConfig(r=4, target_modules="all-linear")
RANDOM_LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
TRUNCATED = {"vllm_importance_sampling_correction": True}
MASKED = {**TRUNCATED, "vllm_importance_sampling_mode": "token_mask"}
EACH_STEP = {"save_strategy": "steps", "save_steps": 1}
TWICE = {"num_iterations": 2}


def lengths(traces):
    return sum(len(trace.prompt_ids) + len(trace.completion_ids) for trace in traces)


def number_sampled(traces):
    return sum(sum(trace.completion_mask) for trace in traces)


def test_training_makes_the_rewarded_token_likelier(make):
    prompt = [2, 3, 4]

    @torch.no_grad()
    def probability():
        logits = trainer.model(input_ids=torch.tensor([prompt])).logits
        return float(logits[0, -1].softmax(-1)[7])

    def roll_out(rows):
        traces = []
        for row in rows:
            for number in range(8):
                name = f"{row['task_id']}{number}"
                ids, logprobs = sample(trainer.model, prompt, 4)
                call = make_call(0, prompt, ids, session_id=name, logprobs=logprobs)
                session = Recorded([call], row["task_id"], reward=ids.count(7) / 4)
                traces += session.traces("prefix_merging")
        return traces

    trainer = make(roll_out, max_steps=12)
    before = probability()
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 12
    assert probability() > 3 * before
    assert sum(rewards[-3:]) > sum(rewards[:3])


@pytest.mark.parametrize(
    ("without", "why"),
    [
        ("traces", "its sessions have no token to train on"),
        ("signal", "all rewards of each group are equal"),
    ],
)
def test_a_batch_that_trains_nothing_changes_neither_weights_nor_optimizer(
    train, traces, caplog, without, why
):
    nothing = []
    if without == "signal":
        nothing = [replace(trace, reward=0.5) for trace in traces]
    batches = iter([traces, nothing, traces])

    def source(rows):
        return next(batches)

    trainer = train(source, max_steps=3, weight_decay=0.1, max_grad_norm=1.0)
    first, second, third = trainer.spy.weights
    assert largest_difference(first, second) == 0
    assert largest_difference(second, third) > 0
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}
    trains = [entry["tokens_trained"] > 0 for entry in trainer.state.log_history[:3]]
    assert trains == [True, False, True]
    assert f"step 2 was skipped: {why}\n" in caplog.text


@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
    ],
)
def test_lora_trains_the_adapter_alone(make, adapter):
    trainer = make(peft_config=LoraConfig(r=4, **adapter))
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    changed = []
    for name, weight in trainer.spy.weights[0].items():
        if not torch.equal(weight, before[name]):
            changed.append(name)
            assert "lora_" in name or "trainable_tokens_delta" in name
    assert changed
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
            model, args, GROUPS, trace_source=batch_of, groups_per_step=groups_per_step
        )


def test_a_session_that_left_no_trace_counts_in_its_groups_mean(make, traces):
    """Leaving out a harness that crashed before its first call would raise its group's mean
    reward."""
    batch = batch_of([trace for trace in traces if trace.group_id == "a"])
    batch.rewards["crashed"] = GroupReward(group_id="a", reward=-10.0)
    advantages = {}

    def record(step, account, scored):
        advantages.update(account.advantages)

    trainer = make(batch)
    trainer.record = record
    trainer.train()
    assert advantages.pop("crashed") < 0
    assert min(advantages.values()) > 0


def test_sessions_without_an_advantage_are_not_computed_and_count_in_the_mean(train, traces):
    """A reference needs all of a group with signal."""
    rewards = {"a0": 0.0, "a1": 1.0, "a2": 2.0, "b0": 1.0, "b1": 1.0, "b2": 1.0}
    rewarded = [replace(trace, reward=rewards[trace.session_id]) for trace in traces]
    group = [trace for trace in rewarded if trace.group_id == "a"]
    computed = [trace for trace in group if trace.session_id != "a1"]
    trained = number_sampled(group)
    fewer = number_sampled(computed)

    trainer = train(rewarded, scale_rewards="none")
    logged = trainer.state.log_history[0]
    assert logged["tokens_in_rows"] == lengths(computed)
    assert logged["tokens_trained"] == trained
    assert logged["tokens_computed"] == fewer
    # the same advantages over another mean
    alone = train(computed, scale_rewards="none").spy.gradients[0]
    scaled = {name: gradient * fewer / trained for name, gradient in alone.items()}
    assert largest_difference(trainer.spy.gradients[0], scaled) < 1e-6
    with_reference = train(rewarded, beta=0.1, peft_config=LORA)
    assert with_reference.state.log_history[0]["tokens_in_rows"] == lengths(group)


def test_dropout_never_acts_and_that_of_an_adapter_is_refused(model, make, train):
    expected = train().spy.gradients[0]
    dropping = copy.deepcopy(model)
    first, second = dropping.model.layers
    first.mlp.act_fn = torch.nn.Sequential(first.mlp.act_fn, torch.nn.Dropout())
    second.self_attn.attention_dropout = 0.5
    for checkpointing in (False, True):
        found = train(of=dropping, activation_checkpointing=checkpointing).spy.gradients[0]
        assert largest_difference(expected, found) < 1e-6
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    with pytest.raises(InputError, match=r"lora\.lora_dropout = 0\.1 has no effect"):
        make(peft_config=adapter)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bias", "all"),
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
    ],
)
def test_an_adapter_without_which_the_model_is_another_one_gives_no_reference(
    model, make, key, value
):
    lora = LoraConfig(r=2, target_modules=["q_proj"], **{key: value})
    message = f"{key} = '{value}', the model without"
    make(peft_config=lora)
    with pytest.raises(InputError, match=message):
        make(peft_config=lora, beta=0.1)
    with pytest.raises(InputError, match=f"{message}|only 1 adapter with bias"):
        make(of=get_peft_model(copy.deepcopy(model), lora), beta=0.1)


@pytest.mark.filterwarnings("ignore:.*corda_config. is not specified:UserWarning")
@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        ("lm_head", {}, "`lm_head` is not supported"),
        ("q_proj", {"init_lora_weights": "corda"}, "preprocess_corda"),
        ("nope", {}, "not found"),
    ],
)
def test_an_adapter_that_trl_or_peft_refuse_is_a_users_mistake(make, target, options, why):
    lora = LoraConfig(target_modules=[target], **options)
    with pytest.raises(InputError, match=f"cannot be trained: .*{why}"):
        make(peft_config=lora)


@pytest.mark.parametrize("each_layer", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_row_are_refused(model, make, kind, each_layer):
    model = copy.deepcopy(model)
    table = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    default = {"rope_type": "default", "rope_theta": 10000.0}
    model.config.rope_parameters = table
    if each_layer:
        model.config.rope_parameters = {"full_attention": default, "sliding_attention": table}
    with pytest.raises(ValueError, match=f"rope_type = '{kind}': the positions of a trace would"):
        make(of=model, forward="padded")


@pytest.mark.parametrize("setting", ["no", "bf16", "fp16"])
def test_the_type_of_the_weights_decides_the_precision_whatever_accelerate_is_set_to(
    model, make, monkeypatch, setting
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", setting)
    low = copy.deepcopy(model).bfloat16()
    for given, lora, precision in [(model, None, "no"), (low, None, "bf16"), (low, LORA, "bf16")]:
        trainer = make(of=given, peft_config=lora)
        assert trainer.accelerator.mixed_precision == precision


def test_a_model_on_the_disk_has_the_type_that_its_arguments_say(model, make, tmp_path):
    folder = str(tmp_path / "model")
    model.save_pretrained(folder)
    for init, precision in [(None, "no"), ({"dtype": "bfloat16"}, "bf16")]:
        trainer = make(of=folder, model_init_kwargs=init)
        assert trainer.accelerator.mixed_precision == precision


@pytest.mark.parametrize("forward", ["packed", "padded"])
def test_a_model_that_computes_otherwise_in_training_mode_runs_as_engines_run_it(train, forward):
    """Gemma 3n clips some weights, which an adapter does not train, in training mode."""
    fields = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
        "altup_coef_clip": 0.02,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
        "vocab_size": 32,
        "vocab_size_per_layer_input": 32,
        "hidden_size_per_layer_input": 8,
    }
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**COMMON | fields)).float().eval()
    clipped = model.model.layers[0].altup.prediction_coefs.weight.data.fill_(0.3).clone()
    trainer = train(
        record(model, random.Random(0)),
        of=model,
        forward=forward,
        peft_config=LORA,
        activation_checkpointing=True,
    )
    assert trainer.state.log_history[0]["difference_max"] < 1e-5
    altup = trainer.model.get_base_model().model.layers[0].altup
    assert torch.equal(altup.prediction_coefs.base_layer.weight, clipped)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_experts_have_the_same_gradient_packed_and_padded(train, checkpointing):
    model = small_model("qwen3-moe")
    traces = record(model, random.Random(3))
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    options = {"of": model, "peft_config": lora, "activation_checkpointing": checkpointing}
    found = []
    for forward in ("padded", "packed"):
        torch.manual_seed(5)  # for the adapter
        found.append(train(traces, forward=forward, **options).spy.gradients[0])
    assert sum("experts" in name for name in found[0]) == 12
    assert relative_difference(*found) < 1e-5


def test_padded_rows_compute_their_layers_again_in_the_backward_pass(make):
    calls = []

    def noted(module, arguments):
        calls.append(module)

    for checkpointing, passes in ((False, 1), (True, 2)):
        trainer = make(forward="padded", activation_checkpointing=checkpointing)
        trainer.model.model.layers[0].mlp.register_forward_pre_hook(noted)
        trainer.train()
        assert len(calls) == passes * trainer.args.gradient_accumulation_steps
        calls.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_checkpoints_of_layers_rest_in_host_memory(train):
    """Their gradient is the same, and the device holds less."""
    options = {"use_cpu": False, "activation_checkpointing": True}
    kept = train(offload_checkpoints=False, **options)
    offloaded = train(offload_checkpoints=True, **options)
    assert largest_difference(kept.spy.gradients[0], offloaded.spy.gradients[0]) < 1e-6
    memory = [trainer.state.log_history[0]["peak_memory_gib"] for trainer in (kept, offloaded)]
    assert memory[1] <= memory[0]


def test_a_training_that_was_stopped_goes_on_with_the_next_rows(make, traces, tmp_path):
    asked = []

    def source(rows):
        asked.extend(rows)
        return traces

    def weights_after(steps, checkpoint=None):
        trainer = make(source, max_steps=steps, groups_per_step=1, **EACH_STEP, **TWICE)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.spy.weights[-1]

    whole = weights_after(12)
    order = list(asked)
    asked.clear()
    weights_after(5)
    resumed = weights_after(12, str(tmp_path / "checkpoint-5"))
    # the third rows are asked for again: step 6 is their second iteration
    assert asked == [*order[:3], *order[2:]]
    assert largest_difference(whole, resumed) == 0


def test_a_resumed_training_has_the_coefficient_of_the_entropy_where_it_was(make, train, tmp_path):
    config = {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.05,
        "entropy_target": 9.0,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
    }
    whole = train(**config, **EACH_STEP)
    resumed = make(**config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.entropy_coef == whole.entropy_coef > 0.06
    assert largest_difference(whole.spy.weights[-1], resumed.spy.weights[-1]) == 0


def test_a_model_that_a_packed_row_would_change_runs_padded_and_says_why(model, train, caplog):
    def mix_with_the_token_before(module, arguments):
        return arguments[0] + pad(arguments[0], (0, 0, 1, -1))

    mixing = copy.deepcopy(model)
    mixing.model.layers[0].mlp.register_forward_pre_hook(mix_with_the_token_before)
    padded = train(of=mixing, forward="padded").spy.gradients[0]
    assert caplog.text == ""
    assert largest_difference(padded, train(of=mixing).spy.gradients[0]) == 0
    assert "traces run as padded rows, not as one packed row: " in caplog.text
    assert "differ" in caplog.text


def test_a_step_of_which_every_token_is_masked_moves_no_weight(train, traces, caplog):
    stale = []
    for trace in traces:
        stale.append(replace(trace, logprobs=[logprob - 5.0 for logprob in trace.logprobs]))
    batches = iter([traces, stale])

    def source(rows):
        return next(batches)

    trainer = train(source, max_steps=2, **MASKED)
    logged = trainer.state.log_history[1]
    assert logged["tokens_masked"] == logged["tokens_trained"] > 0
    assert largest_difference(*trainer.spy.weights) == 0
    assert "step 2 was skipped: the importance correction left no token\n" in caplog.text


@pytest.mark.parametrize("correction", [{}, TRUNCATED, MASKED])
def test_a_token_that_the_engine_thought_impossible_does_not_spoil_the_gradient(
    train, traces, correction
):
    traces[0].logprobs[0] = -150.0
    for gradient in train(**correction).spy.gradients[0].values():
        assert gradient.isfinite().all()


def test_a_corrected_batch_is_not_taken_up_in_the_middle_of_its_iterations(make, train, tmp_path):
    train(max_steps=3, **TWICE, **EACH_STEP, **TRUNCATED)
    trainer = make(max_steps=4, **TWICE, **TRUNCATED)
    with pytest.raises(ValueError, match="step 3 is in the middle of the 2 iterations of a batch"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_micro_batch_that_does_not_fit_is_said_with_what_to_do(make):
    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    def fill_the_memory():
        trainer.model.model.layers[1].mlp.register_forward_hook(fail)

    trainer = make(before_batch=fill_the_memory)
    message = r"\d+ tokens in one pass do not fit .*: raise gradient_accumulation_steps"
    with pytest.raises(InputError, match=message):
        trainer.train()


def test_before_each_batch_and_not_before_each_step_something_is_called(make, traces):
    called = []

    def before():
        called.append("before")

    def source(rows):
        called.append("batch")
        return traces

    trainer = make(source, before_batch=before, max_steps=4, **TWICE)
    trainer.train()
    assert called == ["before", "batch"] * 2
    trainer.train()  # a second training has batches of its own
    assert called == ["before", "batch"] * 4


def test_what_fails_before_a_batch_ends_the_training(make):
    def fail():
        raise OSError("the engine is gone")

    def source(rows):
        pytest.fail("the batch was fetched")

    trainer = make(source, before_batch=fail)
    with pytest.raises(OSError, match="the engine is gone"):
        trainer.train()


def test_metrics_from_outside_are_logged_with_the_step_as_means(make):
    def measure():
        for value in (0.5, 1.5):
            trainer.log_metrics({"engine_difference": value})

    trainer = make(before_batch=measure)
    trainer.train()
    assert trainer.state.log_history[0]["engine_difference"] == 1.0


def test_a_step_that_its_check_refuses_ends_the_training_before_the_weights_change(make):
    checked = []

    def refuse_the_second(step, metrics):
        checked.append(step)
        assert metrics.keys() >= {"difference/root", "tokens/root"}
        if step == 1:
            raise EngineError("the engine sampled other tokens")

    def stop(step, metrics):
        once.control.should_training_stop = True

    trainer = make(max_steps=3)
    trainer.check_step = refuse_the_second
    with pytest.raises(EngineError, match="sampled other tokens"):
        trainer.train()
    assert checked == [0, 1]
    once = make(max_steps=3)
    once.check_step = stop
    once.train()
    assert once.state.global_step == 1
    assert largest_difference(once.model.state_dict(), trainer.model.state_dict()) == 0


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_trainer_scores_any_ids_with_its_present_weights_at_temperature_1(
    model, make, dtype, near
):
    trainer = make(of=copy.deepcopy(model).to(dtype), temperature=0.5)
    sampled, logprobs = sample(model, [2, 3, 4], 20)
    ids = [2, 3, 4, *sampled]
    before = trainer.score(ids)
    assert len(before) == 22
    assert before[2:] == pytest.approx(logprobs, abs=near)
    trainer.train()
    assert trainer.score(ids) != pytest.approx(before, abs=1e-3)
    assert trainer.model.training


def test_a_base_is_scored_without_its_adapter(make):
    torch.manual_seed(0)
    trainer = make(peft_config=RANDOM_LORA)
    ids = list(range(2, 12))
    expected = make().score(ids)
    assert trainer.score(ids, base=True) == pytest.approx(expected, abs=1e-6)
    assert trainer.score(ids) != pytest.approx(expected, abs=1e-2)
    for name, weight in trainer.model.named_parameters():
        assert weight.requires_grad == ("lora_" in name)


def test_the_reference_of_a_given_adapter_is_that_adapter(model, train):
    torch.manual_seed(2)
    adapted = get_peft_model(copy.deepcopy(model), RANDOM_LORA)
    trainer = train(of=adapted, beta=0.1)
    assert trainer.state.log_history[0]["kl"] < 1e-6


def test_the_reference_of_a_full_model_is_the_model_as_it_was_given(model, train, tmp_path):
    """Its folder may hold another class, or other weights: nothing is loaded."""
    given = copy.deepcopy(model)
    given.config._name_or_path = str(tmp_path / "not there")
    trainer = train(of=given, beta=0.1, max_steps=2, learning_rate=0.1)
    first, second, *_ = trainer.state.log_history
    assert first["kl"] < 1e-6
    assert second["kl"] > 1e-3
    reference = trainer.ref_model
    assert largest_difference(reference.state_dict(), model.state_dict()) == 0
    assert not any(weight.requires_grad for weight in reference.parameters())


@pytest.mark.parametrize("forward", ["packed", "padded"])
def test_the_reference_has_a_head_of_its_own(make, forward):
    trainer = make(beta=0.1, forward=forward)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(3)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] > 0.1


def test_an_optimizer_that_is_given_steps_as_it_is(make):
    trainer = make()
    given = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.optimizer = given
    trainer.train()
    assert trainer.optimizer.optimizer is given


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])
def test_steps_of_a_full_model_in_bfloat16_follow_those_in_float32(model, make, optim):
    config = {"optim": optim, "max_steps": 3, "max_grad_norm": 1.0, "learning_rate": 3e-3}

    def masters(trainer):
        found = []
        for group in trainer.optimizer.param_groups:
            for master in group["params"]:
                assert master.dtype == torch.float32
                found.append(master.detach().flatten())
        return torch.cat(found)

    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        trainer = make(of=copy.deepcopy(model).to(dtype), **config)
        trainer.create_optimizer()
        start = masters(trainer)
        trainer.train()
        moved.append(masters(trainer) - start)
    assert cosine_similarity(*moved, dim=0) > 0.9
