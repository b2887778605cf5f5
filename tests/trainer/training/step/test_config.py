"""Which fields of TRL's GRPOConfig are accepted."""

import math
import re
import sys
from dataclasses import fields

import pytest
from transformers import integrations
from trl import GRPOConfig

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.config import _REASONS, ACCEPTED, TraceGRPOConfig, why_refused

TRLS = {each.name: each for each in fields(GRPOConfig)}
REFUSED = sorted(TRLS.keys() - ACCEPTED)


@pytest.fixture
def config(tmp_path):
    def config(**values):
        return TraceGRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True} | values)

    return config


def test_every_field_is_trls_or_our_own_and_every_reason_belongs_to_a_field():
    assert TRLS.keys() | TraceGRPOConfig.__annotations__.keys() >= ACCEPTED
    for beginnings in _REASONS.values():
        for beginning in beginnings.split():
            assert [name for name in REFUSED if name.startswith(beginning)], beginning


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_trl_that_is_not_accepted_says_its_name_its_value_and_why(config, name):
    why = re.escape(why_refused(name))
    with pytest.raises(InputError, match=rf"^{name} = 'something else': {why}.*; leave it out"):
        config(**{name: "something else"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("top_p", "the recorder's option rolltap_sampling"),
        ("fp16", "load the weights in bfloat16 (bf16) or float32"),
        ("steps_per_generation", "set gradient_accumulation_steps"),
        ("gradient_checkpointing", "use activation_checkpointing"),
        ("hub_model_id", "push the finished model: hf upload REPO RUN/model"),
        ("dataloader_num_workers", "has no use for it"),
    ],
)
def test_a_reason_has_what_to_set_instead(name, why):
    assert why in why_refused(name)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("loss_type", "ppo", "Input should be 'dapo', 'grpo'"),
        ("forward", "tree", "Input should be 'packed' or 'padded'"),
        ("scale_rewards", "foo", "Input should be True, False, 'group', 'batch' or 'none'"),
        ("beta", -1, "Input should be greater than or equal to 0"),
        ("beta", "1", "Input should be a valid number"),
        ("temperature", 0, "Input should be greater than 0"),
        ("temperature", math.inf, "give a finite number"),
        ("num_iterations", 0, "Input should be greater than or equal to 1"),
        ("gradient_accumulation_steps", 1.5, "Input should be a valid integer"),
        ("epsilon", -0.1, "Input should be greater"),
        ("epsilon_high", -0.1, "Input should be greater"),
        ("learning_rate", -1.0, "Input should be greater"),
        ("learning_rate", 0.0, "Input should be greater than 0"),
        ("log_level", "loud", ""),
        ("lr_scheduler_type", "x", "x is not a valid SchedulerType"),
        ("optim_args", "a", "not enough values"),
        ("adam_beta1", 2.0, "Invalid beta parameter"),
        ("report_to", "pencil", "pencil is not supported"),
        ("report_to", ["none", "tensorboard"], "none is not supported"),
        ("report_to", 5, "Input should be a valid string"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(config, name, value, why):
    with pytest.raises(InputError, match=f"^{re.escape(f'{name} = {value!r}')}.*{why}"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("offload_checkpoints", True, {"activation_checkpointing": False}),
        ("use_bias_correction_kl", False, {"beta": 0.0}),
        ("max_completion_length", 9, {"loss_type": "dapo"}),
        ("epsilon", 0.1, {"loss_type": "vespo"}),
        ("vespo_k_pos", 1.0, {"loss_type": "dapo"}),
        ("sapo_temperature_pos", 2.0, {"loss_type": "dapo"}),
        ("entropy_target", 0.5, {"use_adaptive_entropy": False}),
        (
            "vllm_importance_sampling_clip_max",
            2.0,
            {"vllm_importance_sampling_correction": False},
        ),
        ("epsilon", 0.1, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("delta", 2.0, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("optim_args", "a=1", {"optim": "adamw_torch_fused"}),
        ("adam_beta1", 0.8, {"optim": "sgd"}),
        ("adam_beta2", 0.8, {"optim": "adafactor"}),
        ("adam_epsilon", 0.8, {"optim": "rmsprop"}),
        ("warmup_steps", 3, {"lr_scheduler_type": "constant"}),
        ("lr_scheduler_kwargs", {"a": 1}, {"lr_scheduler_type": "constant"}),
        ("num_train_epochs", 5.0, {"max_steps": 2}),
        ("trackio_space_id", "me/x", {"report_to": "none"}),
    ],
)
def test_a_value_without_effect_is_refused_with_the_field_that_takes_it(
    config, name, value, others
):
    message = f"^{re.escape(f'{name} = {value!r}')} has no effect with {next(iter(others))}"
    with pytest.raises(InputError, match=message):
        config(**{name: value}, **others)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": "adalomo"}, "optim = 'adalomo' steps inside the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "steps inside the backward pass"),
        (
            {"loss_type": "dr_grpo"},
            "max_completion_length = None with loss_type = 'dr_grpo'.*: give a number",
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
        ({"loss_type": "cispo"}, "epsilon_high = None with .*: give more than 1"),
        (
            {"loss_type": "cispo", "epsilon_high": 1.0},
            "epsilon_high = 1.0 with loss_type = 'cispo'.*: give more than 1",
        ),
        ({"lr_scheduler_kwargs": {"a": 1}}, r"lr_scheduler_kwargs = {'a': 1}.*: .* argument 'a'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"optim": "adamw_8bit", "adam_beta1": 0.5}, r"^optim = 'adamw_8bit': .*bitsandbytes"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_by_name(config, values, message):
    with pytest.raises(InputError, match=message):
        config(**values)


@pytest.mark.parametrize("reporter", ["tensorboard", "trackio", "wandb"])
def test_an_extra_that_is_not_installed_is_said_before_the_start(config, monkeypatch, reporter):
    def missing():
        return False

    kind = integrations.INTEGRATION_TO_CALLBACK[reporter]
    monkeypatch.setattr(sys.modules[kind.__module__], f"is_{reporter}_available", missing)
    with pytest.raises(InputError, match=f"report_to = '{reporter}': .*requires {reporter} to be"):
        config(report_to=reporter)


@pytest.mark.parametrize("value", ["none", "all", [], ["none"]])
def test_reporters_that_are_there(config, value):
    assert isinstance(config(report_to=value).report_to, list)


def test_defaults_are_trls_but_for_a_few(config, tmp_path):
    ours = config()
    theirs = GRPOConfig(str(tmp_path), use_cpu=True, activation_checkpointing=True)
    different = [name for name in TRLS if getattr(ours, name) != getattr(theirs, name)]
    assert set(different) - {"logging_dir"} == {
        "bf16",
        "router_aux_loss_coef",
        "ignore_data_skip",
        "max_completion_length",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
    }


def test_the_arguments_need_no_gpu_whatever_the_device():
    assert TraceGRPOConfig(output_dir="x").mixed_precision == "no"
