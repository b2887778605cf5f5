"""Agents that send only what is new, and name the rest by its id, are continued token for token."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.reader import RecordedCalls
from tests.harness.play import tool_call

pytestmark = pytest.mark.harness

SCRIPTS = Path(__file__).parent / "scripts"
FILES = {"openai_by_id": ["previous", "references", "conversation"], "google_cached": ["cached"]}
KEYS = dict.fromkeys(("OPENAI_API_KEY", "GEMINI_API_KEY"), "placeholder")


@pytest.mark.parametrize("script", FILES)
def test_a_script_that_sends_ids_is_continued(script, scripted_engine, tokenizer_folder, tmp_path):
    def reply(request):
        """Write the task's file in two turns, then end."""
        prompt = scripted_engine.tokenizer.decode(request["token_ids"])
        turn, path = prompt.count("<tool_response>"), re.search(r"Write (\w+\.txt), twice", prompt)[1]
        if turn == 2:
            return Say(f"<think>\nTwice.\n</think>\n\nI wrote {path}.")
        return Say(tool_call("write_file", {"path": path, "content": f"héllo {turn}\n"}))

    scripted_engine.otherwise = reply
    run, workspace = tmp_path / "run", tmp_path / "workspace"
    workspace.mkdir()
    options = ["--out", run, "--engine", scripted_engine.url, "--model", tokenizer_folder]
    ended = subprocess.run(
        [Path(sys.executable).with_name("rolltap"), "record", *options, "--", sys.executable, SCRIPTS / f"{script}.py"],
        cwd=workspace,
        env={**clean_environment(tmp_path), **KEYS},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written = [line for line in ended.stdout.splitlines() if line.startswith("I wrote")]
    assert written == [f"I wrote {name}.txt." for name in FILES[script]]
    assert {(workspace / f"{name}.txt").read_text() for name in FILES[script]} == {"héllo 1\n"}
    (calls,) = RecordedCalls(run).values()
    assert [call.kind for call in calls] == ["root", "bridged", "bridged"] * len(FILES[script])
    assert [request["token_ids"] for request in scripted_engine.requests] == [call.prompt_ids for call in calls]
    assert {event["kind"] for event in read_rows(run, "events")} == {"call_started", "stored", "ended"}
    assert summarize(run).uncaptured_calls == 0
