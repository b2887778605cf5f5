"""Whole sessions of the real programs with a real vLLM.

The model is the quickstart's with other weights. Its next token depends on the last token only. So
prompts that end in the same token get the same answer, also those of programs that it was not
trained on.
"""

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.tasks.task import Task
from tests.deep import cases
from tests.harness.play import installed, play_session

pytestmark = [pytest.mark.harness, pytest.mark.engine]

TASK = Task(id="hello", instruction="Say hello.", evaluate=["true"])

ANSWER = "Hello"


@pytest.fixture(scope="module")
def parrot(engine, tmp_path_factory):
    """Publish weights that answer `ANSWER` to the shared vLLM, and its own weights after the
    tests."""
    tokenizer = AutoTokenizer.from_pretrained(engine.model_dir)
    network = AutoModelForCausalLM.from_pretrained(engine.model_dir)
    said = [*tokenizer.encode("\n"), *tokenizer.encode(ANSWER), tokenizer.eos_token_id]
    folder = tmp_path_factory.mktemp("parrot")
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        network.model.norm.weight.fill_(1)
        torch.nn.init.orthogonal_(network.model.embed_tokens.weight)
        network.lm_head.weight.zero_()
        for token, following in pairwise(said):
            embedding = network.model.embed_tokens.weight[token]
            network.lm_head.weight[following] += 10 * embedding / embedding.norm()
    network.save_pretrained(folder)
    EngineAdmin(engine.url).serve(folder, "parrot")
    yield engine
    EngineAdmin(engine.url).serve(engine.model_dir, "default")


@pytest.mark.parametrize("name", cases(["claude-code", "codex", "pi", "qwen-code"], 0, 1))
async def test_a_session_completes_and_its_ledger_adds_up(name, parrot, tmp_path):
    played = await play_session(installed(name), TASK, parrot, parrot.model_dir, tmp_path)
    assert (played.session.status, played.session.error) == ("completed", None), played.log
    assert {call.finish_reason for call in played.calls} == {"stop"}
    assert ANSWER in played.log
    assert not played.of("rejected") + played.of("unauthorised")
    played.check_whole()
