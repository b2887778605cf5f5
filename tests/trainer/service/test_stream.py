"""Events of a journal for those who follow it."""

import asyncio
import json

import pytest

from rolltap.trainer.service import journal as module
from rolltap.trainer.service.journal import JOURNAL, Journal
from rolltap.trainer.service.stream import EventStream


@pytest.fixture
async def journal(tmp_path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


async def test_an_event_is_read_once_however_many_follow(journal, monkeypatch):
    parsed = []
    loads = json.loads
    monkeypatch.setattr(module.json, "loads", lambda text: parsed.append(text) or loads(text))
    stream = EventStream(journal)
    following = [stream.follow(0) for _ in range(256)]
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
    stream = EventStream(journal).follow(0)
    text = await anext(stream)
    assert [line for line in text.split("\n") if line.startswith("event")] == ["event: b"]
    await stream.aclose()
