"""Publishing to a real vLLM: it must then sample with the log-probabilities that transformers
computes."""

import copy
import json
import threading
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from rolltap.addons.errors import EngineError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import make_publisher
from rolltap.trainer.engine.weights import LIMITS, Base, fixed_ids
from tests.trainer.engine.acting import agreed

pytestmark = [
    pytest.mark.engine,
    # peft 0.21 uses a name that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PROMPT = [5 + i % 100 for i in range(300)]
"""Token ids, more than a block of vLLM's prefix cache."""
RUN = "1a2b3c4d"


@pytest.fixture
def base(engine) -> Qwen3ForCausalLM:
    """Return the model that the engine was started with."""
    return Qwen3ForCausalLM.from_pretrained(engine.model_dir, dtype=torch.float32).eval()


@pytest.fixture
def restored(engine):
    """Restore the base weights and unload all adapters after the test."""
    yield
    restore(engine)


def restore(engine) -> None:
    for name in adapters(engine):
        post(engine, "/v1/unload_lora_adapter", {"lora_name": name})
    EngineAdmin(engine.url).serve(engine.model_dir, "default")


@pytest.fixture
def publisher(engine, tmp_path):
    """Return a function that returns a publisher to some engines, by default to one."""

    def publisher(kind, *urls, adapters=2, keep=False):
        engines = Engines(urls or engine.url, keep=keep)
        folder = tmp_path / "published"
        return make_publisher(
            kind, engines, folder=folder, run=tmp_path, base=engine.model_dir, adapters=adapters
        )

    return publisher


def post(engine, path: str, body: dict) -> httpx.Response:
    response = engine.http.post(path, json=body, timeout=600)
    response.raise_for_status()
    return response


def asked(tokens: int, **fields) -> dict:
    """Return a request for tokens after `PROMPT`."""
    sampling = NEUTRAL_SAMPLING | {"max_tokens": tokens, "logprobs": 0, "ignore_eos": True}
    return {"token_ids": PROMPT, "sampling_params": sampling, **fields}


def generate(engine, **fields) -> dict:
    """Return 16 tokens that the engine samples, with their log-probabilities and weight
    versions."""
    return post(engine, "/inference/v1/generate", asked(16, **fields)).json()["choices"][0]


@torch.no_grad()
def score(model, ids: list[int]) -> list[float]:
    """Return the log-probability of each token of `ids` but the first."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def reported(*choices: dict) -> list[float]:
    return [token["logprob"] for choice in choices for token in choice["logprobs"]["content"]]


def assert_samples_like(model, choice: dict, version: str | None = None) -> None:
    """Assert that the log-probabilities in `choice` are those of `model`, and that it names the
    version."""
    if version is not None:
        assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 16}]
    expected = score(model, PROMPT + choice["token_ids"])[len(PROMPT) - 1 :]
    assert reported(choice) == pytest.approx(expected, abs=1e-4)


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
    config = LoraConfig(
        r=rank, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], init_lora_weights=False
    )
    return get_peft_model(copy.deepcopy(model), config).eval()


def adapters(engine) -> set[str]:
    cards = engine.http.get("/v1/models").json()["data"]
    return {card["id"] for card in cards if card["parent"]}


def policy(run: Path) -> dict:
    return json.loads((run / "policy.json").read_text())


def test_it_tells_its_load_by_the_metrics_that_are_read(engine):
    load = EngineAdmin(engine.url).load()
    assert (load.running, load.waiting, load.preemptions) == (0, 0, 0)
    assert 0 <= load.cache < 1


def test_a_published_checkpoint_is_what_the_engine_samples_from(
    engine, base, restored, publisher, tmp_path
):
    assert_samples_like(base, generate(engine))
    publishes = publisher("checkpoint")
    for version in (f"{RUN}.0.0", f"{RUN}.1.0"):
        model = perturbed(base, seed=len(version))
        publishes.publish(model, version, agreed)
        assert_samples_like(model, generate(engine), version)
        assert policy(tmp_path) == {"model": None, "version": version}


def test_an_adapter_is_merged_into_the_checkpoint_and_stays_as_it_was_in_training(
    engine, base, restored, publisher
):
    model = with_adapter(base)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    publisher("checkpoint").publish(model, f"{RUN}.1.0", agreed)
    assert_samples_like(model, generate(engine))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def generated_meanwhile(engine, publish, *, tokens: int) -> list[dict]:
    """Return the choices of a stream of so many tokens during which `publish` is called."""
    body = asked(tokens, stream=True)
    with engine.http.stream("POST", "/inference/v1/generate", json=body, timeout=600) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        reader = threading.Thread(target=events.extend, args=[lines])
        reader.start()
        publish()
        reader.join()
    choices = []
    for event in events:
        if event.startswith("data: {"):
            choices += json.loads(event.removeprefix("data: "))["choices"]
    return choices


def test_a_call_in_flight_ends_with_the_weights_it_began_with(engine, base, restored, publisher):
    def publish():
        publisher("checkpoint").publish(perturbed(base), f"{RUN}.1.0", agreed)

    choices = generated_meanwhile(engine, publish, tokens=1000)
    versions = [choice["weight_versions"] for choice in choices if choice["weight_versions"]]
    assert versions == [[{"version": "default", "start": 0, "end": 1000}]]


def test_a_call_in_flight_that_is_kept_goes_on_with_the_new_weights_and_their_keys(
    engine, base, restored, publisher
):
    publishes = publisher("checkpoint", keep=True)
    weights = {"default": base}
    # on a busy machine all of a call may be on one side
    for step, tokens in ((1, 2_000), (2, 12_000), (3, 24_000)):
        before = list(weights)[-1]
        version = f"{RUN}.{step}.0"
        weights[version] = perturbed(base, seed=step)
        publish = partial(publishes.publish, weights[version], version, agreed)
        choices = generated_meanwhile(engine, publish, tokens=tokens)
        (spans,) = [choice["weight_versions"] for choice in choices if choice["weight_versions"]]
        if len(spans) > 1:
            break
    old, new = spans
    swap = old["end"]
    assert old == {"version": before, "start": 0, "end": swap}
    assert new == {"version": version, "start": swap, "end": tokens}
    assert swap > 0
    ids = [token for choice in choices for token in choice["token_ids"]][: swap + 500]
    first = score(weights[before], PROMPT + ids)[len(PROMPT) - 1 :]
    second = score(weights[version], PROMPT + ids)[len(PROMPT) - 1 :]
    expected = first[:swap] + second[swap:]
    assert reported(*choices)[: len(expected)] == pytest.approx(expected, abs=1e-4)


def test_an_engine_that_cannot_read_a_checkpoint_samples_from_the_previous_one(
    engine, base, restored, publisher, tmp_path, monkeypatch
):
    publishes = publisher("checkpoint")
    model = perturbed(base, seed=1)
    publishes.publish(model, f"{RUN}.1.0", agreed)
    install = EngineAdmin.install

    def truncated(admin, checkpoint, version):
        # as on a disk that another machine does not see whole
        if checkpoint.name == f"policy-{RUN}.2.0":
            weights = checkpoint / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:5000])
        install(admin, checkpoint, version)

    monkeypatch.setattr(EngineAdmin, "install", truncated)
    with pytest.raises(
        EngineError, match=rf"/collective_rpc: 500 .*all engines serve the weights {RUN}\.1\.0"
    ):
        publishes.publish(perturbed(base, seed=2), f"{RUN}.2.0", agreed)
    assert_samples_like(model, generate(engine), f"{RUN}.1.0")
    assert policy(tmp_path)["version"] == f"{RUN}.1.0"


def test_a_start_finds_an_engine_that_was_killed_between_pause_and_resume(
    engine, base, restored, tmp_path, tokenizer
):
    ids = fixed_ids(tokenizer)
    said = []
    trainer = Base(engine.model_dir, f"{RUN}.0.3", ids, partial(score, base), LIMITS["float32"])

    def verify():
        return max(Engines(engine.url).verify_base(trainer, said.append).values())

    assert verify() < 1e-4
    assert said == []
    (tmp_path / "half").mkdir()
    perturbed(base).save_pretrained(tmp_path / "half")
    admin = EngineAdmin(engine.url)
    admin.pause()
    admin.reload_weights(tmp_path / "half")
    verify()
    assert "is paused, as a killed training leaves it" in said[0]
    assert (admin.is_paused(), admin.weight_version()) == (False, f"{RUN}.0.3")
    assert_samples_like(base, generate(engine))


def test_the_newest_adapters_are_served_under_their_own_names_beside_the_base(
    engine, base, restored, publisher, tmp_path
):
    publishes = publisher("lora", adapters=3)
    models = {}
    for step in range(5):
        model = with_adapter(base, seed=step)
        name = publishes.publish(model, f"{RUN}.{step}.0", agreed)
        assert policy(tmp_path) == {"model": name, "version": f"{RUN}.{step}.0"}
        models[name] = model
    kept = list(models)[2:]
    assert adapters(engine) == set(kept)
    for name in kept:
        assert_samples_like(models[name], generate(engine, model=name))
    assert_samples_like(base, generate(engine))
    own = partial(score, model)
    engines = Engines(engine.url)
    assert max(engines.differences(name, PROMPT[:200], own).values()) < 1e-4
    assert max(engines.differences(None, PROMPT[:200], own).values()) > 1e-2


def test_an_adapter_that_the_engine_refuses_is_not_the_policy(
    engine, base, restored, publisher, tmp_path
):
    with pytest.raises(
        EngineError, match=r"load_lora_adapter: \d+ .*LoRA rank 64 .*rolltap serve --lora-rank"
    ):
        publisher("lora").publish(with_adapter(base, rank=64), f"{RUN}.1.0", agreed)
    assert not (tmp_path / "policy.json").exists()
    assert adapters(engine) == set()


@pytest.mark.deep  # short, test_engines and test_publish have two engines that are scripted
class TestTwoEngines:
    @pytest.fixture
    def urls(self, engine, second_engine, restored):
        yield engine.url, second_engine.url
        restore(second_engine)

    @pytest.fixture
    def refuses(self, second_engine, monkeypatch):
        """Return a function that lets a step of the second engine fail, as often as is said."""

        def refuses(step, times=1):
            real = getattr(EngineAdmin, step)
            left = [*range(times)]

            def maybe(admin, *args):
                if admin.url == second_engine.url and left:
                    left.pop()
                    raise EngineError(f"{admin.url} refuses")
                return real(admin, *args)

            monkeypatch.setattr(EngineAdmin, step, maybe)

        return refuses

    def test_both_serve_a_published_checkpoint_or_both_the_previous_one(
        self, engine, second_engine, urls, base, publisher, refuses
    ):
        publishes = publisher("checkpoint", *urls)
        model = perturbed(base, seed=1)
        publishes.publish(model, f"{RUN}.1.0", agreed)
        for each in (engine, second_engine):
            assert_samples_like(model, generate(each))
        refuses("reload_weights")
        with pytest.raises(
            EngineError,
            match=rf"{second_engine.url} refuses; all engines serve the weights {RUN}.1.0",
        ):
            publishes.publish(perturbed(base, seed=2), f"{RUN}.2.0", agreed)
        for each in (engine, second_engine):
            assert_samples_like(model, generate(each), f"{RUN}.1.0")

    def test_an_engine_that_cannot_go_back_is_paused_and_the_next_start_restores_it(
        self, engine, second_engine, urls, base, publisher, refuses, tokenizer
    ):
        refuses("reload_weights", times=2)
        with pytest.raises(
            EngineError, match=rf"could not go back .*{second_engine.url} refuses.*stays paused"
        ):
            publisher("checkpoint", *urls).publish(perturbed(base), f"{RUN}.1.0", agreed)
        assert [EngineAdmin(url).is_paused() for url in urls] == [False, True]
        ids = fixed_ids(tokenizer)
        said = []
        trainer = Base(engine.model_dir, f"{RUN}.0.1", ids, partial(score, base), 1e-3)
        Engines(urls).verify_base(trainer, said.append)
        assert [second_engine.url in line for line in said] == [True]
        for each in (engine, second_engine):
            assert_samples_like(base, generate(each))


def test_an_engine_without_the_routes_is_an_error_that_names_the_switch(engine, tmp_path):
    # /none/pause is a 404 of vLLM, as /pause is without its development mode
    with pytest.raises(
        EngineError, match=r"/pause\?mode=wait: 404 .*start it with .*VLLM_SERVER_DEV_MODE=1"
    ):
        EngineAdmin(f"{engine.url}/none").pause()
    with pytest.raises(
        EngineError, match=r"load_lora_adapter: 404 .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    ):
        EngineAdmin(f"{engine.url}/none").load_adapter("policy-1", tmp_path)
