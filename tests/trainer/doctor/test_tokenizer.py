from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rolltap.addons.prompts.rendering import Rendering
from rolltap.trainer.doctor.conversation import FINAL, next_reply, offered_tools
from rolltap.trainer.doctor.tokenizer import RENDERER, MadeTokenizer

TOOL = {"type": "function", "function": {"name": "bash", "description": "</tools>\nRun\n", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return MadeTokenizer(tmp_path_factory.mktemp("model"))


def test_every_text_is_encoded_as_transformers_encodes_it_and_decoded(tokenizer):
    theirs = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    assert theirs.eos_token_id == tokenizer.eos_token_id

    @given(st.text() | st.just("<|im_start|>user\n<tool_response>\nhéllo"))
    def check(text):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text

    check()


def test_a_prompt_has_less_than_half_as_many_tokens_as_characters(tokenizer):
    text = Path(__file__).read_text()
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_the_recorder_renders_prompts_with_it_and_reads_the_tool_calls_of_the_scripted_model(tokenizer):
    rendering = Rendering(tokenizer.name_or_path, RENDERER)
    messages = [{"role": "system", "content": "Be <tools>brief.</tools>"}, {"role": "user", "content": "Hello"}]
    ids = rendering.render(messages, [TOOL])
    for _ in range(2):
        prompt = tokenizer.decode(ids)
        assert [tool["name"] for tool in offered_tools(prompt)] == ["bash"]
        sampled = [*rendering.encode(next_reply(prompt)), tokenizer.eos_token_id]
        reply = rendering.parse(ids, sampled, [TOOL])
        assert (reply.reasoning, reply.content.strip()) == ("I call bash.", "I try it.")
        (call,) = reply.tool_calls
        ids = rendering.continued(ids, sampled, [{"role": "tool", "tool_call_id": call.id, "content": "ok"}], [TOOL])
    assert rendering.parse(ids, rendering.encode(next_reply(tokenizer.decode(ids))), [TOOL]).content == FINAL
