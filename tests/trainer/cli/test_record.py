import json
import os
import subprocess
import sys

import pytest

from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.facts import DISTRUST
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.trainer.cli.program import ASK, rolltap


def test_record_runs_a_command_and_ends_with_its_status(scripted_engine, tokenizer_folder, tmp_path):
    scripted_engine.replies.append(Say("Hi."))
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap("record", *options, "--", sys.executable, "-c", ASK)
    assert (ended.returncode, ended.stdout) == (3, "Hi.\n")
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.exit_status, session.harness) == ("failed", 3, sys.executable)
    (line,) = ended.stderr.splitlines()
    inspect = f"rolltap inspect {tmp_path / 'run'} {session.session_id}"
    assert line == f"session {session.session_id}: failed, no reward, 1 model call. See: {inspect}"
    assert rolltap(*inspect.split()[1:]).returncode == 0
    assert list(RecordedCalls(tmp_path / "run")) == [session.session_id]


def test_record_starts_a_harness_by_its_preset_and_the_users_variables_win(scripted_engine, tokenizer_folder, tmp_path):
    show = "import os, sys; print(sys.argv[1:], os.environ['WINDOW'], os.environ['KEY'], 'HTTPS_PROXY' in os.environ)"
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nversion = "1"\nprogram = "{sys.executable}"\narguments = ["-c", "{show}", "--always"]\n'
        'headless = ["{instruction}"]\n[env]\nWINDOW = "{max_model_len}"\nKEY = "placeholder"\n'
    )
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap(
        "record", *options, "--harness", tmp_path / "x.toml", "--", "-p", "go", env={**os.environ, "KEY": "mine"}
    )
    assert (ended.returncode, ended.stdout) == (0, "['--always', '-p', 'go'] 8192 mine True\n")
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.harness) == ("completed", "x")
    assert session.preset_digest == Harness.load(str(tmp_path / "x.toml")).digest()


@pytest.mark.parametrize("preset", [True, False])
def test_a_session_has_the_version_of_a_harness_and_not_of_a_plain_command(
    preset, scripted_engine, tokenizer_folder, tmp_path
):
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo x 1.2.3 || exec {sys.executable} -c "$@"\n')
    program.chmod(0o755)
    (tmp_path / "x.toml").write_text(f'name = "x"\nversion = "1.2"\nprogram = "{program}"\nheadless = []\n')
    scripted_engine.replies.append(Say("Hi."))
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap("record", *options, *(("--harness", tmp_path / "x.toml", "--") if preset else ("--", program)), ASK)
    assert (ended.returncode, ended.stdout) == (3, "Hi.\n")
    assert ("its preset was tested with 1.2" in " ".join(ended.stderr.split())) == preset
    (session,) = load_sessions(tmp_path / "run").values()
    assert session.harness_version == ("1.2.3" if preset else "")
    assert bool(session.program_digest) == preset
    assert rolltap("export", tmp_path / "run", "--to", "atif", "--out", tmp_path / "atif").returncode == 0
    document = json.loads((tmp_path / "atif" / f"{session.session_id}.json").read_text())
    assert document["agent"]["version"] == ("1.2.3" if preset else "unknown")


def test_record_says_that_no_model_call_came(scripted_engine, tokenizer_folder, tmp_path):
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap("record", *options, "--", "true")
    line, why = ended.stderr.splitlines()
    assert ": completed, no reward, 0 model calls. See: rolltap inspect " in line
    assert why.startswith("no model call came: did the program use the proxy?")
    assert "rolltap doctor -- COMMAND" in why


def test_record_says_that_the_program_does_not_trust_the_certificate(scripted_engine, tokenizer_folder, tmp_path):
    program = "import httpx, ssl; httpx.get('https://api.openai.com/v1/models', verify=ssl.create_default_context())"
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    distrusting = ("env", "-u", "SSL_CERT_FILE", sys.executable, "-c", program)
    ended = rolltap("record", *options, "--", *distrusting)
    why = ended.stderr.splitlines()[-1]
    assert "no model call came: api.openai.com: TLS failed" in why
    assert "did the program use the proxy" not in why
    assert why.endswith(DISTRUST)


def test_record_says_that_calls_were_not_answered(scripted_engine, tokenizer_folder, tmp_path):
    program = "import httpx; httpx.post('https://api.example.com/v9/messages', json={'model': 'm'})"
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap("record", *options, "--", sys.executable, "-c", program)
    line, why = ended.stderr.splitlines()
    assert "0 model calls, requests that look like one and were not answered: 1. See" in line
    assert why.endswith("POST api.example.com/v9/messages")


def test_a_recorder_that_does_not_start_says_why(tmp_path):
    ended = rolltap("record", "--out", tmp_path / "run", "--model", tmp_path / "none", "--", "true")
    assert ended.returncode == 1
    assert "the recorder did not start" in ended.stderr
    assert "cannot load a tokenizer" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_a_model_of_another_name_at_the_engine_is_a_warning_on_stderr(scripted_engine, tokenizer_folder, tmp_path):
    scripted_engine.root = "org/base-model"
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap("record", *options, "--", "true")
    assert ended.returncode == 0
    assert f"the recorder: the engine at {scripted_engine.url} serves org/base-model (as scripted), not" in ended.stderr


def test_a_missing_command_is_status_2():
    ended = rolltap("record", "--out", "x", "--model", "m")
    assert ended.returncode == 2
    assert "give a COMMAND after --, or --harness" in ended.stderr


def record(scripted_engine, model, folder, *arguments, program=ASK):
    """Record a program in the folder `folder / "here"`, and return the end of `rolltap` and the session."""
    scripted_engine.otherwise = lambda request: Say("Hi.")
    (folder / "here").mkdir()
    run = folder / "run"
    options = ("--out", run, "--engine", scripted_engine.url, "--model", model, *arguments)
    command = [sys.executable, "-m", "rolltap", "record", *map(str, options), "--", sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder / "here")
    (session,) = load_sessions(run).values()
    return ended, session


def test_an_evaluator_gives_the_session_its_reward(scripted_engine, tokenizer_folder, tmp_path):
    program = ASK.replace("sys.exit(3)", "open('made', 'w').close()\nsys.exit(3)")
    how = "--evaluate", "test -e made", "--task", "sort"
    ended, session = record(scripted_engine, tokenizer_folder, tmp_path, *how, program=program)
    assert (ended.returncode, ended.stdout) == (3, "Hi.\n")
    assert f"session {session.session_id}: failed, reward 1" in ended.stderr
    assert (session.status, session.reward, session.task_id, session.group_id) == ("failed", 1.0, "sort", "sort")
    assert verify_run(tmp_path / "run", lambda *_: None).verdict == "ok"


def test_an_evaluator_without_a_verdict_leaves_the_session_unjudged(scripted_engine, tokenizer_folder, tmp_path):
    ended, session = record(scripted_engine, tokenizer_folder, tmp_path, "--evaluate", "echo score: 0.3")
    assert (session.status, session.reward) == ("unjudged", None)
    assert "score: 0.3" in session.error
    assert session.error in ended.stderr


def test_a_session_that_the_engine_failed_is_not_judged(scripted_engine, tokenizer_folder, tmp_path):
    _, session = record(*(scripted_engine, tokenizer_folder, tmp_path, "--evaluate", "touch judged"), program="pass")
    assert (session.status, session.reward) == ("infrastructure", None)
    assert "no model call came" in session.error
    assert not (tmp_path / "here" / "judged").exists()


def test_a_budget_that_ended_the_session_is_its_status(scripted_engine, tokenizer_folder, tmp_path):
    how = ("--set", "rolltap_max_calls=1", "--evaluate", "true")
    twice = f"exec({ASK.rpartition('sys.exit')[0]!r})\n{ASK}"
    _, session = record(scripted_engine, tokenizer_folder, tmp_path, *how, program=twice)
    assert (session.status, session.reward) == ("budget", 1.0)
    assert "budget" in session.error


END = """
import os
answer = httpx.post("http://session.rolltap/end", json={"reward": 0.75, "task": "own"}, proxy=os.environ["HTTPS_PROXY"])
print(answer.status_code)
"""


def test_a_program_rewards_itself_only_where_that_is_accepted(scripted_engine, tokenizer_folder, tmp_path):
    program = ASK.replace("sys.exit(3)", END)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ended, session = record(scripted_engine, tokenizer_folder, tmp_path / "a", program=program)
    assert (ended.stdout, session.reward, session.status) == ("Hi.\n403\n", None, "completed")
    accept = ("--set", "rolltap_accept_rewards=true")
    ended, session = record(scripted_engine, tokenizer_folder, tmp_path / "b", *accept, program=program)
    assert (ended.stdout, session.reward, session.revision) == ("Hi.\n200\n", 0.75, 1)
    assert (session.task_id, session.status, session.exit_status) == ("own", "completed", 0)
    assert verify_run(tmp_path / "b" / "run", lambda *_: None).verdict == "ok"
