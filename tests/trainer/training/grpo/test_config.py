"""Which fields of TRL's GRPOConfig are accepted."""

from dataclasses import fields

import pytest
from trl import GRPOConfig

from rolltap.addons.errors import InputError
from rolltap.trainer.training.grpo.config import ACCEPTED, REFUSED, TraceGRPOConfig


def config(tmp_path, **values):
    return TraceGRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False} | values)


def test_every_field_of_trl_is_either_accepted_or_refused():
    names = {declared.name for declared in fields(GRPOConfig)}
    assert names == ACCEPTED | REFUSED.keys()
    assert not ACCEPTED & REFUSED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_says_its_name_and_why(tmp_path, name):
    with pytest.raises(InputError) as failure:
        config(tmp_path, **{name: "something else"})
    assert str(failure.value).startswith(f"{name}='something else' is refused: {REFUSED[name]}")


def test_a_field_that_a_newer_trl_brings_is_refused_until_it_is_known(tmp_path, monkeypatch):
    monkeypatch.delitem(REFUSED, "top_p")
    assert config(tmp_path, top_p=1.0).top_p == 1.0
    with pytest.raises(InputError, match=r"top_p=0\.5 is refused: this version of rolltap does not know it"):
        config(tmp_path, top_p=0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_type": "vespo"}, "choose one of dapo, cispo"),
        ({"steps_per_generation": 3}, "leave steps_per_generation unset"),
        ({"forward": "tree"}, "forward='tree': choose one of segments, padded"),
        ({"normalise": "rows"}, "choose one of tokens, sessions, constant"),
        ({"mismatch": "sequence"}, "choose one of clip, truncate, mask"),
        ({"mismatch_min": 1.5}, "give limits with 0 <= mismatch_min <= 1 <= mismatch_max"),
        ({"mismatch_max": 0.9}, "give limits with 0 <= mismatch_min <= 1 <= mismatch_max"),
        ({"tokens_per_segment": 15}, "tokens_per_segment=15: give at least 16"),
        ({"optim": "adalomo"}, "optim='adalomo' steps inside the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "steps inside the backward pass"),
        ({"loss_type": "grpo"}, "choose one of dapo, cispo"),
        ({"forward": "padded", "memory_gib": 3.0}, "memory_gib=3.0 has no effect with forward='padded'"),
        ({"forward": "padded", "tokens_per_segment": 64}, "tokens_per_segment=64 has no effect"),
        ({"activation_checkpointing": False, "offload_states": True}, "has no effect with activation_checkpointing=F"),
        ({"mismatch_max": 3.0}, "mismatch_max=3.0 has no effect with mismatch='clip'"),
        ({"memory_gib": 0}, "memory_gib=0: give a number above 0"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(tmp_path, values, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, **values)


def test_defaults_are_trls_but_for_a_few(tmp_path):
    ours, theirs = config(tmp_path), GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, activation_checkpointing=True)
    different = {
        declared.name
        for declared in fields(GRPOConfig)
        if getattr(ours, declared.name) != getattr(theirs, declared.name) and declared.name != "logging_dir"
    }
    assert different == {"router_aux_loss_coef", "ignore_data_skip"}


def test_checkpointing_that_is_not_set_is_on(tmp_path):
    assert config(tmp_path, activation_checkpointing=None).activation_checkpointing is True
