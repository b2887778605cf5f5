import os
import sys

from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.scripted_engine import Say
from tests.trainer.commands.program import ASK, rolltap


def test_record_runs_a_command_and_ends_with_its_status(scripted_engine, tokenizer_folder, tmp_path):
    scripted_engine.replies.append(Say("Hi."))
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap("record", *options, "--", sys.executable, "-c", ASK)
    assert (ended.returncode, ended.stdout) == (3, "Hi.\n")
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.exit_status, session.harness) == ("failed", 3, sys.executable)
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
