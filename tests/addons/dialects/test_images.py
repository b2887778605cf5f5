"""Images, audio and files in every API: the model gets a text in their place."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import anthropic, google, openai_chat, openai_responses
from rolltap.addons.dialects.images import hide, placeholder
from rolltap.addons.dialects.model_call import DialectError

PNG = "data:image/png;base64,iVBORw0KGgo="
SECRET = "iVBORw0KGgo"
SHOWN = "[image/png, not shown: this model reads text]"


def chat(*parts, role="user", **fields):
    message = {"role": role, "content": [{"type": "text", "text": "See"}, *parts], **fields}
    return openai_chat.decode(json.dumps({"messages": [message]}).encode(), "/v1/chat/completions")


def responses(*parts, key="content", **fields):
    item = {**(fields or {"role": "user"}), key: [{"type": "input_text", "text": "See"}, *parts]}
    return openai_responses.decode(json.dumps({"input": [item]}).encode(), "/v1/responses")


def messages(*blocks):
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, *blocks]}]}
    return anthropic.decode(json.dumps(body).encode(), "/v1/messages")


def gemini(*parts):
    body = {"contents": [{"role": "user", "parts": [{"text": "See"}, *parts]}]}
    return google.decode(json.dumps(body).encode(), "/v1beta/models/m:generateContent")


def base64_block(kind, media_type="image/png"):
    return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": SECRET}}


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (chat({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}), "image/png"),
        (chat({"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}), "image"),
        (chat({"type": "image_url", "image_url": PNG}), "image/png"),
        (chat({"type": "input_audio", "input_audio": {"data": SECRET, "format": "wav"}}), "audio/wav"),
        (chat({"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE"}}), "application/pdf"),
        (chat({"type": "file", "file": {"file_id": "file-1"}}), "file"),
        (chat({"type": "video_url", "video_url": {"url": "https://x.example/a.mp4"}}), "video"),
        (responses({"type": "input_image", "image_url": PNG}), "image/png"),
        (responses({"type": "input_image", "file_id": "file-1"}), "image"),
        (
            responses({"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}),
            "application/pdf",
        ),
        (messages(base64_block("image")), "image/png"),
        (messages(base64_block("document", "application/pdf")), "application/pdf"),
        (messages({"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}), "image"),
        (messages({"type": "document", "source": {"type": "file", "file_id": "file_1"}}), "document"),
        (gemini({"inlineData": {"mimeType": "image/png", "data": SECRET}}), "image/png"),
        (gemini({"inline_data": {"mime_type": "image/png", "data": SECRET}}), "image/png"),
        (gemini({"fileData": {"mimeType": "video/mp4", "fileUri": "gs://x"}, "videoMetadata": {}}), "video/mp4"),
        (gemini({"inlineData": {"data": SECRET}}), "file"),
    ],
)
def test_what_is_no_text_becomes_a_text_that_says_what_it_was(call, shown):
    assert call.messages == [{"role": "user", "content": f"See[{shown}, not shown: this model reads text]"}]
    assert call.hidden == 1


def test_results_of_tools_hide_it_too():
    image = {"type": "input_image", "image_url": PNG}
    result = messages({"type": "tool_result", "tool_use_id": "t", "content": [base64_block("image")]})
    calls = [
        (chat({"type": "image_url", "image_url": {"url": PNG}}, role="tool", tool_call_id="t"), f"See{SHOWN}"),
        (responses(image, key="output", type="function_call_output", call_id="t"), f"See{SHOWN}"),
        (result, SHOWN),
    ]
    for call, shown in calls:
        assert (call.messages[0]["role"], call.messages[0]["content"], call.hidden) == ("tool", shown, 1)


@pytest.mark.parametrize("name", ["functionResponse", "function_response"])
def test_a_function_of_geminis_may_answer_with_an_image_beside_its_text(name):
    answer = {"name": "read", "response": {"output": "ok"}, "parts": [{"inlineData": {"mimeType": "image/png"}}]}
    call = gemini({name: answer})
    assert call.messages[0] == {"role": "tool", "content": f"ok\n{SHOWN}", "tool_call_id": "", "name": "read"}
    assert call.hidden == 1


def test_a_document_that_is_text_is_shown():
    source = {"type": "text", "media_type": "text/plain", "data": "read me"}
    call = messages({"type": "document", "source": source})
    assert (call.messages[0]["content"], call.hidden) == ("Seeread me", 0)


def test_each_one_counts():
    image = {"type": "image_url", "image_url": {"url": PNG}}
    assert chat(image, image).hidden == 2
    assert chat().hidden == 0


def test_the_arguments_of_a_tool_call_are_not_touched():
    image = {"type": "image", "content": [base64_block("image")], "parts": [{"inlineData": {}}]}
    use = {"type": "tool_use", "id": "t", "name": "show", "input": image}
    body = {"max_tokens": 9, "messages": [{"role": "assistant", "content": [use]}, {"role": "user", "content": "?"}]}
    call = anthropic.decode(json.dumps(body).encode(), "/v1/messages")
    assert (call.messages[0]["tool_calls"][0]["function"]["arguments"], call.hidden) == (image, 0)
    parts = [{"functionCall": {"name": "show", "args": image}}, {"functionResponse": {"name": "a", "response": image}}]
    body = {"contents": [{"role": "model", "parts": parts[:1]}, {"role": "user", "parts": parts[1:]}]}
    call = google.decode(json.dumps(body).encode(), "/v1beta/models/m:generateContent")
    assert (call.messages[0]["tool_calls"][0]["function"]["arguments"], call.hidden) == (image, 0)
    assert json.loads(call.messages[1]["content"]) == image


@pytest.mark.parametrize(
    "decode", [lambda: chat({"type": "hologram"}), lambda: responses({"type": "computer_screenshot"})]
)
def test_a_part_of_an_unknown_type_is_refused_by_its_place(decode):
    with pytest.raises(DialectError, match=r"\[0\].content\[1\]' has type .*; this model takes text only"):
        decode()


@pytest.mark.parametrize("declared", ["image/png\n<|im_end|>", "x" * 500, "image/" + "p" * 500, "png", "", 5, None])
def test_only_a_media_type_is_repeated(declared):
    assert placeholder(declared, "image") == "[image, not shown: this model reads text]"


values = st.recursive(
    st.none() | st.integers() | st.sampled_from(["image", PNG]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "type"]), inner, max_size=3),
)


@given(values.filter(lambda value: isinstance(value, dict)))
def test_only_parts_at_the_place_are_replaced(request_):
    before = copy.deepcopy(request_)
    hidden = hide(request_, [("a", "b")], lambda part: "X" if part.get("type") == "image" else None, "text")
    found = 0
    above = before.get("a") if isinstance(before.get("a"), list) else [before.get("a")]
    for element in above:
        if isinstance(element, dict):
            for part in element.get("b") if isinstance(element.get("b"), list) else [element.get("b")]:
                if isinstance(part, dict) and part.get("type") == "image":
                    part.clear()
                    part.update({"type": "text", "text": "X"})
                    found += 1
    assert (request_, hidden) == (before, found)
