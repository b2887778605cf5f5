import json

import pytest
from hypothesis import given

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import DialectError, sign
from tests.addons.dialects.apis import RESPONSES, USAGE, assembled, streamed
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
    whole = json.loads(openai_responses.encode_reply(context, reply, USAGE))
    (item,) = whole["output"]
    assert item["type"] == "compaction"
    assert assembled(RESPONSES, streamed(RESPONSES, context, reply)) == whole
    (message,) = decode_items(item)
    assert message["role"] == "user"
    assert message["content"].endswith(reply.content)


def test_a_summary_that_grows_keeps_the_connection_open():
    encoder = openai_responses.stream_encoder(RESPONSES.context(input=[*REQUEST["input"], TRIGGER]))
    assert b"response.in_progress" in encoder.delta("", "So far")


@pytest.mark.parametrize("theirs", ["gAAAAABo", "eHg=", "", None, 5, sign("c7")])
def test_a_summary_that_was_not_issued_here_is_refused(theirs):
    with pytest.raises(DialectError, match=r"'input\[0\].encrypted_content'") as refusal:
        decode_items({"type": "compaction", "encrypted_content": theirs})
    assert refusal.value.code == "invalid_encrypted_content"


def test_a_trigger_is_the_last_item():
    with pytest.raises(DialectError, match=r"'input\[0\]' is a compaction trigger"):
        decode_items(TRIGGER, {"role": "user", "content": "Hi"})
