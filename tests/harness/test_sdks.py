"""Agents written with the official SDKs, recorded as a user does: `rolltap record --` before the
command."""

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.harness, pytest.mark.usefixtures("write_twice")]

SCRIPTS = Path(__file__).parent / "scripts"
HOSTS = {
    "openai_chat": "api.openai.com",
    "openai_responses": "api.openai.com",
    "anthropic_messages": "api.anthropic.com",
    "google_genai": "generativelanguage.googleapis.com",
}


def run_script(script, files, record, workspace, scripted_engine):
    played = record(sys.executable, SCRIPTS / f"{script}.py")
    written = [line for line in played.log.splitlines() if line.startswith("I wrote")]
    assert written == [f"I wrote {name}.txt." for name in files]
    assert {(workspace / f"{name}.txt").read_text() for name in files} == {"héllo 1\n"}
    sent = [request["token_ids"] for request in scripted_engine.requests]
    assert sent == [call.prompt_ids for call in played.calls]
    assert played.summary.uncaptured_calls == 0
    return played


@pytest.mark.parametrize("script", HOSTS)
def test_a_script_that_uses_an_sdk_is_recorded(script, record, workspace, scripted_engine):
    played = run_script(script, ["whole", "streamed"], record, workspace, scripted_engine)
    calls = played.calls
    assert {call.host for call in calls} == {HOSTS[script]}
    for streamed in (False, True):
        assert [call.kind for call in calls if call.stream == streamed][1:] == [
            "bridged",
            "bridged",
        ]
    assert {(call.status, call.violation, call.role) for call in calls} == {
        ("completed", None, "agent")
    }
    assert played.kinds == {"call_started", "ended"}
    sampled = sum(len(call.completion_ids) for call in calls)
    ledger = played.summary.ledger
    assert (ledger.sampled, ledger.left_out) == (sampled, {"no_reward": sampled})


def test_a_script_that_sends_only_new_items_and_ids_is_continued(
    record, workspace, scripted_engine
):
    played = run_script(
        "openai_by_id", ["previous", "references"], record, workspace, scripted_engine
    )
    assert [call.kind for call in played.calls] == ["root", "bridged", "bridged"] * 2
    assert played.kinds == {"call_started", "ended"}
