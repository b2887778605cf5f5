import re
import signal
import subprocess

import httpx
import pytest

from tests.factories import make_call, make_session, says, write_run
from tests.trainer.cli.program import ROLLTAP, run_rolltap


@pytest.fixture
def run(tmp_path):
    call = make_call(0, reply=says("the key is AKIA" + "ABCD1234" * 2))
    return write_run(tmp_path / "run", call, make_session(), model="/nowhere")


def test_a_run_is_shown_at_the_printed_link_until_ctrl_c(run):
    process = subprocess.Popen(
        [ROLLTAP, "view", run],
        stderr=subprocess.PIPE,
        text=True,
        # background jobs ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    line = process.stderr.readline()
    shown = r"^the run is shown at ((http://127\.0\.0\.1:\d+/)\?token=\S+)$"
    ((link, url),) = re.findall(shown, line)
    with httpx.Client(follow_redirects=True, trust_env=False, timeout=120) as browser:
        assert browser.get(link).status_code == 200
        (row,) = browser.get(f"{url}api/sessions").json()["sessions"]
        assert row["session_id"] == "s"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said


def test_a_file_is_written_and_what_was_redacted_is_said(run, tmp_path):
    file = tmp_path / "run.html"
    ended = run_rolltap("view", run, "--out", file, "--sessions", "s", "--redact", "the key")
    assert ended.returncode == 0
    assert "1 session, " in ended.stderr
    assert "redacted: AWS Access Key, in 1 session (s)" in ended.stderr
    assert "redacted: given text, in 1 session (s)" in ended.stderr
    assert "AKIA" not in file.read_text()


def test_options_of_a_file_need_one(run):
    for option in ("--sessions", "--redact"):
        ended = run_rolltap("view", run, option, "s")
        assert ended.returncode == 2
        assert "give --out FILE.html" in ended.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for options in ([], ["--out", tmp_path / "run.html"]):
        ended = run_rolltap("view", tmp_path, *options)
        assert ended.returncode == 1
        assert "is not a run folder" in ended.stderr
