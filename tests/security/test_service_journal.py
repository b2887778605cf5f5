"""Journals that are damaged or hostile: a start takes what can be used, names the rest, and ends in
no traceback."""

import json
import random
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import json_text
from rolltap.trainer.service.groups import Groups
from rolltap.trainer.service.journal import JOURNAL
from rolltap.trainer.service.requests import GroupRequest
from rolltap.trainer.tasks.task import Task
from tests.deep import DEEP

TASK = Task(id="words", instruction="go", evaluate=["true"])


def groups_in(run):
    worker = SimpleNamespace(recorder=SimpleNamespace(path=run, engine="http://127.0.0.1:9"))
    return Groups(worker, [TASK], most=10_000, share=0.5)


async def write_journal(run):
    """Write a journal with groups that ended, were cancelled and are open."""
    groups = groups_in(run)
    await groups.load()
    for name in ("ended", "cancelled", "open"):
        await groups.submit(GroupRequest(id=name, task="words", sessions=2))
    view = {"status": "completed", "reward": 1.0, "policy_version": "default", "error": None}
    counts = {"sampled": 3, "left_out": {"stale": 1}}
    for name in ("ended-0", "ended-1", "open-0"):
        await groups.journal.add(
            "session", id=name.partition("-")[0], session_id=name, **view, **counts
        )
    ids = ["ended-0", "ended-1"]
    rewards = dict.fromkeys(ids, 1.0)
    await groups.journal.add(
        "ended", id="ended", state="ended", session_ids=ids, rewards=rewards, **counts
    )
    await groups.journal.add("cancelled", id="cancelled")
    await groups.journal.add("policy", version="7", adapter=None)
    groups.journal.close()
    return (run / JOURNAL).read_bytes()


@pytest.fixture
async def journal(tmp_path):
    return await write_journal(tmp_path)


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


def edited(journal, number, **fields):
    """Return a journal whose event with a number has other fields; without a value it has none."""
    lines = journal.splitlines()
    event = json.loads(lines[number]) | fields
    lines[number] = json.dumps(
        {name: value for name, value in event.items() if value is not ...}
    ).encode()
    return b"\n".join(lines) + b"\n"


def request(**fields):
    return {"task": "words", "id": "open", "sessions": ["0", "1"], **fields}


HUGE = {"id": "own", "instruction": "go", "evaluate": ["true"], "limits": {"memory_gib": 1e308}}
USELESS = {
    "no kind": (3, {"kind": ...}),
    "another kind": (3, {"kind": "exploded"}),
    "no time": (3, {"at": ...}),
    "no id": (3, {"id": ...}),
    "an id that is a list": (3, {"id": ["open"]}),
    "no request": (3, {"request": ...}),
    "another id than its request": (3, {"id": "other"}),
    "a request that is a number": (3, {"request": 7}),
    "a name of a retry": (3, {"request": request(sessions=["0~1"])}),
    "a number without end": (3, {"request": request(sampling={"temperature": float("inf")})}),
    "half of a surrogate pair": (3, {"task_id": "\ud800"}),
    "the same group twice": (3, {"id": "ended", "request": request(id="ended")}),
    "a session of no group": (6, {"id": "nowhere"}),
    "a session of another group": (6, {"session_id": "ended-0"}),
    "a session twice": (5, {"session_id": "ended-0"}),
    "no number of tokens": (6, {"sampled": "many"}),
    "an end of no group": (7, {"id": "nowhere"}),
    "an end without sessions": (7, {"session_ids": ...}),
    "an unknown state": (7, {"state": "exploded"}),
    "a reward without end": (7, {"rewards": {"ended-0": float("nan")}}),
    "no version": (9, {"version": ...}),
}


@pytest.mark.parametrize("case", USELESS)
async def test_a_line_that_cannot_be_used_is_named_and_the_rest_is_taken(
    journal, tmp_path, caplog, case
):
    number, fields = USELESS[case]
    groups = await load(tmp_path, edited(journal, number, **fields))
    assert number in groups.journal.set_aside
    assert f"{JOURNAL}, line {number + 1} is set aside" in caplog.text
    accepted = {"ended", "cancelled", "open"} - ({"open"} if number == 3 else set())
    assert groups.book.accepted.keys() == accepted | {"after"}


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b'{"kind": 1e999}', b""]
)
async def test_a_line_that_is_no_event_is_named_and_the_rest_is_taken(
    journal, tmp_path, caplog, line
):
    lines = journal.splitlines()
    lines[9] = line
    groups = await load(tmp_path, b"\n".join(lines) + b"\n")
    assert {9} == groups.journal.set_aside.keys()
    assert "line 10 is set aside: it is damaged" in caplog.text


@pytest.mark.parametrize("task", ["nowhere", HUGE, {"id": "own"}])
async def test_a_group_whose_task_cannot_be_run_says_why_and_others_run(
    journal, tmp_path, caplog, task
):
    groups = await load(tmp_path, edited(journal, 3, request=request(task=task)))
    assert groups.view("open").problem
    assert (groups.view("open").state, groups.view("cancelled").problem) == ("open", None)
    assert "the group open is not run: " in caplog.text


async def test_a_task_that_was_changed_meanwhile_keeps_its_groups_from_running(journal, tmp_path):
    groups = await load(tmp_path, edited(journal, 3, task_digest="0" * 64))
    assert "which has another content now: load it as it was" in groups.view("open").problem


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()]
)
async def test_a_journal_that_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / JOURNAL)
    with pytest.raises(RolltapError, match="is no regular file"):
        groups_in(tmp_path)


VALUES = [
    None,
    True,
    -1,
    1e308,
    1 << 70,
    "",
    "\ud800",
    "\0",
    [],
    {},
    "x" * 300,
    "open",
    "ended-0",
    [[["0"]]],
]


def damage(journal, chance):
    """Return a journal with one to three damages."""
    for _ in range(chance.randint(1, 3)):
        lines = journal.splitlines(keepends=True)
        place = chance.randrange(len(journal))
        line = chance.randrange(len(lines))
        match chance.choice(("flip", "cut", "swap", "repeat", "remove", "value", "noise")):
            case "flip":
                journal = (
                    journal[:place]
                    + bytes([journal[place] ^ 1 << chance.randrange(8)])
                    + journal[place + 1 :]
                )
            case "cut":
                journal = journal[:place] + journal[place + chance.randrange(80) :]
            case "swap":
                chance.shuffle(lines)
                journal = b"".join(lines)
            case "repeat":
                journal += lines[line]
            case "remove":
                journal = b"".join(lines[:line] + lines[line + 1 :])
            case "noise":
                journal = journal[:place] + chance.randbytes(20) + journal[place:]
            case "value":
                journal = _with_value(lines, line, chance)
        if not journal:
            return b"\n"
    return journal


def _with_value(lines, line, chance):
    """Put a hostile value into a place of an event, at any depth."""
    try:
        place = event = json.loads(lines[line])
        while True:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            key = chance.choice(keys)
            if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.3:
                break
            place = place[key]
        place[key] = chance.choice(VALUES)
        lines[line] = json.dumps(event).encode() + b"\n"
    except (ValueError, LookupError, TypeError):
        pass  # an earlier damage
    return b"".join(lines)


@pytest.mark.parametrize("part", range(10 if DEEP else 1))
async def test_a_damaged_journal_starts_or_says_what_is_wrong(journal, tmp_path, part):
    chance = random.Random(part)
    for _ in range(25):
        damaged = damage(journal, chance)
        fault = JOURNAL
        try:
            await load(tmp_path, damaged)
        except RolltapError as error:
            fault = str(error)
        assert JOURNAL in fault, damaged
