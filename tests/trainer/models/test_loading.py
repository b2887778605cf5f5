"""A model folder as the model that is trained, its stored weights, and the kernels that it can
use."""

import json
import shutil
import sys
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import (
    frozen_modules,
    kernels,
    load_policy,
    load_tokenizer,
    meta_policy,
)
from tests.trainer.models.conftest import EVERY

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-tied": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}


@pytest.fixture
def copied(checkpoint, tmp_path):
    """Return a function: name of a checkpoint -> a copy that the test may change."""
    return lambda name: shutil.copytree(checkpoint(name), tmp_path / name)


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", CLASSES)
def test_a_checkpoint_is_loaded_as_its_text_part_in_the_type_that_is_asked_for(checkpoint, name):
    model = load_policy(checkpoint(name), "bfloat16")
    assert type(model).__name__ == CLASSES[name]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def described(model):
    """Return the class and the parameters of a model, and whether its embeddings are tied."""
    shapes = {}
    for name, parameter in model.named_parameters():
        shapes[name] = (parameter.shape, parameter.dtype)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings == tied
    return type(model), shapes, tied


@pytest.mark.parametrize("name", EVERY)
def test_the_model_without_weights_is_the_model_with_them_and_tied_as_the_checkpoint_says(
    checkpoint, tmp_path, name
):
    shutil.copy(checkpoint(name) / "config.json", tmp_path)
    model = described(load_policy(checkpoint(name), "float32"))
    without = meta_policy(tmp_path, "float32")
    assert {parameter.device.type for parameter in without.parameters()} == {"meta"}
    assert described(without) == model
    assert model[2] == (name in ("qwen3-tied", "qwen3-sharded", "qwen3.5-tied", "gemma3"))


@pytest.mark.parametrize("tied", [True, False])
def test_a_top_level_tie_counts_where_the_text_part_does_not_say(copied, tied):
    folder = copied("qwen3.5-tied" if tied else "qwen3.5")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    for model in (load_policy(folder, "float32"), meta_policy(folder, "float32")):
        assert described(model)[2] == tied


def test_the_text_parts_own_word_counts_more_than_the_top_level(copied):
    folder = copied("qwen3.5")
    change(folder / "config.json", tie_word_embeddings=True)
    assert not load_policy(folder, "float32").config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "lost"), [("qwen3", "lm_head.weight"), ("qwen3-tied", "model.norm.weight")]
)
def test_weights_that_the_checkpoint_lacks_are_an_error_and_not_random_numbers(copied, name, lost):
    file = copied(name) / "model.safetensors"
    weights = load_file(file)
    del weights[lost]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=lost.replace(".", r"\.")):
        load_policy(file.parent, "float32")


DAMAGED = {
    "broken config": "config.json cannot be read",
    "no config": "has no config.json",
    "no folder": "has no config.json",
    "no weights": "needs model.safetensors",
    "cut weights": "weights in .* cannot be read",
    "lost file": "weights in .* cannot be read",
}


def damage(folder, kind):
    config = folder / "config.json"
    weights = folder / "model.safetensors"
    if kind == "broken config":
        config.write_text("{")
    elif kind == "no config":
        config.unlink()
    elif kind == "no folder":
        shutil.rmtree(folder)
    elif kind == "no weights":
        weights.unlink()
    elif kind == "cut weights":
        weights.write_bytes(weights.read_bytes()[:10000])
    else:
        files = {"model.norm.weight": "model-00001-of-00001.safetensors"}
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.rename(folder / "other.safetensors")


def refused(folder, message):
    with pytest.raises(InputError, match=message) as error:
        load_policy(folder, "float32")
    assert str(folder) in str(error.value)
    assert str(error.value).startswith("model: ")


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_folder_is_an_error_that_names_it(copied, kind):
    folder = copied("qwen3")
    damage(folder, kind)
    refused(folder, DAMAGED[kind])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "from_next_year"}, "from_next_year"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "trust_remote_code"),
        ({"model_type": "clip"}, "cannot be loaded"),
        ({"intermediate_size": 96}, "cannot be loaded"),
    ],
)
def test_a_configuration_that_does_not_fit_is_an_error_that_names_the_folder(
    copied, values, message
):
    folder = copied("qwen3")
    change(folder / "config.json", **values)
    refused(folder, message)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype", "device_map"])
def test_arguments_that_are_decided_elsewhere_are_refused(checkpoint, name):
    with pytest.raises(InputError, match=f"model_init_kwargs.{name}"):
        load_policy(checkpoint("qwen3"), "float32", **{name: "auto"})


def test_other_arguments_reach_the_model(checkpoint):
    folder = checkpoint("qwen3")
    dropped = {"attention_dropout": 0.5, "trust_remote_code": True}
    for load in (load_policy, meta_policy):
        assert load(folder, "float32", **dropped).config.attention_dropout == 0.5
    eager = load_policy(checkpoint("qwen3.5"), "float32", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"


def test_the_tokenizer_of_a_vision_language_model_needs_no_image_library(checkpoint, monkeypatch):
    for module in ("torchvision", "PIL"):
        monkeypatch.setitem(sys.modules, module, None)
    ids = load_tokenizer(checkpoint("gemma3"))("ls").input_ids
    assert load_tokenizer(checkpoint("qwen3.5")).decode(ids) == "ls"


def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(copied):
    folder = copied("qwen3")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "qwen3.5"])
def test_a_text_only_model_has_no_frozen_modules(checkpoint, name):
    model = load_policy(checkpoint(name), "float32")
    assert frozen_modules(model) == []
    for key, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert "visual" not in key


def test_a_tower_that_must_be_loaded_is_frozen_and_gets_no_adapter(checkpoint):
    model = load_policy(checkpoint("gemma3"), "float32")
    frozen = frozen_modules(model)
    tops = {name for name in frozen if name.rpartition(".")[0] not in frozen}
    assert tops == {"model.vision_tower", "model.multi_modal_projector"}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(tuple(tops))

    everywhere = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", exclude_modules=frozen)
    )
    adapted = {name for name, parameter in everywhere.named_parameters() if parameter.requires_grad}
    assert adapted
    assert all(".language_model." in name for name in adapted)
    assert frozen_modules(everywhere.get_base_model()) == frozen


GATED_DELTA = ["causal-conv1d", "flash-linear-attention"]


@pytest.mark.parametrize(
    ("model_type", "packages"),
    [
        ("qwen3", []),
        ("qwen3_moe", []),
        ("qwen3_5", GATED_DELTA),
        ("qwen3_5_text", GATED_DELTA),
        ("qwen3_next", GATED_DELTA),
        ("bamba", ["causal-conv1d", "mamba-ssm"]),
        ("brings_its_own_code", []),
    ],
)
def test_the_kernels_of_a_model_are_those_that_transformers_looks_for(model_type, packages):
    assert sorted(kernels(model_type)) == packages


def test_a_kernel_package_is_there_if_it_can_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    assert kernels("qwen3_5") == {"causal-conv1d": False, "flash-linear-attention": True}
