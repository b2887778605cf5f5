import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
)

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import frozen_modules, load_policy
from rolltap.trainer.models.saving import save_adapter, save_weights, save_whole
from tests.trainer.models.conftest import EVERY

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

LOADABLE = [(name, save) for name in EVERY for save in (save_weights, save_whole)]
LOADABLE.remove(("gemma3", save_weights))  # without its tower, which an engine has
IDS = torch.arange(5, 45)[None]
EXCEPT_EXPERTS = {"qwen3-moe": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}}
WHOLE = {"qwen3.5": Qwen3_5ForConditionalGeneration, "gemma3": Gemma3ForConditionalGeneration}


def perturbed(model, seed: int = 1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def with_adapter(model, **config):
    torch.manual_seed(2)
    everywhere = {"target_modules": "all-linear", "exclude_modules": frozen_modules(model) or None}
    lora = LoraConfig(r=4, init_lora_weights=False, **{**everywhere, **config})
    return get_peft_model(model, lora).eval()


def beside(key):
    """Return True of a weight that is not of the text part."""
    return any(part in key for part in ("vision", "visual", "projector", "mtp"))


def stored(folder):
    """Return the weights in a folder, by name."""
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@torch.no_grad()
def whole_logits(name, folder):
    """Return the logits of text in the class of the whole checkpoint."""
    family = WHOLE.get(name.removesuffix("-tied").removesuffix("-sharded"), AutoModelForCausalLM)
    return logits(family.from_pretrained(folder, dtype=torch.float32).eval())


def assert_the_same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def assert_reloaded(folder, model):
    """Assert that a folder has the text part of a model, bit for bit."""
    again = load_policy(folder, "float32").state_dict()
    assert again.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again[key], tensor), key


@pytest.mark.parametrize("name", EVERY)
def test_published_weights_are_the_text_part_under_the_names_of_the_base(
    checkpoint, tmp_path, name
):
    base = checkpoint(name)
    model = perturbed(load_policy(base, "float32"))
    save_weights(model, tmp_path, base)
    before = stored(base)
    after = stored(tmp_path)
    assert after.keys() == {key for key in before if not beside(key)}
    assert not [key for key in after if torch.equal(after[key], before[key])]
    if (base / "model.safetensors.index.json").is_file():
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        files = {}
        for file in tmp_path.glob("*.safetensors"):
            files |= dict.fromkeys(load_file(file), file.name)
        assert index["weight_map"] == files
    if name != "gemma3":  # without its tower, which an engine has
        assert_reloaded(tmp_path, model)


@pytest.mark.parametrize("name", EVERY)
def test_the_finished_model_has_all_that_its_base_has(checkpoint, tmp_path, name):
    base = checkpoint(name)
    model = perturbed(load_policy(base, "float32").eval())
    save_whole(model, tmp_path, base)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in base.iterdir()}
    assert config_of(tmp_path) == config_of(base)
    before = stored(base)
    after = stored(tmp_path)
    assert after.keys() == before.keys()
    for key in before:
        assert after[key].shape == before[key].shape
        assert torch.equal(after[key], before[key]) == beside(key), key
    assert_reloaded(tmp_path, model)
    assert_the_same(whole_logits(name, tmp_path), logits(model))
    words = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (tmp_path, base)]
    assert words[0] == words[1]


EXPERTS = {
    "target_modules": [],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
WHOLE_HEAD = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    ("name", "save", "config"),
    [
        *((name, save, EXCEPT_EXPERTS.get(name, {})) for name, save in LOADABLE),
        ("qwen3-moe", save_weights, EXPERTS),
        ("qwen3.5", save_weights, WHOLE_HEAD),
    ],
)
def test_an_adapter_is_merged_into_what_is_saved_and_stays_in_the_model(
    checkpoint, tmp_path, name, save, config
):
    base = checkpoint(name)
    model = with_adapter(load_policy(base, "float32"), **config)
    if config == WHOLE_HEAD:
        perturbed(model)
    expected = logits(model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 0.01
    save(model, tmp_path / "new", base)
    assert_the_same(logits(load_policy(tmp_path / "new", "float32").eval()), expected)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "save", "how", "message"),
    [
        ("qwen3-tied", save_weights, {"target_modules": ["embed_tokens"]}, "are the same weight"),
        ("qwen3-tied", save_weights, WHOLE_HEAD, "are the same weight"),
        ("qwen3-moe", save_adapter, EXPERTS, "the adapter changes"),
        ("qwen3-moe", save_adapter, WHOLE_HEAD, "the adapter changes"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
def test_an_adapter_on_one_of_two_tied_weights_or_that_engines_do_not_take_is_refused(
    checkpoint, tmp_path, name, save, how, message
):
    base = checkpoint(name)
    model = with_adapter(load_policy(base, "float32"), **how)
    with pytest.raises(InputError, match=message):
        save(model, tmp_path, base)


def test_a_base_that_stores_both_of_two_tied_weights_gets_both(checkpoint, tmp_path):
    base = shutil.copytree(checkpoint("qwen3"), tmp_path / "base")
    tied = config_of(base) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(tied))
    model = load_policy(base, "float32")
    model.lm_head.weight = model.model.embed_tokens.weight
    perturbed(model)
    save_whole(model, tmp_path / "new", base)
    after = stored(tmp_path / "new")
    assert torch.equal(after["lm_head.weight"], model.model.embed_tokens.weight)
    assert torch.equal(after["model.embed_tokens.weight"], model.model.embed_tokens.weight)


@pytest.mark.parametrize("save", [save_weights, save_whole])
def test_the_type_of_the_weights_is_the_models_and_in_its_config(checkpoint, tmp_path, save):
    base = checkpoint("qwen3.5")
    model = with_adapter(perturbed(load_policy(base, "bfloat16")))
    save(model, tmp_path, base)
    assert config_of(base)["dtype"] == "float32"
    assert config_of(tmp_path)["dtype"] == "bfloat16"
    for key, tensor in stored(tmp_path).items():
        assert tensor.dtype == torch.bfloat16 or "language_model" not in key
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_model_of_another_checkpoint_is_not_saved(checkpoint, tmp_path):
    model = load_policy(checkpoint("qwen3"), "float32")
    for other in ("qwen3-tied", "qwen3.5"):
        with pytest.raises(
            InputError, match="train from the folder that the model was loaded from"
        ):
            save_weights(model, tmp_path, checkpoint(other))
    with pytest.raises(InputError, match="cannot be read"):
        save_weights(model, tmp_path, tmp_path)


def test_a_base_that_was_saved_with_the_names_of_the_model_keeps_them(checkpoint, tmp_path):
    base = tmp_path / "base"
    model = load_policy(checkpoint("qwen3-moe"), "float32")
    model.save_pretrained(base, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored(base)
    model = perturbed(load_policy(base, "float32"))
    save_weights(model, tmp_path / "new", base)
    after = stored(tmp_path / "new")
    assert after.keys() == stored(base).keys()
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in after.items())


def adapter_names(folder):
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        return {key.rpartition(".lora_")[0] for key in weights.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-tied", "qwen3-moe", "qwen3.5", "qwen3.5-sharded", "gemma3"]
)
def test_an_adapter_has_the_names_of_the_bases_layers(checkpoint, tmp_path, name):
    base = checkpoint(name)
    model = with_adapter(load_policy(base, "float32"), **EXCEPT_EXPERTS.get(name, {}))
    save_adapter(model, tmp_path, base)
    saved = {key.removeprefix("base_model.model.") + ".weight" for key in adapter_names(tmp_path)}
    assert saved
    assert saved <= stored(base).keys()
    matrices = {key for key, tensor in stored(base).items() if tensor.ndim == 2 and "_proj" in key}
    text = {key for key in matrices if not beside(key) and "experts" not in key}
    assert {key for key in saved if "_proj" in key} == text


def test_the_adapter_of_a_plain_text_model_is_what_peft_writes(checkpoint, tmp_path):
    base = checkpoint("qwen3")
    model = with_adapter(load_policy(base, "float32"))
    save_adapter(model, tmp_path / "ours", base)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "peft" / file).read_bytes()


ONE = r"model\.layers\.3\.self_attn\.q_proj"
PATTERNS = {"rank_pattern": {ONE: 16}, "alpha_pattern": {ONE: 64, "q_proj": 16}}


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r"model\.layers\.\d+\.mlp\.down_proj"},
        {"target_modules": ["q_proj", "v_proj"], **PATTERNS},
    ],
    ids=["list", "pattern", "ranks of single layers"],
)
def test_a_saved_adapter_is_loaded_into_the_whole_model_by_peft(checkpoint, tmp_path, config):
    base = checkpoint("qwen3.5")
    model = with_adapter(load_policy(base, "float32"), **config)
    save_adapter(model, tmp_path, base)
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    assert_the_same(logits(PeftModel.from_pretrained(whole, tmp_path).eval()), logits(model))
