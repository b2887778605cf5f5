"""Publishing to a real vLLM: it must then sample with the log-probabilities that transformers computes."""

import copy
import json
import threading
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from rolltap.addons.errors import EngineError, InputError, RunError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.publish import CheckpointPublisher, LoraPublisher

pytestmark = [
    pytest.mark.engine,
    # peft 0.21 uses a name that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PROMPT = [5 + i % 100 for i in range(300)]
"""Token ids, more than a block of vLLM's prefix cache."""


@pytest.fixture
def base(engine) -> Qwen3ForCausalLM:
    """Return the model that the engine was started with."""
    return Qwen3ForCausalLM.from_pretrained(engine.model_dir, dtype=torch.float32).eval()


@pytest.fixture
def restored(engine, base, tmp_path):
    """Restore the base weights and unload all adapters after the test."""
    yield
    for served in engine.http.get("/v1/models").json()["data"]:
        if served["parent"]:
            post(engine, "/v1/unload_lora_adapter", {"lora_name": served["id"]})
    CheckpointPublisher(engine.url, tmp_path / "base", tmp_path).publish(base, "default")


@pytest.fixture
def untouched(engine, base):
    """Check after the test that the engine is not paused and samples from the base weights."""
    yield
    assert engine.http.get("/is_paused").json() == {"is_paused": False}
    assert engine.http.get("/weight_info").json() == {"weight_version": "default"}
    assert_samples_like(base, generate(engine))


def post(engine, path: str, body: dict) -> httpx.Response:
    response = engine.http.post(path, json=body, timeout=120)
    response.raise_for_status()
    return response


def generate(engine, model: str | None = None) -> dict:
    """Return 16 tokens that the engine samples after `PROMPT`, with their log-probabilities and weight versions."""
    sampling = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling} | ({"model": model} if model else {})
    return post(engine, "/inference/v1/generate", body).json()["choices"][0]


@torch.no_grad()
def assert_samples_like(model, choice: dict) -> None:
    """Assert that the log-probabilities in `choice` are those of `model`."""
    ids = choice["token_ids"]
    logits = model(input_ids=torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    reported = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
    torch.testing.assert_close(reported, expected, atol=1e-4, rtol=0)


def perturbed(model: Qwen3ForCausalLM, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a copy with other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return other


def with_adapter(model: Qwen3ForCausalLM, rank: int = 4, seed: int = 0):
    """Return a copy with an adapter that changes its outputs."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), config).eval()


def policy(run: Path) -> dict:
    return json.loads((run / "policy.json").read_text())


def test_a_published_checkpoint_is_what_the_engine_samples_from(engine, base, restored, tmp_path):
    assert_samples_like(base, generate(engine))
    publisher = CheckpointPublisher(engine.url, tmp_path / "published", tmp_path)
    for version in ("1", "2"):
        model = perturbed(base, seed=int(version))
        publisher.publish(model, version)
        choice = generate(engine)
        assert_samples_like(model, choice)
        assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 16}]
        assert policy(tmp_path) == {"model": None, "version": version}
        assert [folder.name for folder in (tmp_path / "published").iterdir()] == [f"policy-{version}"]


def test_a_version_may_be_published_again_as_a_resumed_run_does(engine, base, restored, tmp_path):
    for seed in (1, 2):
        model = perturbed(base, seed)
        CheckpointPublisher(engine.url, tmp_path / "published", tmp_path).publish(model, "1")
        assert_samples_like(model, generate(engine))


def test_an_adapter_is_merged_into_the_checkpoint_and_stays_as_it_was_in_training(engine, base, restored, tmp_path):
    model = with_adapter(base)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    CheckpointPublisher(engine.url, tmp_path / "published", tmp_path).publish(model, "1")
    assert_samples_like(model, generate(engine))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_call_in_flight_ends_with_the_weights_it_began_with(engine, base, restored, tmp_path):
    sampling = {"max_tokens": 1000, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
    with engine.http.stream("POST", "/inference/v1/generate", json=body, timeout=120) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        reader = threading.Thread(target=lambda: events.extend(lines))
        reader.start()
        CheckpointPublisher(engine.url, tmp_path / "published", tmp_path).publish(perturbed(base), "1")
        reader.join()
    events = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    versions = [
        choice["weight_versions"] for event in events for choice in event["choices"] if choice["weight_versions"]
    ]
    assert versions == [[{"version": "default", "start": 0, "end": 1000}]]


def test_the_engine_goes_on_after_it_refused_a_step_of_the_publication(engine, base, restored, tmp_path):
    with pytest.raises(EngineError, match=r"update_weight_version: 400 .*see the engine's log"):
        CheckpointPublisher(engine.url, tmp_path / "published", tmp_path).publish(perturbed(base), 7)  # not a string
    assert engine.http.get("/is_paused").json() == {"is_paused": False}
    assert not (tmp_path / "policy.json").exists()


def test_a_published_adapter_is_served_under_its_own_name_beside_the_base(engine, base, restored, tmp_path):
    model = with_adapter(base)
    LoraPublisher(engine.url, tmp_path / "published", tmp_path).publish(model, "1")
    assert policy(tmp_path) == {"model": "policy-1", "version": "1"}
    assert_samples_like(model, generate(engine, "policy-1"))
    assert_samples_like(base, generate(engine))


def test_the_newest_two_adapters_stay_loaded(engine, base, restored, tmp_path):
    publisher = LoraPublisher(engine.url, tmp_path / "published", tmp_path)
    models = {f"1a2b3c4d.{step}.0": with_adapter(base, seed=step) for step in (1, 2, 3)}
    for version, model in models.items():
        publisher.publish(model, version)
    served = {model["id"] for model in engine.http.get("/v1/models").json()["data"] if model["parent"]}
    assert served == {"policy-1a2b3c4d.2.0", "policy-1a2b3c4d.3.0"}
    assert sorted(path.name.rpartition("-")[0] for path in (tmp_path / "published").iterdir()) == sorted(served)
    for version in ("1a2b3c4d.2.0", "1a2b3c4d.3.0"):
        assert_samples_like(models[version], generate(engine, f"policy-{version}"))


def test_a_resumed_run_replaces_the_adapters_of_the_earlier_one(engine, base, restored, tmp_path):
    earlier = LoraPublisher(engine.url, tmp_path / "published", tmp_path)
    earlier.publish(with_adapter(base, seed=1), "1a2b3c4d.1.0")
    earlier.publish(with_adapter(base, seed=2), "1a2b3c4d.2.0")
    generate(engine, "policy-1a2b3c4d.1.0")
    model = with_adapter(base, seed=3)
    LoraPublisher(engine.url, tmp_path / "published", tmp_path).publish(model, "1a2b3c4d.1.0")
    assert_samples_like(model, generate(engine, "policy-1a2b3c4d.1.0"))
    served = {model["id"] for model in engine.http.get("/v1/models").json()["data"] if model["parent"]}
    assert served == {"policy-1a2b3c4d.1.0"}


def test_an_adapter_that_the_engine_refuses_is_not_the_policy(engine, base, restored, tmp_path):
    with pytest.raises(EngineError, match=r"load_lora_adapter: \d+ .*LoRA rank 64 .*see the engine's log"):
        LoraPublisher(engine.url, tmp_path / "published", tmp_path).publish(with_adapter(base, rank=64), "1")
    assert not (tmp_path / "policy.json").exists()


def test_a_model_without_an_adapter_is_refused(engine, base, untouched, tmp_path):
    with pytest.raises(InputError, match="train with a peft_config, or publish checkpoints"):
        LoraPublisher(engine.url, tmp_path / "published", tmp_path).publish(base, "1")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_checkpoint_is_refused_before_the_engine_is_touched(
    engine, base, untouched, tmp_path, monkeypatch, missing
):
    save = base.save_pretrained
    model = perturbed(base)
    monkeypatch.setattr(model, "save_pretrained", lambda folder: (save(folder), (folder / missing).unlink()))
    with pytest.raises(InputError, match=r"policy-1 is not a checkpoint: it needs config.json and \*.safetensors"):
        CheckpointPublisher(engine.url, tmp_path / "published", tmp_path).publish(model, "1")


def test_a_folder_that_cannot_be_written_is_named(engine, base, untouched, tmp_path):
    (tmp_path / "published").write_text("a file")
    with pytest.raises(RunError, match=r"published/policy-1 could not be written: .*the engine is unchanged"):
        CheckpointPublisher(engine.url, tmp_path / "published", tmp_path).publish(perturbed(base), "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM on a GPU reloads tied embeddings correctly")
def test_tied_embeddings_are_refused_where_the_engine_would_keep_the_old_ones(engine, base, untouched, tmp_path):
    model = perturbed(base)
    model.config.tie_word_embeddings = True
    with pytest.raises(InputError, match=r"untie them before the engine is started .* or publish LoRA adapters"):
        CheckpointPublisher(engine.url, tmp_path / "published", tmp_path).publish(model, "1")


@pytest.mark.parametrize("publisher", [CheckpointPublisher, LoraPublisher])
def test_an_engine_that_is_not_there_is_an_error_that_says_so(base, tmp_path, publisher):
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9/.*no engine answers .*start it with `rolltap serve`"):
        publisher("http://127.0.0.1:9", tmp_path / "published", tmp_path).publish(with_adapter(base), "1")
    assert not (tmp_path / "policy.json").exists()


def test_an_engine_without_the_routes_is_an_error_that_names_the_switch(engine, base, untouched, tmp_path):
    # /v1/pause is a 404 of vLLM, as /pause is without its development mode
    with pytest.raises(EngineError, match=r"/pause\?mode=wait: 404 .*start it with .*VLLM_SERVER_DEV_MODE=1"):
        CheckpointPublisher(f"{engine.url}/v1", tmp_path / "published", tmp_path).publish(perturbed(base), "1")
    with pytest.raises(EngineError, match=r"load_lora_adapter: 404 .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        EngineAdmin(f"{engine.url}/v1").load_adapter("policy-1", tmp_path)
