"""Codex over one WebSocket for its whole session, as with OpenAI's service."""

import re

import pytest

from rolltap.trainer.rollouts.task import Task
from tests.harness.play import installed, play, shell
from tests.scripted_engine import Say

pytestmark = pytest.mark.harness

TASK = Task(
    id="lines", instruction="Write one line after the other.", evaluate=["grep", "-qz", "^0\n1\n2\n$", "lines.txt"]
)


async def test_every_turn_goes_over_the_socket_with_only_its_new_items(scripted_engine, tokenizer_folder, tmp_path):
    codex = installed("codex")

    def reply(request):
        turn = scripted_engine.tokenizer.decode(request["token_ids"]).count("<tool_response>")
        return Say(shell(codex, f"echo {turn} >> lines.txt") if turn < 3 else "Done.")

    scripted_engine.otherwise = reply
    options = {"rolltap_websocket": "true", "flow_detail": "4"}  # the log shows each message
    played = await play(codex, TASK, scripted_engine, tokenizer_folder, tmp_path, options)
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    assert [(call.kind, call.role) for call in played.calls] == [("root", "agent")] + [("bridged", "agent")] * 3
    assert {(call.host, call.path, call.dialect) for call in played.calls} == {
        ("api.openai.com", "/v1/responses", "openai-responses")
    }
    assert [request["token_ids"] for request in scripted_engine.requests] == [call.prompt_ids for call in played.calls]
    assert {event["kind"] for event in played.events} == {"call_started", "ended"}
    assert played.summary.uncaptured_calls == 0
    assert "101 Switching Protocols" in played.recorder_log
    # the only POST is the scheduler's, which ends the session
    assert set(re.findall(r"POST http://[^/]+(\S*)", played.recorder_log)) == {"/end"}
    assert played.recorder_log.count("-> WebSocket text message") == 1 + 4  # the first one prepares the session
    assert played.recorder_log.count(TASK.instruction) == 1
