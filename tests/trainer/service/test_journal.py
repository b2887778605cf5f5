import asyncio
import errno
import json
import os

import pytest

from rolltap.errors import InputError, RunError
from rolltap.trainer.service import journal as module
from rolltap.trainer.service.journal import JOURNAL, Journal


@pytest.fixture
async def journal(tmp_path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


async def test_events_have_the_same_numbers_after_a_restart(journal, tmp_path):
    assert [await journal.add("a"), await journal.add("b", id="x")] == [1, 2]
    journal.close()
    again = Journal(tmp_path)
    assert (again.name, len(again)) == (journal.name, 2)
    assert [(number, event["kind"]) for number, event in again.read()] == [(1, "a"), (2, "b")]
    assert (again.get(2)["id"], await again.add("c")) == ("x", 3)
    again.close()


async def test_a_journal_has_one_service(journal, tmp_path):
    with pytest.raises(RunError, match="another service runs in"):
        Journal(tmp_path)


async def test_a_line_that_was_not_written_to_its_end_is_no_event(journal, tmp_path):
    await journal.add("a")
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"kind": "torn"')
    journal.close()
    again = Journal(tmp_path)
    assert (len(again), await again.add("b")) == (1, 2)
    assert [event["kind"] for _, event in again.read()] == ["a", "b"]
    again.close()


async def test_what_cannot_be_synced_is_no_event_and_the_next_one_is(journal, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    await journal.add("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            await journal.add("lost")
    assert await journal.add("b") == 2
    assert [event["kind"] for _, event in journal.read()] == ["a", "b"]


async def test_events_of_many_writers_are_in_the_order_of_their_numbers(journal):
    numbers = await asyncio.gather(*(journal.add("n", place=place) for place in range(100)))
    assert numbers == list(range(1, 101))
    assert [event["place"] for _, event in journal.read()] == list(range(100))


async def test_a_follower_gets_what_was_there_and_what_comes(journal):
    await journal.add("a")
    stream = journal.follow(0)
    first = await anext(stream)
    coming = asyncio.ensure_future(anext(stream))
    await journal.add("b")
    kinds = [text.split("\n")[1] for text in (first, await coming)]
    assert kinds == ["event: a", "event: b"]
    await stream.aclose()


async def test_a_silent_journal_says_so_now_and_then(journal, monkeypatch):
    monkeypatch.setattr("rolltap.trainer.service.journal.SILENT_SECONDS", 0.01)
    stream = journal.follow(0)
    assert await anext(stream) == ":\n\n"
    await stream.aclose()


async def test_an_event_is_read_once_however_many_follow(journal, monkeypatch):
    parsed = []
    loads = json.loads
    monkeypatch.setattr(module.json, "loads", lambda text: parsed.append(text) or loads(text))
    following = [journal.follow(0) for _ in range(256)]
    coming = [asyncio.ensure_future(anext(each)) for each in following]
    await journal.add("a", id="g", request="long", task_digest="0")
    texts = await asyncio.gather(*coming)
    assert len(parsed) == 1
    assert len({*texts}) == 1
    first, second, third, *_ = texts[0].split("\n")
    assert [first, second] == [f"id: {journal.cursor(1)}", "event: a"]
    assert loads(third.removeprefix("data: ")).keys() == {"at", "id"}
    for each in following:
        await each.aclose()


async def test_a_line_that_is_set_aside_is_told_to_nobody(journal, tmp_path):
    await journal.add("a")
    await journal.add("b")
    lines = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(lines.replace(b'"a"', b'"a.'))
    stream = journal.follow(0)
    text = await anext(stream)
    assert [line for line in text.split("\n") if line.startswith("event")] == ["event: b"]
    await stream.aclose()


async def test_a_cursor_is_of_this_journal(journal):
    await journal.add("a")
    assert [journal.place(None), journal.place(journal.cursor(1))] == [0, 1]
    places = ["", "1", "00000000-1"]
    places += [f"{journal.name}-{place}" for place in ("2", "-1", "x")]
    for wrong in places:
        with pytest.raises(InputError, match="is no cursor of this run, whose cursors are"):
            journal.place(wrong)


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / JOURNAL).write_text(json.dumps({"kind": "a"}) + "\n")
    with pytest.raises(RunError, match="is not the journal of a service: restore it"):
        Journal(tmp_path)


async def test_a_damaged_line_is_named(journal, tmp_path):
    await journal.add("a")
    (tmp_path / JOURNAL).write_bytes((tmp_path / JOURNAL).read_bytes().replace(b'"kind"', b'"kind'))
    with pytest.raises(RunError, match="line 2 is set aside: it is damaged"):
        journal.get(1)
