"""Scores and samples of a real vLLM that generates with an adapter meanwhile."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.weights import difference
from rolltap.trainer.models.saving import save_adapter

pytestmark = [
    pytest.mark.engine,
    # peft 0.21 uses a name that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
STREAMS = 6
TOKENS = 300
PROMPT = [5 + i % 100 for i in range(300)]


@pytest.fixture
def adapted(engine, tmp_path):
    """Load an adapter as `policy-1`, and yield the model with it."""
    torch.manual_seed(0)
    base = Qwen3ForCausalLM.from_pretrained(engine.model_dir, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(base, config).eval()
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter", engine.model_dir)
    admin = EngineAdmin(engine.url)
    admin.load_adapter("policy-1", tmp_path / "adapter")
    yield model
    admin.unload_adapter("policy-1")


@pytest.fixture
def score(adapted):
    """Return the trainer's part of a comparison."""

    @torch.no_grad()
    def score(ids):
        logits = adapted(input_ids=torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    return score


@pytest.fixture
def streams(engine, adapted):
    """Let six streams sample with the adapter, and yield a function that waits for their
    choices."""
    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    asked = {"model": "policy-1", "sampling_params": sampling, "stream": True}
    begun = threading.Semaphore(0)

    def stream(number):
        prompt = [*PROMPT, 5 + number]
        body = asked | {"token_ids": prompt}
        choices = []
        with engine.http.stream("POST", "/inference/v1/generate", json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices += json.loads(line.removeprefix("data: "))["choices"]
                    begun.release()
        ids = [token for choice in choices for token in choice["token_ids"]]
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        return prompt, ids, [entry["logprob"] for entry in entries]

    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, number) for number in range(STREAMS)]
        for _ in range(STREAMS):
            begun.acquire()
        yield lambda: [each.result() for each in running]


def test_scores_and_samples_beside_six_streams_with_an_adapter_are_right_and_so_are_the_streams(
    engine, streams, score
):
    admin = EngineAdmin(engine.url)
    sampled = admin.sample("policy-1", PROMPT, 64)
    scores = admin.score("policy-1", PROMPT[:200], PROMPT[200:])
    assert difference(PROMPT, sampled, score) < 1e-4
    assert scores == pytest.approx(score(PROMPT)[199:], abs=1e-4)
    for prompt, ids, logprobs in streams():
        assert len(ids) == TOKENS
        assert logprobs == pytest.approx(score(prompt + ids)[len(prompt) - 1 :], abs=1e-4)
