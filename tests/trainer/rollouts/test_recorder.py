"""The recorder as a child process."""

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.recorder import Recorder


def test_a_log_that_cannot_be_written_does_not_end_the_recorder(tmp_path, tokenizer_folder):
    (tmp_path / "recorder.log").symlink_to("/dev/full")
    with Recorder(tmp_path, engine="http://127.0.0.1:9", model=str(tokenizer_folder)) as recorder:
        recorder.end(Session(session_id="s1", status="completed"))
        recorder.check()


def test_a_recorder_that_does_not_start_says_why(tmp_path):
    recorder = Recorder(tmp_path, engine="localhost", model="/nowhere")
    with pytest.raises(RecorderError, match=r"(?s)did not start:.*rolltap_engine is 'localhost'.*from '/nowhere'"):
        recorder.__enter__()
