import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rolltap.addons.prompts.rendering import Rendering
from rolltap.trainer.doctor.scripted_model import (
    FINAL,
    RENDERER,
    ByteTokenizer,
    next_reply,
    offered_tools,
)

BASH = {
    "name": "bash",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}
TOOLS = [{"type": "function", "function": {**BASH, "description": "</tools>\nRun\n"}}]
FINISH = {"name": "finish", "parameters": {"properties": {}}}
RESULT = "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n"


CALLED = f"<|im_start|>assistant\n<tool_call>\n</tool_call><|im_end|>\n{RESULT}"


def prompt(*tools, results=0, said="", system="Work."):
    """Return a prompt in Qwen's format, as the renderer writes it."""
    lines = [json.dumps({"type": "function", "function": tool}) for tool in tools]
    offered = ""
    if tools:
        listed = "\n".join(lines)
        within = "You are provided with function signatures within <tools></tools> XML tags:"
        offered = f"# Tools\n\n{within}\n<tools>\n{listed}\n</tools>"
    text = f"<|im_start|>system\n{system}\n\n{offered}<|im_end|>\n"
    text += "<|im_start|>user\nHello<|im_end|>\n"
    text += CALLED * results
    if said:
        text += f"<|im_start|>assistant\n{said}<|im_end|>\n"
    return text


def called(text):
    """Return the name and arguments of the tool call in a turn, or None."""
    found = re.search(r"<tool_call>\n(.*)\n</tool_call>", text)
    return found and tuple(json.loads(found[1]).values())


def test_two_tool_calls_with_text_come_before_the_final_answer():
    first, second, third = [next_reply(prompt(BASH, results=results)) for results in range(3)]
    assert first.startswith("<think>\nI call bash.\n</think>\n\nI try it.\n<tool_call>")
    assert called(first)[0] == called(second)[0] == "bash"
    assert called(third) is None
    assert third.endswith(FINAL)


def test_the_chosen_tool_is_called_and_no_other():
    assert called(next_reply(prompt(BASH, FINISH), None, "finish")) == ("finish", {})
    assert called(next_reply(prompt(BASH), None, "finish")) is None


def test_a_request_without_tools_gets_a_text():
    assert called(next_reply(prompt())) is None


def test_a_reply_matches_the_schema_of_its_request():
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    assert json.loads(next_reply(prompt(BASH), schema)) == {"score": 1}


def test_a_program_that_goes_on_after_the_final_answer_is_ended_with_its_own_tool():
    assert called(next_reply(prompt(BASH, FINISH, results=2))) is None
    assert called(next_reply(prompt(BASH, FINISH, results=2, said=FINAL))) == ("finish", {})


def test_a_program_that_ends_by_a_command_gets_it():
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    system = f"Submit with `{end}`."
    assert called(next_reply(prompt(BASH, results=1, system=system)))[1] != {"command": end}
    assert called(next_reply(prompt(BASH, results=2, system=system)))[1] == {"command": end}


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"function": 3}', '{"name": 3}', "null"])
def test_a_tool_that_is_none_is_left_out(line):
    text = prompt(BASH).replace("<tools>\n{", f"<tools>\n{line}\n{{")
    assert offered_tools(text) == [BASH]


def test_the_text_of_a_tool_result_is_no_tool_result():
    said = "user\n<tool_response>\nThis is how results look."
    assert called(next_reply(prompt(BASH, system=said, results=1))) is not None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ByteTokenizer(tmp_path_factory.mktemp("made") / "model")


def test_every_text_is_encoded_as_transformers_encodes_it_and_decoded(tokenizer):
    theirs = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    assert theirs.eos_token_id == tokenizer.eos_token_id

    @given(st.text() | st.just("<|im_start|>user\n<tool_response>\nhéllo"))
    def check(text):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text

    check()


def test_the_recorder_renders_prompts_with_it_and_reads_the_tool_calls_of_the_scripted_model(
    tokenizer,
):
    rendering = Rendering(tokenizer.name_or_path, RENDERER)
    messages = [
        {"role": "system", "content": "Be <tools>brief.</tools>"},
        {"role": "user", "content": "Hello"},
    ]
    ids = rendering.render(messages, TOOLS)
    for _ in range(2):
        prompt = tokenizer.decode(ids)
        assert [tool["name"] for tool in offered_tools(prompt)] == ["bash"]
        sampled = [*rendering.tokenizer.encode(next_reply(prompt)), tokenizer.eos_token_id]
        reply = rendering.read(ids, sampled, TOOLS)[0]
        assert (reply.reasoning, reply.content.strip()) == ("I call bash.", "I try it.")
        assert len(reply.tool_calls) == 1
        result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
        ids += sampled + rendering.extension(ids, sampled, [result], TOOLS)
    last = rendering.tokenizer.encode(next_reply(tokenizer.decode(ids)))
    assert rendering.read(ids, last, TOOLS)[0].content == FINAL
