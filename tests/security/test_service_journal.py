"""Journals that are damaged or hostile: a start takes what can be used, names the rest, and ends in
no traceback."""

import json
import os
import random
from contextlib import suppress
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import json_text
from rolltap.trainer.service.groups import Groups
from rolltap.trainer.service.journal import JOURNAL
from rolltap.trainer.service.requests import GroupRequest
from rolltap.trainer.tasks.task import Task
from tests.deep import DEEP


def groups_in(run):
    worker = SimpleNamespace(recorder=SimpleNamespace(path=run, engine="http://127.0.0.1:9"))
    task = Task(id="words", instruction="go", evaluate=["true"])
    return Groups(worker, [task], most=10_000, share=0.5)


@pytest.fixture
async def journal(tmp_path):
    """Write a journal with groups that ended, were cancelled and are open."""
    groups = groups_in(tmp_path)
    add = groups.journal.add
    await groups.load()
    for name in ("ended", "cancelled", "open"):
        await groups.submit(GroupRequest(id=name, task="words", sessions=2))
    view = {"status": "completed", "reward": 1.0, "policy_version": "default", "error": None}
    counts = {"sampled": 3, "left_out": {"stale": 1}}
    for name in ("ended-0", "ended-1", "open-0"):
        group = name.partition("-")[0]
        await add("session", id=group, session_id=name, **view, **counts)
    rewards = {"ended-0": 1.0, "ended-1": 1.0}
    await add("ended", id="ended", state="ended", session_ids=[*rewards], rewards=rewards, **counts)
    await add("cancelled", id="cancelled")
    await add("policy", version="7", adapter=None)
    groups.journal.close()
    return (tmp_path / JOURNAL).read_bytes()


async def load(run, journal):
    """Load a journal as a start does, and look at all that a client can see."""
    (run / JOURNAL).write_bytes(journal)
    groups = groups_in(run)
    try:
        await groups.load()
        for name in groups.book.accepted:
            groups.view(name).model_dump_json().encode()
        for _, event in groups.journal.read():
            json_text({name: value for name, value in event.items() if name != "kind"}).encode()
        assert groups.book.waiting().total() >= 0
        await groups.submit(GroupRequest(id="after", task="words"))
        return groups
    finally:
        groups.journal.close()


def edited(journal, number, *without, **fields):
    """Return a journal whose event with a number has other fields, and not those of `without`."""
    lines = journal.splitlines()
    event = json.loads(lines[number]) | fields
    for name in without:
        del event[name]
    lines[number] = json.dumps(event).encode()
    return b"\n".join(lines) + b"\n"


USELESS = r"""
3 no kind
3 no at
3 no id
3 no request
3 {"kind": "exploded"}
3 {"id": ["open"]}
3 {"id": "other"}
3 {"request": 7}
3 {"request": {"task": "words", "id": "open", "sessions": ["0~1"]}}
3 {"request": {"task": "words", "id": "open", "sessions": ["0"], "sampling": {"temperature": 1e999}}}
3 {"task_id": "\ud800"}
3 {"id": "ended", "request": {"task": "words", "id": "ended", "sessions": ["0", "1"]}}
6 {"id": "nowhere"}
6 {"session_id": "ended-0"}
6 {"sampled": "many"}
5 {"session_id": "ended-0"}
7 no session_ids
7 {"id": "nowhere"}
7 {"state": "exploded"}
7 {"rewards": {"ended-0": NaN}}
9 no version
""".strip().splitlines()
"""Number of an event, and its fields that make it useless."""


@pytest.mark.parametrize("case", USELESS)
async def test_a_line_that_cannot_be_used_is_named_and_the_rest_is_taken(
    journal, tmp_path, caplog, case
):
    number, _, text = case.partition(" ")
    number = int(number)
    if text.startswith("no "):
        journal = edited(journal, number, text.removeprefix("no "))
    else:
        journal = edited(journal, number, **json.loads(text))
    groups = await load(tmp_path, journal)
    assert number in groups.journal.set_aside
    assert f"{JOURNAL}, line {number + 1} is set aside" in caplog.text
    accepted = {"ended", "cancelled", "after"}
    if number != 3:
        accepted.add("open")
    assert groups.book.accepted.keys() == accepted


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b'{"kind": 1e999}', b""], ids=len
)
async def test_a_line_that_is_no_event_is_named_and_the_rest_is_taken(
    journal, tmp_path, caplog, line
):
    lines = journal.splitlines()
    lines[9] = line
    groups = await load(tmp_path, b"\n".join(lines) + b"\n")
    assert [*groups.journal.set_aside] == [9]
    assert "line 10 is set aside: it is damaged" in caplog.text


HUGE = {"id": "own", "instruction": "go", "evaluate": ["true"], "limits": {"memory_gib": 1e308}}


@pytest.mark.parametrize("task", ["nowhere", HUGE, {"id": "own"}], ids=["none", "huge", "bare"])
async def test_a_group_whose_task_cannot_be_run_says_why_and_others_run(
    journal, tmp_path, caplog, task
):
    request = {"task": task, "id": "open", "sessions": ["0", "1"]}
    groups = await load(tmp_path, edited(journal, 3, request=request))
    assert groups.view("open").problem
    assert groups.view("open").state == "open"
    assert groups.view("cancelled").problem is None
    assert "the group open is not run: " in caplog.text


async def test_a_task_that_was_changed_meanwhile_keeps_its_groups_from_running(journal, tmp_path):
    groups = await load(tmp_path, edited(journal, 3, task_digest="0" * 64))
    assert "which has another content now: load it as it was" in groups.view("open").problem


def link_to_a_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [link_to_a_device, os.mkdir])
async def test_a_journal_that_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / JOURNAL)
    with pytest.raises(RolltapError, match="is no regular file"):
        groups_in(tmp_path)


VALUES = [None, True, -1, 1e308, 1 << 70, "", "\ud800", "\0", [], {}, "x" * 300]
VALUES += ["open", "ended-0", [[["0"]]]]


def damage(journal, chance):
    """Return a journal with one more damage."""
    lines = journal.splitlines(keepends=True)
    line = chance.randrange(len(lines))
    place = chance.randrange(len(journal))
    head = journal[:place]
    match chance.choice(("flip", "cut", "swap", "repeat", "remove", "value", "noise")):
        case "flip":
            flipped = journal[place] ^ 1 << chance.randrange(8)
            return head + bytes([flipped]) + journal[place + 1 :]
        case "cut":
            return head + journal[place + chance.randrange(80) :]
        case "noise":
            return head + chance.randbytes(20) + journal[place:]
        case "swap":
            chance.shuffle(lines)
        case "repeat":
            lines.append(lines[line])
        case "remove":
            del lines[line]
        case "value":
            with suppress(ValueError, LookupError, TypeError):  # after an earlier damage
                lines[line] = with_value(lines[line], chance)
    return b"".join(lines)


def with_value(line, chance):
    """Return an event with a hostile value in one place, at any depth."""
    place = event = json.loads(line)
    while True:
        key = chance.choice([*place] if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.3:
            break
        place = place[key]
    place[key] = chance.choice(VALUES)
    return json.dumps(event).encode() + b"\n"


@pytest.mark.parametrize("part", range(10 if DEEP else 1))
async def test_a_damaged_journal_starts_or_says_what_is_wrong(journal, tmp_path, part):
    chance = random.Random(part)
    for _ in range(25):
        damaged = journal
        for _ in range(chance.randint(1, 3)):
            damaged = damage(damaged, chance) or b"\n"
        fault = JOURNAL
        try:
            await load(tmp_path, damaged)
        except RolltapError as error:
            fault = str(error)
        assert JOURNAL in fault, damaged
