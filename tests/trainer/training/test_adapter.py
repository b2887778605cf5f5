"""Adapters that vLLM does not serve are refused, where they are published."""

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.training.arguments import check_arguments, require_servable
from rolltap.trainer.training.recipe import load_recipe
from tests.trainer.training.grpo.tiny import tiny_model
from tests.trainer.training.test_loop import write_recipe


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [3]},
        {"layer_replication": [[0, 1]]},
        {"alora_invocation_tokens": [3]},
        {"use_bdlora": {"target_modules_bd_a": []}},
        {"use_qalora": True},
        {"r": 513},
        {"rank_pattern": {"q_proj": 513}},
        *({"init_lora_weights": init} for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "PiSSA")),
    ],
    ids=str,
)
def test_an_adapter_that_vllm_does_not_serve_is_named_with_its_key(lora):
    (key,) = lora
    with pytest.raises(
        InputError, match=rf'^vLLM does not serve .* lora\.{key} = .*: .*, or set publish = "checkpoint"$'
    ):
        require_servable(lora)


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"r": 512, "rank_pattern": {"q_proj": 512}, "bias": "none", "use_dora": False, "use_rslora": True},
        {"modules_to_save": None, "layer_replication": None, "target_modules": "all-linear", "exclude_modules": ["x"]},
        *({"init_lora_weights": init} for init in (True, False, "gaussian", "eva", "orthogonal")),
    ],
    ids=str,
)
def test_other_adapters_are_served(lora):
    require_servable(lora)


def test_a_start_refuses_it_only_where_adapters_are_published(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    text = '[lora]\nr = 2\ntarget_modules = ["q_proj"]\nuse_dora = true\n'
    check_arguments(load_recipe(write_recipe(tmp_path, text, model=str(tmp_path / "model"))))
    with pytest.raises(InputError, match=r"vLLM does not serve an adapter with lora\.use_dora = True: remove it"):
        check_arguments(load_recipe(write_recipe(tmp_path, text, model=str(tmp_path / "model"), publish="lora")))
