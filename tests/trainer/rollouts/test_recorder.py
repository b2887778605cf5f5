"""The recorder as a child process."""

import pytest

from rolltap.addons.errors import InputError, RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.traces.reader import load_sessions


@pytest.fixture(scope="module")
def running(tmp_path_factory, tokenizer_folder):
    with Recorder(tmp_path_factory.mktemp("run"), engine="http://127.0.0.1:9", model=tokenizer_folder) as recorder:
        yield recorder


def test_a_log_that_cannot_be_written_does_not_end_the_recorder(tmp_path, tokenizer_folder):
    (tmp_path / "recorder.log").symlink_to("/dev/full")
    with Recorder(tmp_path, engine="http://127.0.0.1:9", model=str(tokenizer_folder)) as recorder:
        recorder.end(Session(session_id="s1", status="completed"))
        recorder.check()


def test_a_recorder_that_dies_inside_the_block_is_an_error_at_its_end(tmp_path, tokenizer_folder):
    recorder = Recorder(tmp_path, engine="http://127.0.0.1:9", model=tokenizer_folder)
    recorder.__enter__()
    recorder._process.kill()
    recorder._process.wait()
    with pytest.raises(RecorderError, match="the recorder died with status -9"):
        recorder.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"session_id": ""}, "the session has an empty session_id"),
        ({"status": "done"}, "session s: status='done': choose completed, failed, timeout, error"),
        ({"status": "unknown"}, "status='unknown': choose"),
        ({"reward": float("nan")}, "session s: the reward nan is not finite"),
    ],
)
def test_a_session_that_cannot_be_is_refused_and_not_recorded(running, fields, message):
    with pytest.raises(InputError, match=message):
        running.end(Session(**{"session_id": "s", "status": "completed", **fields}))
    assert load_sessions(running.path) == {}


def test_outside_of_its_block_a_recorder_says_so(tmp_path, tokenizer_folder):
    recorder = Recorder(tmp_path, engine="http://127.0.0.1:9", model=tokenizer_folder)
    with pytest.raises(RecorderError, match="the recorder is not running: use it inside"):
        recorder.environment("s")
    with recorder:
        recorder.end(Session(session_id="s", status="completed"))
    with pytest.raises(RecorderError, match="the recorder is not running"):
        recorder.end(Session(session_id="t", status="completed"))
    (session,) = load_sessions(tmp_path).values()
    assert session.finished_at >= session.started_at


def test_a_recorder_that_does_not_start_says_why(tmp_path):
    recorder = Recorder(tmp_path, engine="localhost", model="/nowhere")
    with pytest.raises(RecorderError, match=r"(?s)did not start:.*rolltap_engine is 'localhost'.*from '/nowhere'"):
        recorder.__enter__()
