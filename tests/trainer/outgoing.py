"""A run that the tests of exports share, and readers for dataset cards."""

import json
import re
from pathlib import Path

from rolltap.addons.store.records import Event
from tests import factories
from tests.factories import START, make_session

METADATA = {
    "model": "/home/someone/models/tiny",
    "tokenizer_sha256": "aa11",
    "chat_template_sha256": "bb22",
    "engines": {"http://gpu-7.internal:8000": {"vllm": "0.32.0"}},
}


def make_call(session_id, number, prompt_ids, completion_ids, **fields):
    fields = {"session_id": session_id, "call_id": f"{session_id}-{number}", **fields}
    return factories.make_call(number, prompt_ids, completion_ids, **fields)


def follow(parent, number, new_ids, completion_ids, **fields):
    return make_call(parent.session_id, number, new_ids, completion_ids, after=parent, **fields)


def write_run(run):
    """Write a run with 14 sampled tokens: two sessions with a row, of which one has a reward, and
    one without a row.

    `s` has a main line of three calls, one of them aborted, a sub-agent and a side question. `t`
    and `u` have one call.
    """
    root = make_call(
        "s",
        0,
        [1, 2],
        [3, 4],
        messages='[{"role": "user", "content": "Go"}]',
        reply='{"content": "x"}',
    )
    turn = follow(root, 1, [5], [6, 7])
    error = "the engine at http://gpu-7.internal:8000 failed: gpu-7.internal:8000"
    failed = follow(turn, 2, [8], [9], status="aborted", error=error)
    helper = make_call("s", 3, [20, 21], [22, 23, 24], role="subagent")
    title = make_call("s", 4, [30], [31], role="auxiliary")
    alone = make_call("t", 0, [40], [41, 42])
    unknown = make_call("u", 0, [50], [51, 52, 53])
    ended = {"task_id": "task", "policy_version": None}
    rows = [
        *(alone, root, turn, failed, helper, title, unknown),
        make_session("s", harness="pi", reward=0.25, exit_status=0, **ended),
        make_session("t", "timeout", harness="codex", reward=None, **ended),
        Event(kind="refused", session_id="s", host="example.com", method="GET", path="/", at=START),
    ]
    factories.write_run(run, *rows, **METADATA)
    return {"s": [root, turn, failed, helper, title], "t": [alone], "u": [unknown]}


def code_blocks(card):
    """Return the Python code blocks of a card."""
    return re.findall(r"```python\n(.*?)```", Path(card).read_text(), re.DOTALL)


def facts(card):
    """Return the table at the top of a card as a map."""
    table = Path(card).read_text().split("| --- | --- |\n", 1)[1].split("\n\n")[0]
    return dict(line.strip("| ").split(" | ", 1) for line in table.splitlines())


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]
