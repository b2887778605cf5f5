"""Renderers that write the name of a result's tool: a continued prompt equals the whole conversation, rendered."""

import json

import pytest

from rolltap.addons.dialects import openai_chat
from rolltap.addons.prompts.rendering import Rendering

SPECIAL = {
    "gemma4": [
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>"),
    ],
    "inkling": [
        *("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>"),
        *("<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>", "<|content_xml|>"),
        *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_model_end_sampling|>"),
        *("<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>"),
    ],
    "kimi-k2": [
        *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
        *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
}
"""Renderer -> its special tokens that the test's tokenizer lacks."""
CALLS = {"c1": "look", "c2": "listen"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in CALLS.values()]


def conversation():
    """Return a decoded conversation whose last messages are the results, in another order than the calls."""
    made = [{"id": i, "function": {"name": name, "arguments": "{}"}} for i, name in CALLS.items()]
    results = [{"role": "tool", "tool_call_id": i, "content": f"{CALLS[i]}ed"} for i in ("c2", "c1")]
    asked = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": made}]
    body = {"messages": [*asked, *results], "tools": TOOLS}
    return openai_chat.decode(json.dumps(body).encode(), "/v1/chat/completions")


@pytest.mark.parametrize("renderer", SPECIAL)
def test_a_continued_prompt_gives_each_result_the_name_of_its_tool(renderer, tmp_path, save_tokenizer):
    save_tokenizer(tmp_path, "", SPECIAL[renderer])
    rendering = Rendering(str(tmp_path), renderer)
    call = conversation()
    prompt = rendering.render(call.messages[:1], call.tools)
    whole = rendering.render(call.messages, call.tools)
    stops = set(rendering.stop_token_ids())
    end = next(i for i in range(len(prompt), len(whole)) if whole[i] in stops)
    completion = whole[len(prompt) : end + 1]
    assert whole[: len(prompt)] == prompt
    assert rendering.bridge(prompt, completion, call.messages[2:], call.tools) == whole
