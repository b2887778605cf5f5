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


@pytest.fixture
def run_script(record, workspace, scripted_engine):
    """Return a function that runs a script, which writes files twice, by their names."""

    def run_script(script, *files):
        played = record(sys.executable, SCRIPTS / f"{script}.py")
        written = [line for line in played.log.splitlines() if line.startswith("I wrote")]
        assert written == [f"I wrote {name}.txt." for name in files]
        for name in files:
            assert (workspace / f"{name}.txt").read_text() == "héllo 1\n"
        sent = [request["token_ids"] for request in scripted_engine.requests]
        assert sent == [call.prompt_ids for call in played.calls]
        assert played.kinds == {"call_started", "ended"}
        played.check_whole()
        return played

    return run_script


@pytest.mark.parametrize("script", HOSTS)
def test_a_script_that_uses_an_sdk_is_recorded(script, run_script):
    played = run_script(script, "whole", "streamed")
    assert {(call.host, call.role) for call in played.calls} == {(HOSTS[script], "agent")}
    for streamed in (False, True):
        kinds = [call.kind for call in played.calls if call.stream == streamed]
        assert kinds[1:] == ["bridged", "bridged"]
    assert played.summary.ledger.left_out == {"no_reward": played.sampled}


def test_a_script_that_sends_only_new_items_and_ids_is_continued(run_script):
    played = run_script("openai_by_id", "previous", "references")
    assert [call.kind for call in played.calls] == ["root", "bridged", "bridged"] * 2
