"""`rolltap rerun`: a program runs again against its record, without an engine."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rolltap.addons.errors import RolltapError
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.traces.reader import load_sessions
from tests.factories import add_rows, make_session
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.cli.program import run_rolltap

AGENT = """
import asyncio, datetime, os, sys
import httpx

SYSTEM = f"You are agent {os.environ.get('VERSION', '1.0')}. It is {datetime.datetime.now().isoformat()}."


async def converse(client, name):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"The task of {name}."}]
    for _ in range(2):
        reply = await client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
        if reply.is_error:
            sys.exit(reply.text)
        message = reply.json()["choices"][0]["message"]
        print(name, message["content"], flush=True)
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "Go on."}]


async def main():
    async with httpx.AsyncClient(base_url="https://api.openai.com", timeout=120) as client:
        await asyncio.gather(*(converse(client, name) for name in sys.argv[1:]))


asyncio.run(main())
"""
PROGRAM = [sys.executable, "agent.py"]


@pytest.fixture(scope="module")
def recorded(tokenizer_folder, tokenizer, tmp_path_factory):
    """Record the agent with two helpers that work at the same time, and return the folder, session
    and output."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "agent.py").write_text(AGENT)
    said = iter(range(100))
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = lambda request: Say(f"Reply {next(said)}.")
        options = ["--out", "run", "--engine", engine.url, "--model", tokenizer_folder]
        ended = run_rolltap("record", *options, "--", *PROGRAM, "one", "two", "two", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    (session,) = load_sessions(folder / "run")
    return folder, session, ended.stdout


def test_a_program_and_its_helpers_run_to_their_end_without_an_engine_and_nothing_is_recorded(
    recorded,
):
    folder, session, output = recorded

    def times():
        return sorted(path.stat().st_mtime_ns for path in (folder / "run").rglob("*"))

    before = times()
    line = ["rerun", "run", session[:-2], "--", *PROGRAM, "two", "one", "two"]
    ended = run_rolltap(*line, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == sorted(output.split("\n"))
    assert f"session {session}: 6 of 6 recorded calls answered; exit status 0" in ended.stderr
    assert times() == before


def test_another_version_of_the_program_diverges_where_it_differs_with_status_3(recorded):
    folder, session, _ = recorded
    environment = {**os.environ, "VERSION": "2.0"}
    ended = run_rolltap("rerun", "run", session, "--", *PROGRAM, "one", cwd=folder, env=environment)
    assert ended.returncode == 3
    assert f"session {session}: 0 of 6 recorded calls answered; exit status 1" in ended.stderr
    # the calls of its two sub-agents begin in any order
    diverged = r"diverged at call \d: the system prompt is another one \(message 0\): "
    assert re.search(diverged, ended.stderr)
    assert "agent 2.0. It is ~" in ended.stderr
    assert "agent 1.0. It is ~" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_program_that_asks_less_than_it_did_has_status_3(recorded):
    folder, session, _ = recorded
    ended = run_rolltap("rerun", "run", session, "--", *PROGRAM, "one", "two", cwd=folder)
    assert ended.returncode == 3
    assert "4 of 6 recorded calls answered; exit status 0" in ended.stderr
    assert "nothing asked for" in ended.stderr


class TestRefused:
    """No recorder can be started."""

    @pytest.fixture
    def run(self, recorded, tmp_path, monkeypatch):
        monkeypatch.setattr("rolltap.trainer.rollouts.recorder.Mitmdump", None)
        monkeypatch.chdir(tmp_path)
        shutil.copytree(recorded[0] / "run", "run")
        return Path("run")

    @pytest.fixture
    def refused(self, run, recorded):
        """Return a function that reruns the recorded session, or another, and returns the message."""

        def refused(session=recorded[1]):
            result = CliRunner().invoke(rolltap, ["rerun", "run", session, "--", "true"])
            assert isinstance(result.exception, RolltapError)
            return str(result.exception)

        return refused

    def test_a_session_that_is_not_there(self, recorded, refused):
        assert refused("nobody") == f"run has no session 'nobody', only {recorded[1]}"

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"engines": {}}, "does not say what the engine at http"),
            ({"model": "/nowhere/model"}, "/nowhere/model"),
        ],
    )
    def test_a_run_without_its_engine_or_its_model(self, run, refused, changed, message):
        metadata = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(metadata | changed))
        assert message in refused()

    def test_a_damaged_run(self, run, refused):
        (file,) = run.glob("calls-*.arrow")
        file.write_bytes(file.read_bytes().replace(b"Reply 0", b"Reply 9"))
        said = refused()
        assert "cannot run again: call" in said
        assert "its row was changed after it was written" in said

    def test_a_session_without_a_completed_call(self, run, refused):
        add_rows(run, make_session("empty", "failed"))
        assert refused("empty").startswith("session empty of run has no completed call")
