from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rolltap.addons.prompts.rendering import Rendering
from rolltap.trainer.doctor.conversation import FINAL, next_reply, offered_tools
from rolltap.trainer.doctor.tokenizer import RENDERER, make_tokenizer

TOKENIZER = make_tokenizer()
TOOL = {"type": "function", "function": {"name": "bash", "description": "</tools>\nRun\n", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}  # fmt: skip


@given(st.text())
def test_every_text_is_encoded_and_decoded(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_a_prompt_takes_less_than_half_of_its_characters():
    text = Path(__file__).read_text()
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) < len(text) / 2


def test_the_recorder_renders_prompts_with_it_and_reads_the_tool_calls_of_the_scripted_model(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    rendering = Rendering(str(tmp_path), RENDERER)
    messages = [{"role": "system", "content": "Be <tools>brief.</tools>"}, {"role": "user", "content": "Hello"}]
    ids = rendering.render(messages, [TOOL])
    for _ in range(2):
        prompt = TOKENIZER.decode(ids)
        assert [tool["name"] for tool in offered_tools(prompt)] == ["bash"]
        sampled = [*rendering.encode(next_reply(prompt)), TOKENIZER.eos_token_id]
        reply = rendering.parse(ids, sampled, [TOOL])
        assert (reply.reasoning, reply.content.strip()) == ("I call bash.", "I try it.")
        (call,) = reply.tool_calls
        ids = rendering.bridge(ids, sampled, [{"role": "tool", "tool_call_id": call.id, "content": "ok"}], [TOOL])
    assert rendering.parse(ids, rendering.encode(next_reply(TOKENIZER.decode(ids))), [TOOL]).content == FINAL
