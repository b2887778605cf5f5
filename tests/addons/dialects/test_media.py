"""Images, audio and files in every API: the model gets a text in their place."""

import json

import pytest

from rolltap.addons.dialects.call import Part
from tests.addons.dialects.apis import CHAT, GEMINI, MESSAGES, RESPONSES

PNG = "data:image/png;base64,iVBORw0KGgo="
SECRET = "iVBORw0KGgo"
SHOWN = "[image/png, not shown: this model reads text]"


def chat(*parts, role="user", **fields):
    return CHAT.decode(
        {
            "messages": [
                {"role": role, "content": [{"type": "text", "text": "See"}, *parts], **fields}
            ]
        }
    )


def responses(*parts, key="content", **fields):
    return RESPONSES.decode(
        {
            "input": [
                {
                    **(fields or {"role": "user"}),
                    key: [{"type": "input_text", "text": "See"}, *parts],
                }
            ]
        }
    )


def messages(*blocks):
    asked = {"role": "user", "content": [{"type": "text", "text": "See"}, *blocks]}
    return MESSAGES.decode({"max_tokens": 9, "messages": [asked]})


def gemini(*parts):
    return GEMINI.decode({"contents": [{"role": "user", "parts": [{"text": "See"}, *parts]}]})


def base64_block(kind, media_type="image/png"):
    return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": SECRET}}


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (chat({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}), "image/png"),
        (chat({"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}), "image"),
        (chat({"type": "image_url", "image_url": PNG}), "image/png"),
        (
            chat({"type": "input_audio", "input_audio": {"data": SECRET, "format": "wav"}}),
            "audio/wav",
        ),
        (
            chat({"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE"}}),
            "application/pdf",
        ),
        (chat({"type": "file", "file": {"file_id": "file-1"}}), "file"),
        (chat({"type": "video_url", "video_url": {"url": "https://x.example/a.mp4"}}), "video"),
        (responses({"type": "input_image", "image_url": PNG}), "image/png"),
        (responses({"type": "input_image", "file_id": "file-1"}), "image"),
        (
            responses({"type": "input_file", "file_data": "data:application/pdf;base64,JVBE"}),
            "application/pdf",
        ),
        (messages(base64_block("image")), "image/png"),
        (messages(base64_block("document", "application/pdf")), "application/pdf"),
        (
            messages(
                {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}
            ),
            "image",
        ),
        (
            messages({"type": "document", "source": {"type": "file", "file_id": "file_1"}}),
            "document",
        ),
        (gemini({"inlineData": {"mimeType": "image/png", "data": SECRET}}), "image/png"),
        (gemini({"inline_data": {"mime_type": "image/png", "data": SECRET}}), "image/png"),
        (
            gemini(
                {"fileData": {"mimeType": "video/mp4", "fileUri": "gs://x"}, "videoMetadata": {}}
            ),
            "video/mp4",
        ),
        (gemini({"inlineData": {"data": SECRET}}), "file"),
    ],
)
def test_what_is_no_text_becomes_a_text_that_says_what_it_was(call, shown):
    assert call.messages == [
        {"role": "user", "content": f"See[{shown}, not shown: this model reads text]"}
    ]
    assert call.hidden_parts == 1


def test_results_of_tools_hide_it_too_and_each_one_counts():
    image = {"type": "input_image", "image_url": PNG}
    result = messages(
        {"type": "tool_result", "tool_use_id": "", "content": [base64_block("image")]}
    )
    calls = [
        (
            chat({"type": "image_url", "image_url": {"url": PNG}}, role="tool", tool_call_id=""),
            f"See{SHOWN}",
        ),
        (responses(image, key="output", type="function_call_output", call_id=""), f"See{SHOWN}"),
        (result, SHOWN),
    ]
    for call, shown in calls:
        assert (call.messages[0]["role"], call.messages[0]["content"], call.hidden_parts) == (
            "tool",
            shown,
            1,
        )
    assert [responses(*[image] * number).hidden_parts for number in (0, 2)] == [0, 2]


@pytest.mark.parametrize("name", ["functionResponse", "function_response"])
def test_a_function_of_geminis_may_answer_with_an_image_beside_its_text(name):
    answer = {
        "name": "read",
        "response": {"output": "ok"},
        "parts": [{"inlineData": {"mimeType": "image/png"}}],
    }
    call = gemini({name: answer})
    assert call.messages[0] == {
        "role": "tool",
        "content": f"ok\n{SHOWN}",
        "tool_call_id": "",
        "name": "read",
    }
    assert call.hidden_parts == 1


def test_a_document_that_is_text_is_shown():
    source = {"type": "text", "media_type": "text/plain", "data": "read me"}
    call = messages({"type": "document", "source": source})
    assert (call.messages[0]["content"], call.hidden_parts) == ("Seeread me", 0)


def test_the_arguments_of_a_tool_call_are_not_touched():
    image = {"type": "image", "content": [base64_block("image")], "parts": [{"inlineData": {}}]}
    use = {"type": "tool_use", "id": "t", "name": "show", "input": image}
    asked = [{"role": "assistant", "content": [use]}, {"role": "user", "content": "?"}]
    call = MESSAGES.decode({"max_tokens": 9, "messages": asked})
    assert (call.messages[0]["tool_calls"][0]["function"]["arguments"], call.hidden_parts) == (
        image,
        0,
    )
    parts = [
        {"functionCall": {"name": "show", "args": image}},
        {"functionResponse": {"name": "a", "response": image}},
    ]
    call = GEMINI.decode(
        {"contents": [{"role": "model", "parts": parts[:1]}, {"role": "user", "parts": parts[1:]}]}
    )
    assert (call.messages[0]["tool_calls"][0]["function"]["arguments"], call.hidden_parts) == (
        image,
        0,
    )
    assert json.loads(call.messages[1]["content"]) == image


@pytest.mark.parametrize(
    "declared", ["image/png\n<|im_end|>", "x" * 500, "image/" + "p" * 500, "png", "", 5, None]
)
def test_only_a_media_type_is_repeated(declared):
    assert Part().hide(declared, "image") == "[image, not shown: this model reads text]"
