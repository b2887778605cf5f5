import json

import pytest
from hypothesis import given

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError, ServedModel, sign
from tests.addons.dialects.apis import RESPONSES, USAGE, streamed
from tests.addons.dialects.openai_responses.test_request import REQUEST, decode, decode_items
from tests.addons.dialects.test_contract import REPLIES
from tests.deep import examples

TRIGGER = {"type": "compaction_trigger"}


def test_a_trigger_asks_for_a_summary():
    call = decode(input=[*REQUEST["input"], TRIGGER])
    assert call.messages[:-1] == decode().messages
    assert call.messages[-1]["role"] == "user"
    assert "summary" in call.messages[-1]["content"]
    assert call.client_metadata["compaction"] == "trigger"
    assert not call.may_call  # a call instead of a summary would lose the history
    assert call.tools == decode().tools


@given(REPLIES)
@examples(100)
def test_the_reply_is_one_item_that_holds_the_summary(reply):
    context = RESPONSES.context(input=[*REQUEST["input"], TRIGGER])
    whole = json.loads(routes.RESPONSES.encode_reply(context, reply, USAGE))
    (item,) = whole["output"]
    assert item["type"] == "compaction"
    assert RESPONSES.assembled(streamed(RESPONSES, context, reply)) == whole
    (message,) = decode_items(item)
    assert message["role"] == "user"
    assert message["content"].endswith(reply.content)


def test_a_summary_that_grows_keeps_the_connection_open():
    encoder = routes.RESPONSES.stream_encoder(RESPONSES.context(input=[*REQUEST["input"], TRIGGER]))
    assert b"response.in_progress" in encoder.delta("", "So far")


@pytest.mark.parametrize("theirs", ["gAAAAABo", "eHg=", "", None, 5, sign("c7")])
def test_a_summary_that_was_not_issued_here_is_refused(theirs):
    with pytest.raises(DialectError, match=r"'input\[0\].encrypted_content'") as refusal:
        decode_items({"type": "compaction", "encrypted_content": theirs})
    assert refusal.value.code == "invalid_encrypted_content"


def test_a_trigger_is_the_last_item():
    with pytest.raises(DialectError, match=r"'input\[0\]' is a compaction trigger"):
        decode_items(TRIGGER, {"role": "user", "content": "Hi"})


NEEDED = """
slug display_name priority visibility supported_in_api truncation_policy base_instructions
shell_type
experimental_supported_tools supported_reasoning_levels support_verbosity
"""
"""Required fields: Codex 0.169 rejects the whole catalogue when one is missing."""


def entries(*models):
    body = routes.RESPONSES.encode_models(
        "/backend-api/codex/models?client_version=0.169.0", list(models), 5
    )
    return json.loads(body)["models"]


def test_codex_learns_the_name_and_the_window_and_is_offered_functions_only():
    (entry,) = entries(ServedModel("tiny", 32768))
    assert entry.keys() >= set(NEEDED.split())
    assert isinstance(entry["base_instructions"], str)
    assert (entry["slug"], entry["context_window"]) == ("tiny", 32768)
    assert entry["auto_compact_token_limit"] < entry["context_window"]
    assert not entry["use_responses_lite"]
    assert "apply_patch_tool_type" not in entry
    assert entry["multi_agent_version"] == "disabled"


def test_one_tool_output_does_not_fill_the_window_and_the_first_model_is_the_default():
    small, large = entries(ServedModel("small", 4096), ServedModel("large", 262144))
    assert small["truncation_policy"] == {"mode": "tokens", "limit": 512}
    assert large["truncation_policy"] == {"mode": "tokens", "limit": 10_000}
    assert small["priority"] < large["priority"]
