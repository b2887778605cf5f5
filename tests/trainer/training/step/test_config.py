"""Which fields of TRL's GRPOConfig are accepted."""

import math
import sys
from dataclasses import fields

import pytest
from transformers import integrations
from trl import GRPOConfig

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.config import _REASONS, ACCEPTED, TraceGRPOConfig, why_refused


def config(tmp_path, **values):
    return TraceGRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True} | values)


TRLS = {each.name: each for each in fields(GRPOConfig)}
REFUSED = sorted(TRLS.keys() - ACCEPTED)


def test_every_field_is_trls_or_our_own_and_every_reason_belongs_to_a_field():
    assert TRLS.keys() | TraceGRPOConfig.__annotations__.keys() >= ACCEPTED
    for beginnings in _REASONS.values():
        for beginning in beginnings.split():
            assert [name for name in REFUSED if name.startswith(beginning)], beginning


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_trl_that_is_not_accepted_says_its_name_its_value_and_why(tmp_path, name):
    with pytest.raises(InputError, match=rf"^{name} = 'something else': .*; leave it out"):
        config(tmp_path, **{name: "something else"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("top_p", "the recorder's option rolltap_sampling"),
        ("vllm_importance_sampling_cap", "the traces are sampled already"),
        ("fp16", "load the weights in bfloat16 (bf16) or float32"),
        ("steps_per_generation", "set gradient_accumulation_steps"),
        ("gradient_checkpointing", "use activation_checkpointing"),
        ("save_on_each_node", "all nodes save into one folder"),
        ("hub_model_id", "push the finished model: hf upload REPO RUN/model"),
        ("log_level_replica", "the first process alone logs"),
        ("ddp_timeout", "processes average their gradients"),
        ("tf32", "the log-probabilities that the engine sampled with"),
        ("dataloader_num_workers", "has no use for it"),
    ],
)
def test_the_reasons(name, why):
    assert why in why_refused(name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type = 'ppo': Input should be 'dapo', 'grpo'"),
        ({"forward": "tree"}, "forward = 'tree': Input should be 'packed' or 'padded'"),
        (
            {"scale_rewards": "foo"},
            "scale_rewards = 'foo': Input should be True, False, 'group', 'batch' or 'none'",
        ),
        ({"beta": -1}, "beta = -1: Input should be greater than or equal to 0"),
        ({"beta": "1"}, "beta = '1': Input should be a valid number"),
        ({"temperature": 0}, "temperature = 0: Input should be greater than 0"),
        ({"temperature": math.inf}, "temperature = inf: give a finite number"),
        ({"num_iterations": 0}, "num_iterations = 0: Input should be greater than or equal to 1"),
        (
            {"gradient_accumulation_steps": 1.5},
            "gradient_accumulation_steps = 1.5: Input should be a valid integer",
        ),
        ({"epsilon": -0.1}, "epsilon = -0.1: Input should be greater"),
        ({"epsilon_high": -0.1}, "epsilon_high = -0.1: Input should be greater"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0: Input should be greater"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0: Input should be greater than 0"),
        ({"optim": "adalomo"}, "optim = 'adalomo' steps inside the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "steps inside the backward pass"),
        (
            {"activation_checkpointing": False, "offload_checkpoints": True},
            "has no effect with activation_checkpointing = F",
        ),
        (
            {"use_bias_correction_kl": False},
            "use_bias_correction_kl = False has no effect with beta = 0",
        ),
        (
            {"max_completion_length": 9},
            "max_completion_length = 9 has no effect with loss_type = 'dapo'",
        ),
        (
            {"loss_type": "dr_grpo"},
            "max_completion_length = None with loss_type = 'dr_grpo'.*: give a number",
        ),
        (
            {"loss_type": "vespo", "epsilon": 0.1},
            "epsilon = 0.1 has no effect with loss_type = 'vespo'",
        ),
        ({"vespo_k_pos": 1.0}, "vespo_k_pos = 1.0 has no effect with loss_type = 'dapo'"),
        (
            {"sapo_temperature_pos": 2.0},
            "sapo_temperature_pos = 2.0 has no effect with loss_type = 'dapo'",
        ),
        (
            {"entropy_target": 0.5},
            "entropy_target = 0.5 has no effect with use_adaptive_entropy = False",
        ),
        (
            {"vllm_importance_sampling_clip_max": 2.0},
            "clip_max = 2.0 has no effect with vllm_importance_sampling_correction = False",
        ),
        (
            {"entropy_coef": 0.1, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps = 2 with entropies in the loss",
        ),
        (
            {
                "loss_type": "vespo",
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "sequence_mask",
            },
            "vllm_importance_sampling_mode = 'sequence_mask' with loss_type = 'vespo'",
        ),
        (
            {"loss_type": "cispo"},
            "epsilon_high = None with loss_type = 'cispo'.*: give more than 1",
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 1.0},
            "epsilon_high = 1.0 with loss_type = 'cispo'.*: give more than 1",
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1},
            "epsilon = 0.1 has no effect",
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0}, "delta = 2.0 has no effect"),
        ({"log_level": "loud"}, "log_level = 'loud'"),
        ({"lr_scheduler_type": "x"}, "lr_scheduler_type = 'x': x is not a valid SchedulerType"),
        ({"lr_scheduler_kwargs": {"a": 1}}, r"lr_scheduler_kwargs = {'a': 1}.*: .* argument 'a'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"optim_args": "a"}, r"^optim_args = 'a': not enough values"),
        ({"adam_beta1": 2.0}, r"^adam_beta1 = 2\.0: Invalid beta parameter"),
        ({"optim": "adamw_8bit", "adam_beta1": 0.5}, r"^optim = 'adamw_8bit': .*bitsandbytes"),
        (
            {"optim_args": "a=1"},
            r"^optim_args = 'a=1' has no effect with optim = 'adamw_torch_fused': leave one of",
        ),
        (
            {"optim": "sgd", "adam_beta1": 0.8},
            "adam_beta1 = 0.8 has no effect with optim = 'sgd': leave one of them",
        ),
        (
            {"optim": "adafactor", "adam_beta2": 0.8},
            "adam_beta2 = 0.8 has no effect with optim = 'adafactor'",
        ),
        (
            {"optim": "rmsprop", "adam_epsilon": 0.8},
            "adam_epsilon = 0.8 has no effect with optim = 'rmsprop'",
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 3},
            (
                "warmup_steps = 3 has no effect with lr_scheduler_type = 'constant': leave one of"
                " them out"
            ),
        ),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}},
            "lr_scheduler_kwargs = {'a': 1} has no",
        ),
        (
            {"max_steps": 2, "num_train_epochs": 5.0},
            "num_train_epochs = 5.0 has no effect with max_steps = 2",
        ),
        ({"report_to": "pencil"}, "report_to = 'pencil': pencil is not supported"),
        ({"report_to": ["none", "tensorboard"]}, "none is not supported"),
        ({"report_to": 5}, "report_to = 5: Input should be a valid string"),
        (
            {"report_to": "none", "trackio_space_id": "me/x"},
            "trackio_space_id = 'me/x' has no effect with report_to",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(tmp_path, values, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, **values)


@pytest.mark.parametrize("reporter", sorted({"tensorboard", "trackio", "wandb"}))
def test_an_extra_that_is_not_installed_is_said_before_the_start(tmp_path, monkeypatch, reporter):
    kind = integrations.INTEGRATION_TO_CALLBACK[reporter]
    monkeypatch.setattr(sys.modules[kind.__module__], f"is_{reporter}_available", lambda: False)
    with pytest.raises(
        InputError, match=rf"report_to = '{reporter}': .*requires {reporter} to be installed"
    ):
        config(tmp_path, report_to=reporter)


@pytest.mark.parametrize("value", ["none", "all", [], ["none"]])
def test_reporters_that_are_there(tmp_path, value):
    assert isinstance(config(tmp_path, report_to=value).report_to, list)


def test_defaults_are_trls_but_for_a_few(tmp_path):
    ours, theirs = (
        config(tmp_path),
        GRPOConfig(str(tmp_path), use_cpu=True, activation_checkpointing=True),
    )
    different = {
        name
        for name in TRLS
        if getattr(ours, name) != getattr(theirs, name) and name != "logging_dir"
    }
    assert different == {
        "bf16",
        "router_aux_loss_coef",
        "ignore_data_skip",
        "max_completion_length",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
    }


def test_the_arguments_need_no_gpu_whatever_the_device():
    assert TraceGRPOConfig(output_dir="x").mixed_precision == "no"
