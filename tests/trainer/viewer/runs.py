"""Runs to view, and a reader that has read one.

`write_viewed_run` has everything that the page shows: roles, retries, faults, rendered prompts,
versions, a training. `write` has what the tests of the server count on.
"""

import json
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from rolltap.addons.store.records import Call, Event, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.traces.trained import trained_batch
from rolltap.trainer.viewer.reader import RunReader
from tests.factories import START, add_rows, make_call, make_session, says, write_run

RUN = "0a1b2c3d"
OLD, NEW = f"{RUN}.1.0", f"{RUN}.2.0"
ATTACK = (
    "<script>window.hacked=1</script><img src=x onerror=window.hacked=1> \x1b[31mred\x1b[0m"
    " \u202egnp.exe\u202c ]"
)
"""Markup, escape sequences and a right-to-left override."""
STRANGE_ID = "../x?y=1&<b>#"
WHY = "2 earlier calls fit equally well up to message 3"


def later(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


class Conversation:
    """The calls of one session. `say` adds one, whose tokens are those of its messages."""

    def __init__(self, tokenizer, session_id: str, start: float = 0.0, version: str = OLD) -> None:
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.session_id = session_id
        self.time = start
        self.version = version
        self.calls: list[Call] = []

    def say(
        self,
        asked: Sequence[dict],
        reply: str,
        *commands: str,
        after: Call | None = None,
        seconds: float = 2.0,
        **fields,
    ) -> Call:
        """Add a call of new messages `asked`, answered by a text and commands of the tool
        `bash`."""
        name = f"{self.session_id[:6]}-{len(self.calls)}"
        prompt = "".join(
            f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in asked
        )
        message = json.loads(says(reply, *commands)) | {"reasoning_content": "Look first."}
        written = reply
        for called in message.get("tool_calls", []):
            written += f"<tool_call>{json.dumps(called['function'])}</tool_call>"
        ids = self._encode(f"<think>\nLook first.\n</think>\n{written}<|im_end|>")
        started = later(self.time)
        half = len(ids) // 2
        versions = [
            VersionSpan(version=self.version, start=0, end=half),
            VersionSpan(version=NEW, start=half, end=len(ids)),
        ]
        defaults = {
            "session_id": self.session_id,
            "call_id": name,
            "logprobs": [-((i * 37) % 101) / 32 for i in range(len(ids))],
            "weight_versions": versions,
            "messages": json.dumps(asked),
            "reply": json.dumps(message),
            "finish_reason": "tool_calls" if commands else "stop",
            "dialect": "openai-chat",
            "host": "api.openai.com",
            "path": "/v1/chat/completions",
            "model": "gpt-5",
            "engine": "http://127.0.0.1:8000",
            "sampling": json.dumps({"temperature": 1.0, "max_tokens": 2048, "asked": {"top_k": 5}}),
            "cached_tokens": 64 if after else 0,
            "started_at": started,
            "first_token_at": started + timedelta(seconds=seconds / 4),
            "finished_at": started + timedelta(seconds=seconds),
        }
        if not self.calls:
            defaults["tools"] = json.dumps([{"type": "function", "function": {"name": "bash"}}])
        self.time += seconds + 1.5
        new = f"{prompt}<|im_start|>assistant\n"
        call = make_call(0, self._encode(new), ids, after=after, **{**defaults, **fields})
        self.calls.append(call)
        return call

    def end(self, status: str = "completed", **fields):
        """Return the row of the session."""
        times = {"started_at": self.calls[0].started_at, "finished_at": later(self.time)}
        return make_session(
            self.session_id, status, policy_version=self.version, **{**times, **fields}
        )


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def tool(text: str) -> dict:
    return {"role": "tool", "tool_call_id": "0", "content": text}


def long_session(tokenizer) -> list:
    """Return the rows of a session with all roles, a rendered prompt, a retry, a fault and a
    superseded answer."""
    talk = Conversation(tokenizer, "s-long")
    system = {
        "role": "system",
        "content": "You are a careful programmer.\n\n" + "Read the files first. " * 40,
    }
    first = talk.say(
        [system, user("Fix the parser of dates: naïve 日本 🎉 input fails.")],
        "I look at it.",
        "ls -la",
    )
    second = talk.say(
        [tool("parser.py\ntests\n\x1b[32mok\x1b[0m")], "Read it.", "cat parser.py", after=first
    )
    helper = talk.say(
        [user("Find the failing test.")],
        "I search.",
        "pytest -q",
        role="subagent",
        role_evidence="header x-agent",
    )
    talk.say([tool("1 failed: test_dates")], "It is test_dates.", after=helper, role="subagent")
    talk.say(
        [user("Write a title.")],
        "Dates of the parser",
        role="auxiliary",
        role_evidence="no tools, max_tokens 32",
    )
    third = talk.say(
        [tool("def parse(text):\n\treturn text.split('-')\n" * 8)],
        "Now a change.",
        "sed -i s/-/./ parser.py" + "\n# and a comment" * 20,
        after=second,
    )
    talk.say([tool("done")], "Once more.", after=third)
    fourth = talk.say([tool("done")], "Test it.", "pytest -q", after=third)
    talk.say(
        [user("Summarise the conversation.")],
        "The parser was changed.",
        role="compaction",
        role_evidence="its prompt",
    )
    summary = [
        system,
        user("Fix the parser of dates."),
        {"role": "assistant", "content": "I looked at it."},
        tool("3 passed"),
    ]
    last = talk.say(summary, "All tests pass.", kind="rendered", kind_reason=WHY)
    talk.say([user("And the docs?")], "Stopped", after=last, status="aborted", finish_reason=None)
    events = []
    for kind, call, detail in (
        ("joined", second, ""),
        ("fault", fourth, "engine: connection lost"),
    ):
        at = call.started_at + timedelta(seconds=1)
        about = {"session_id": "s-long", "call_id": call.call_id, "detail": detail}
        events.append(Event(kind=kind, at=at, **about))
    asked = {"host": "pypi.org", "method": "GET", "path": "/simple"}
    refused = Event(session_id="s-long", kind="refused", at=later(60), **asked)
    tests = {"test_dates": "failed", "test_empty": "passed"}
    evidence = {"tests": tests, "exit_status": 1, "attempts": [{"seconds": 3, "status": 1}]}
    row = talk.end(
        task_id="fix-dates",
        group_id="g-dates",
        harness="claude-code",
        reward=0.0,
        parts={"tests": 0.5},
        evidence=evidence,
        suspicions={"edits_tests": 2},
        queued_seconds=2.5,
        running_seconds=61.0,
    )
    return [*talk.calls, *events, refused, row]


def short_session(
    tokenizer, session_id: str, reply: str, start: float, status: str = "completed", **fields
) -> list:
    """Return the rows of a session with two calls."""
    talk = Conversation(tokenizer, session_id, start, fields.pop("version", OLD))
    first = talk.say([user("Fix the parser of dates.")], "I look at it.", "ls")
    talk.say([tool("parser.py")], reply, after=first)
    return [*talk.calls, talk.end(status, **fields)]


def attacked_session(tokenizer) -> list:
    """Return the rows of a session whose every text is an attack on the page."""
    talk = Conversation(tokenizer, STRANGE_ID, 50)
    everywhere = dict.fromkeys(["role_evidence", "model", "host", "engine"], ATTACK)
    first = talk.say([user(ATTACK)], ATTACK, ATTACK, **everywhere)
    everywhere = dict.fromkeys(["kind_reason", "error", "violation"], ATTACK)
    talk.say([user(ATTACK)], ATTACK, kind="rendered", **everywhere)
    everywhere = dict.fromkeys(["host", "path", "detail"], ATTACK)
    event = Event(
        kind="fault", session_id=STRANGE_ID, call_id=first.call_id, at=later(51), **everywhere
    )
    names = ["task_id", "group_id", "harness", "error", "harness_version", "runtime"]
    everywhere = dict.fromkeys(names, ATTACK)
    maps = {"suspicions": {ATTACK: 1}, "parts": {ATTACK: 1.0}, "evidence": {ATTACK: ATTACK}}
    row = talk.end("failed", **everywhere, **maps)
    return [*talk.calls, event, row]


def write_viewed_run(folder: Path, tokenizer, model: str) -> Path:
    """Write the run, its logs and its metrics to a folder, and return it."""
    dates = {"task_id": "fix-dates", "group_id": "g-dates", "harness": "codex"}
    flat = {"task_id": "count", "group_id": "g-flat", "harness": "gemini-cli", "reward": 1.0}
    good = short_session(
        tokenizer, "s-good", "I split at the dash, and the tests pass.", 3, reward=1.0, **dates
    )
    late = {"reward": 0.0, "error": "time limit", **dates}
    lost = {"error": "the engine is gone", **dates}
    flat1 = short_session(tokenizer, "s-flat1", "Done.", 20, version=NEW, **flat)
    rows = [
        *long_session(tokenizer),
        *good,
        *short_session(tokenizer, "s-late", "I split at the dot.", 4, "timeout", **late),
        *short_session(tokenizer, "s-lost", "I stop.", 5, "infrastructure", **lost),
        *flat1,
        *short_session(tokenizer, "s-flat2", "Done too.", 21, version=NEW, **flat),
        *attacked_session(tokenizer),
    ]
    write_run(folder, *rows, model=model)
    add_trained(folder, trained(good[:-1], 3, 1.4))
    add_trained(folder, trained(flat1[:-1], 2, 0.0, "no_signal"))
    logs = folder / "logs"
    logs.mkdir()
    (logs / "s-long.judge.log").write_text(
        "test_dates: AssertionError: '2026.01.01' != '2026-01-01'\n\x1b[31m1 failed\x1b[0m\n"
    )
    (logs / "s-long.diff").write_text(
        "--- a/parser.py\n+++ b/parser.py\n@@ -1 +1 @@\n-return text.split('-')\n+return"
        " text.split('.')\n"
    )
    (logs / "s-long.log").write_text("All tests pass.\n")
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in (1, 2, 3):
            row = {"step": step, "reward": 0.3 + 0.1 * step, "loss": 0.5 - step / 10}
            row |= {"age/mean": 0.5, "left_out/no_signal": 40.0 * step}
            metrics.write(json.dumps(row) + "\n")
    return folder


def trained(calls: Sequence[Call], step: int, advantage: float, reason: str | None = None) -> dict:
    """Return a row of what an optimizer step trained of calls: all their tokens but the last of
    each, or none."""
    row = {
        "session_id": calls[0].session_id,
        "group_id": "g",
        "step": step,
        "version": f"{RUN}.{step - 1}.0",
        "reward": 1.0,
        "advantage": advantage,
        "reason": reason,
        "sampled": sum(len(call.completion_ids) for call in calls),
        "trained": 0,
        "left_out": [],
        "spans": [],
        "differences": None,
        "weights": None,
    }
    differences = []
    for call in calls:
        span = {"call_id": call.call_id, "start": 0, "end": len(call.completion_ids)}
        if reason:
            row["left_out"].append({**span, "reason": reason})
            continue
        last = span["end"] - 1
        row["spans"].append({**span, "end": last})
        row["left_out"].append({**span, "start": last, "reason": "over_length"})
        row["trained"] += last
        differences.append(-0.2 * (np.arange(last) % 3 - 1))
    if differences:
        row["differences"] = np.concatenate(differences).astype(np.float16)
        row["weights"] = np.full(row["trained"], 0.5, np.float32)
    return row


def add_trained(folder: Path, row: dict) -> None:
    with RunWriter(folder) as writer:
        writer.add_batch("trained", trained_batch([row]))


def grow(folder: Path, tokenizer, session_id: str) -> None:
    """Add a session to the run."""
    fields = {"task_id": "grown", "group_id": "g-grown", "harness": "codex"}
    add_rows(folder, *short_session(tokenizer, session_id, "Grown.", 90, **fields))


def many_sessions(folder: Path, number: int) -> Path:
    """Write a run of many sessions that have no calls."""
    rows = []
    for i in range(number):
        names = {"task_id": f"t{i % 40}", "group_id": f"g{i // 8}"}
        rows.append(
            make_session(f"s{i:05}", reward=float(i % 3 == 0), started_at=later(i), **names)
        )
    return write_run(folder, *rows)


def write(folder, tokenizer, model):
    """Write a run of two sessions of a group and one without a row. Return its folder and the calls
    of session "s"."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    first = make_call(
        0,
        ids("You are an agent. café 🙂"),
        ids("I look.<|im_end|>"),
        messages=json.dumps([{"role": "user", "content": "Count the lines"}]),
        tools=json.dumps([{"type": "function", "function": {"name": "bash"}}]),
        reply=says("I look.", "ls"),
    )
    second = make_call(
        1,
        ids("three files"),
        ids("There are 3.<|im_end|>"),
        after=first,
        messages=json.dumps([{"role": "tool", "content": "three files"}]),
        reply=says("There are 3."),
    )
    title = make_call(2, ids("Title?"), ids("Lines"), role="auxiliary", reply=says("Lines"))
    rendered = make_call(
        3, ids("You are an agent. cafe"), ids("No."), kind="rendered", reply=says("No.")
    )
    write_run(
        folder,
        first,
        second,
        title,
        rendered,
        Event(kind="fault", session_id="s", call_id="1", detail="engine"),
        Event(kind="replayed", session_id="s", call_id="1"),
        make_session("s"),
        make_call(0, session_id="other"),
        make_session("other", reward=0.0),
        make_call(5, session_id="a/b c", completion_ids=[3, 4]),
        Event(kind="unauthorised"),
        model=str(model),
    )
    return folder, [first, second, title, rendered]


@contextmanager
def reading(folder, **how):
    """Yield a reader that has read all sessions."""
    reader = RunReader(folder, **how)
    try:
        read_all(reader)
        yield reader
    finally:
        reader.close()


def read_all(reader):
    """Read until nothing is left."""
    while reader.step():
        pass
