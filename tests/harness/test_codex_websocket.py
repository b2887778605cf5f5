"""Codex over one WebSocket for its whole session, as with OpenAI's service."""

import json

import pytest

from rolltap.trainer.rollouts import mitmdump
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.tasks.task import Task
from tests.harness.play import installed, shell

pytestmark = pytest.mark.harness

TASK = Task(
    id="lines", instruction="Write one line after the other.", evaluate=["grep", "-qz", "^0\n1\n2\n$", "lines.txt"]
)

SPY = """
import json
import runpy

def tell(**fact):
    with open({seen!r}, "a") as file:
        file.write(json.dumps(fact) + "\\n")

class Spy:
    def requestheaders(self, flow):
        tell(method=flow.request.method, path=flow.request.path)

    def websocket_message(self, flow):
        if flow.websocket.messages[-1].from_client:
            tell(message=flow.websocket.messages[-1].text)

addons = [*runpy.run_path({recorder!r})["addons"], Spy()]
"""
"""The recorder's script, which also writes what the program sends."""


async def test_every_turn_goes_over_the_socket_with_only_its_new_items(
    lead, play, scripted_engine, tmp_path, monkeypatch
):
    codex = installed("codex")

    def reply(prompt):
        turn = prompt.count("<tool_response>")
        return shell(codex, f"echo {turn} >> lines.txt") if turn < 3 else "Done."

    lead(reply)
    spy, seen = tmp_path / "spy.py", tmp_path / "seen.jsonl"
    spy.write_text(SPY.format(seen=str(seen), recorder=str(Recorder.script())))
    monkeypatch.setattr(mitmdump, "script", lambda: spy)
    played = await play(codex, TASK, rolltap_websocket="true")
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    assert [(call.kind, call.role) for call in played.calls] == [("root", "agent")] + [("bridged", "agent")] * 3
    assert {(call.host, call.path, call.dialect) for call in played.calls} == {
        ("api.openai.com", "/v1/responses", "openai-responses")
    }
    assert [request["token_ids"] for request in scripted_engine.requests] == [call.prompt_ids for call in played.calls]
    assert played.kinds == {"session_started", "call_started", "ended"}
    assert played.summary.uncaptured_calls == 0
    facts = [json.loads(line) for line in seen.read_text().splitlines()]
    # the only POST is the scheduler's, which ends the session
    assert {fact["path"] for fact in facts if fact.get("method") == "POST"} == {"/end"}
    messages = [fact["message"] for fact in facts if "message" in fact]
    assert len(messages) == 1 + 4  # the first one prepares the session
    assert sum(TASK.instruction in message for message in messages) == 1
