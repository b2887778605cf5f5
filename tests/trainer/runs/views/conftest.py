import json

import pytest

from tests.factories import make_session, says, write_run
from tests.trainer.runs.views.shown import call


@pytest.fixture
def small_run(tmp_path, tokenizer_folder):
    """Write a run. `first` has the chain root - second - third, and a fourth call that diverges.
    `other` has no row."""
    asked = {
        "messages": json.dumps([{"role": "user", "content": "Count [bold]them[/bold]."}]),
        "tools": json.dumps([{"type": "function", "function": {"name": "bash"}}]),
    }
    why = "2 earlier calls fit equally well up to message 3"
    rendered = {"kind": "rendered", "kind_reason": why, "reply": says("Once more.")}
    violated = {"violation": "log-probability 0 is positive", "reply": says("Hm.")}
    unended = {"session": "other", "status": "aborted", "finish_reason": None}
    root = call(1, "a1", [40, 41, 42], [43, 44], reply=says("I look\nat it."), **asked)
    second = call(2, "a2", [50], [51, 52], parent=root, reply=says("", "ls"))
    return write_run(
        tmp_path,
        root,
        second,
        call(3, "b3", [60], [61], parent=second, reply=says("x" * 80)),
        call(4, "b4", [40, 41, 42, 43, 99, 98], [97], **rendered),
        call(5, "b5", [70], [71], parent=second, **violated),
        call(6, "z1", [40], [41, 42], **unended),
        make_session("first", harness="codex", exit_status=0, reward=0.5, policy_version=None),
        model=str(tokenizer_folder),
    )
