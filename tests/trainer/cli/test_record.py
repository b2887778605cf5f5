"""`rolltap record`: the evaluator, the end by a signal, and the names that it gives."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from rolltap.trainer.cli.record import name_of
from rolltap.trainer.traces.reader import load_sessions
from tests.trainer.cli.program import ASK, ROLLTAP, run_rolltap


def test_the_evaluator_is_a_line_of_a_shell_and_its_status_is_said(options, tmp_path):
    options += [
        "--evaluate",
        "true && cd made && false",
        "--json",
        "--",
        sys.executable,
        "-c",
        f"import os; os.mkdir('made'){ASK}",
    ]
    ended = run_rolltap("record", *options, cwd=tmp_path)
    (session,) = load_sessions(tmp_path / "run").values()
    assert session.reward == 0.0, ended.stderr
    assert "reward 0 (exit status 1 of the evaluator), 1 model call" in ended.stderr
    written = json.loads(ended.stdout)  # the program's own output is on stderr
    assert (written["session_id"], written["reward"], written["calls"]) == (
        session.session_id,
        0.0,
        1,
    )
    assert (written["run"], written["sampled_tokens"]) == (str(tmp_path / "run"), 4)


def test_an_evaluator_that_cannot_run_is_refused_before_the_program_starts(options, tmp_path):
    ended = run_rolltap(
        "record", *options, "--evaluate", "no-such-judge -q", "--", "touch", "started", cwd=tmp_path
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "error: the evaluator 'no-such-judge -q' needs 'no-such-judge', which is not on the"
    )
    assert list(tmp_path.iterdir()) == []


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open('started', 'w').close()
time.sleep(600)
"""


def test_sigterm_ends_the_program_and_all_that_it_started_and_the_session_is_cancelled(
    options, tmp_path
):
    os.mkfifo(tmp_path / "started")
    process = subprocess.Popen(
        [ROLLTAP, "record", *options, "--", "sh", "-c", f'{sys.executable} -c "{DEAF}" & wait'],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    (tmp_path / "started").read_text()
    below = psutil.Process(process.pid).children(recursive=True)
    running = [each for each in below if "SIG_IGN" in str(each.cmdline())]
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert len(running) == 2
    assert [each for each in running if each.is_running()] == []
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.error) == ("cancelled", "stopped by a signal while it ran")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("true", "true"),
        ("/bin/sh scripts/go.sh", "go.sh"),
        ("uv run --with httpx agent.py scripts/go.sh", "agent.py"),
        ("python3 -u -m agent", "agent"),
        ("python3 -m package.inner -v", "package.inner"),
        ("python3 -m json.tool --help", "python3"),
        (f"/usr/bin/python3 -c {'pass;' * 300}", "python3"),
        ("/", "/"),
    ],
)
def test_a_session_has_thename_of_the_script_that_a_command_runs(
    tmp_path, monkeypatch, command, name
):
    monkeypatch.chdir(tmp_path)
    for folder in ("scripts", "package/inner"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("scripts/go.sh", "agent.py", "package/inner/__main__.py"):
        (tmp_path / file).touch()
    assert name_of(command.split()) == name
