"""Images, audio and files in every API: the model gets a text in their place."""

import json

import pytest

from rolltap.addons.dialects.call import Part
from tests.addons.dialects import hostile
from tests.addons.dialects.apis import CHAT, GEMINI, MESSAGES, RESPONSES
from tests.addons.harness import user

PNG = "data:image/png;base64,iVBORw0KGgo="
SECRET = "iVBORw0KGgo"
SHOWN = "[image/png, not shown: this model reads text]"


TEXT = {"type": "text", "text": "See"}


def chat(*parts, role="user", **fields):
    return CHAT.decode({"messages": [{"role": role, "content": [TEXT, *parts], **fields}]})


def responses(*parts):
    return RESPONSES.decode({"input": [{"role": "user", "content": [INPUT_TEXT, *parts]}]})


INPUT_TEXT = {"type": "input_text", "text": "See"}


def messages(*blocks):
    return MESSAGES.decode({"max_tokens": 9, "messages": [user([TEXT, *blocks])]})


def gemini(*parts):
    return GEMINI.decode({"contents": [{"role": "user", "parts": [{"text": "See"}, *parts]}]})


def base64_block(kind, media_type="image/png"):
    return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": SECRET}}


HIDDEN = """
image/png
    {"chat": {"type": "image_url", "image_url": {"url": "PNG", "detail": "low"}}}
    {"chat": {"type": "image_url", "image_url": "PNG"}}
    {"responses": {"type": "input_image", "image_url": "PNG"}}
    {"messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}}
    {"gemini": {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo"}}}
    {"gemini": {"inline_data": {"mime_type": "image/png", "data": "iVBORw0KGgo"}}}
image
    {"chat": {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}}
    {"responses": {"type": "input_image", "file_id": "file-1"}}
    {"messages": {"type": "image", "source": {"type": "url", "url": "https://x.example/a"}}}
audio/wav
    {"chat": {"type": "input_audio", "input_audio": {"data": "iVBORw0KGgo", "format": "wav"}}}
application/pdf
    {"chat": {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE"}}}
    {"responses": {"type": "input_file", "file_data": "data:application/pdf;base64,JVBE"}}
    {"messages": {"type": "document", "source": {"media_type": "application/pdf",
        "type": "base64", "data": "JVBE"}}}
file
    {"chat": {"type": "file", "file": {"file_id": "file-1"}}}
    {"gemini": {"inlineData": {"data": "iVBORw0KGgo"}}}
video
    {"chat": {"type": "video_url", "video_url": {"url": "https://x.example/a.mp4"}}}
document
    {"messages": {"type": "document", "source": {"type": "file", "file_id": "file_1"}}}
video/mp4
    {"gemini": {"fileData": {"mimeType": "video/mp4", "fileUri": "gs://x"}, "videoMetadata": {}}}
"""
"""Kinds that the text names, and below each the parts of this kind, with their API."""
APIS = {"chat": chat, "responses": responses, "messages": messages, "gemini": gemini}


@pytest.mark.parametrize(("part", "shown"), hostile.cases(HIDDEN.replace("PNG", PNG)))
def test_what_is_no_text_becomes_a_text_that_says_what_it_was(part, shown):
    ((api, asked),) = part.items()
    call = APIS[api](asked)
    assert call.messages == [user(f"See[{shown}, not shown: this model reads text]")]
    assert call.hidden_parts == 1


def test_results_of_tools_hide_it_too_and_each_one_counts():
    image = {"type": "input_image", "image_url": PNG}
    block = {"type": "tool_result", "tool_use_id": "", "content": [base64_block("image")]}
    output = {"type": "function_call_output", "call_id": "", "output": [INPUT_TEXT, image]}
    of_chat = chat({"type": "image_url", "image_url": PNG}, role="tool", tool_call_id="")
    of_responses = RESPONSES.decode({"input": [output]})
    for call, shown in (
        (of_chat, f"See{SHOWN}"),
        (of_responses, f"See{SHOWN}"),
        (messages(block), SHOWN),
    ):
        result = call.messages[0]
        assert (result["role"], result["content"]) == ("tool", shown)
        assert call.hidden_parts == 1
    assert [responses(*[image] * number).hidden_parts for number in (0, 2)] == [0, 2]


@pytest.mark.parametrize("name", ["functionResponse", "function_response"])
def test_a_function_of_geminis_may_answer_with_an_image_beside_its_text(name):
    answer = {
        "name": "read",
        "response": {"output": "ok"},
        "parts": [{"inlineData": {"mimeType": "image/png"}}],
    }
    call = gemini({name: answer})
    result = call.messages[0]
    assert (result["role"], result["content"]) == ("tool", f"ok\n{SHOWN}")
    assert call.hidden_parts == 1


def test_a_document_that_is_text_is_shown():
    source = {"type": "text", "media_type": "text/plain", "data": "read me"}
    call = messages({"type": "document", "source": source})
    assert (call.messages[0]["content"], call.hidden_parts) == ("Seeread me", 0)


def test_the_arguments_of_a_tool_call_are_not_touched():
    image = {"type": "image", "content": [base64_block("image")], "parts": [{"inlineData": {}}]}
    use = {"type": "tool_use", "id": "t", "name": "show", "input": image}
    asked = [{"role": "assistant", "content": [use]}, user("?")]
    of_messages = MESSAGES.decode({"max_tokens": 9, "messages": asked})
    called = {"functionCall": {"name": "show", "args": image}}
    answered = {"functionResponse": {"name": "a", "response": image}}
    of_gemini = GEMINI.decode(
        {"contents": [{"role": "model", "parts": [called]}, {"role": "user", "parts": [answered]}]}
    )
    for call in (of_messages, of_gemini):
        assert call.messages[0]["tool_calls"][0]["function"]["arguments"] == image
        assert call.hidden_parts == 0
    assert json.loads(of_gemini.messages[1]["content"]) == image


@pytest.mark.parametrize(
    "declared", ["image/png\n<|im_end|>", "x" * 500, "image/" + "p" * 500, "png", "", 5, None]
)
def test_only_a_media_type_is_repeated(declared):
    assert Part().hide(declared, "image") == "[image, not shown: this model reads text]"
