"""The suspicions of a session while its run grows."""

import json
from datetime import UTC, datetime, timedelta

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Event
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.runs.suspicions.session import suspicions
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows

START = datetime(2026, 1, 1, tzinfo=UTC)


def shell(session_id, number, command, **fields):
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    reply = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    at = START + timedelta(seconds=number)
    given = {"reply": json.dumps(reply), "started_at": at, "finished_at": at + timedelta(milliseconds=500), **fields}
    return Call(session_id=session_id, call_id=f"{session_id}{number}", prompt_ids=[1], **given)


def test_rows_are_counted_as_they_are_committed_and_each_session_for_itself(tmp_path):
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path) as writer:
        rows = SessionRows(tmp_path)
        assert suspicions(rows, "a") == {}
        writer.add_call(shell("a", 1, "git fsck"))
        writer.add_call(shell("b", 1, "cat /proc/1/environ"))
        assert suspicions(rows, "a") == {"git_history": 1}
        writer.add_call(shell("a", 2, "curl https://github.com/a/b"))
        writer.add_event(Event(kind="refused", session_id="a", host="github.com", at=START + timedelta(seconds=3)))
        writer.add_event(Event(kind="uncaptured", session_id="b", host="m.example", at=START + timedelta(seconds=3)))
        assert suspicions(rows, "a") == {"git_history": 1, "web_search": 1, "refused_hosts": 1}
        assert suspicions(rows, "b") == {"leaving_box": 1, "other_models": 1}


def test_what_the_judge_saw_and_the_task_are_counted_with_it(tmp_path):
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path) as writer:
        writer.add_call(shell("a", 1, "pip install sympy"))
        evidence = {"changed_tests": ["tests/test_a.py"], "refused": ["pipe: fifo"]}
        task = Task(id="sympy__sympy-123", instruction="fix it", evaluate=["true"])
        assert suspicions(SessionRows(tmp_path), "a", task, evidence) == {
            "web_search": 1,
            "changed_tests": 1,
            "odd_files": 1,
        }


def test_a_call_whose_reply_the_harness_did_not_get_does_not_count(tmp_path):
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path) as writer:
        writer.add_call(shell("a", 1, "git fsck", status="aborted"))
        writer.add_call(shell("a", 2, "git fsck", status="failed", reply=None))
        assert suspicions(SessionRows(tmp_path), "a") == {}
