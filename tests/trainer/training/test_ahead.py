import asyncio
import threading
from collections import Counter
from itertools import count, filterfalse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.training.ahead import Ahead, Flow

TASK = Task(id="a", instruction="go", evaluate=["true"])


@given(
    ahead=st.integers(1, 3),
    size=st.integers(1, 3),
    steps=st.integers(1, 5),
    over=st.sets(st.integers(0, 9)),
    in_order=st.booleans(),
    data=st.data(),
)
def test_no_group_starts_too_early_none_is_lost_and_the_training_never_waits_for_nothing(
    ahead, size, steps, over, in_order, data
):
    flow = Flow(ahead, size, steps, filterfalse(over.__contains__, count()))
    running, complete, begun, taken, given_up = [], [], {}, Counter(), 0

    def start():
        for number in flow.start():
            assert number not in begun
            begun[number] = step
            running.append(number)

    for step in range(steps):
        flow.step = step
        start()
        kept = 0
        while kept < size:
            if not complete:
                assert running, "nothing runs, and nothing may start"
                complete.append(running.pop(0 if in_order else data.draw(st.integers(0, len(running) - 1))))
            number = complete.pop()
            taken[number] += 1
            if in_order and not given_up:
                assert 0 <= step - begun[number] <= ahead
            assert len(begun) <= (ahead + step + 1) * size + given_up
            if given_up < 3 and data.draw(st.booleans()):
                given_up += 1
                flow.begun -= 1
                start()
            else:
                kept += 1
    assert not set(begun) & over
    assert set(taken.values()) == {1}
    assert len(begun) == steps * size + given_up, "no more groups start than the steps train"
    assert sorted(begun) == list(begun)


class Played:
    """A schedule of which a test ends the groups. `submitted` has group id -> what it waits for."""

    def __init__(self, advance):
        self.advance, self.loop = advance, asyncio.get_running_loop()
        self.submitted = {}
        self.cancelled = []
        self.running = 0
        self.failure = None
        self.came = threading.Semaphore(0)

    async def __aenter__(self):
        self.block = asyncio.current_task()
        return self

    async def __aexit__(self, *error):
        for result in self.submitted.values():
            result.cancel()
        if self.failure is not None:
            raise self.failure

    async def submit(self, group):
        self.submitted[group.group_id] = self.loop.create_future()
        self.running += len(group.session_ids)
        self.ids = group.session_ids
        self.came.release()
        return self.submitted[group.group_id]

    def cancel_running(self, too_old, why):
        self.cancelled += [(version, why) for version in ("1", "2") if too_old(version)]

    def end(self, group_id, *session_ids):
        sessions = [Session(session_id=name, status="completed", group_id=group_id) for name in session_ids]
        self.running = 0
        self.loop.call_soon_threadsafe(self.submitted[group_id].set_result, sessions)

    def fail(self, error):
        self.failure = error
        self.loop.call_soon_threadsafe(self.block.cancel)


def beside(finished=lambda group: {}, **settings):
    """Return rollouts ahead of two steps of one group with two sessions, and a list for their schedule."""
    opened = []

    def open_schedule(advance):
        opened.append(Played(advance))
        return opened[0]

    def group_of(number):
        return Group(TASK, f"g{number}", [f"g{number}-{index}" for index in range(2)])

    flow = Flow(settings.get("ahead", 1), 1, 9, count())
    return Ahead(flow, open_schedule, group_of=group_of, finished=finished, show=lambda *_: None), opened


def names(sessions):
    return [session.session_id for session in sessions]


def test_the_oldest_complete_group_comes_first_and_new_weights_let_others_start():
    ahead, opened = beside()
    with ahead:
        (schedule,) = opened
        ahead.publish(0)
        assert list(schedule.submitted) == ["g0", "g1"]
        schedule.end("g1", "g1-1", "g1-0")
        assert names(ahead.take()) == ["g1-0", "g1-1"]
        ahead.publish(1)
        assert list(schedule.submitted) == ["g0", "g1", "g2"]
        schedule.end("g2", "g2-0")
        schedule.end("g0", "g0-0", "g0-1~1")
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), schedule.loop).result()
        assert names(ahead.take()) == ["g0-0", "g0-1~1"]
        ahead.give_up()
        assert list(schedule.submitted) == ["g0", "g1", "g2", "g3"]
        assert names(ahead.take()) == ["g2-0"], "a session that never began has no row"


def test_sessions_that_have_ended_before_are_not_run_again():
    known = Session(session_id="g0-1.0", status="completed")
    ahead, opened = beside(lambda group: {"g0-1": known} if group.group_id == "g0" else {})
    with ahead:
        ahead.publish(0)
        opened[0].end("g0", "g0-0")
        assert names(ahead.take()) == ["g0-0", "g0-1.0"]


def test_a_schedule_that_fails_ends_every_call_with_its_error():
    ahead, opened = beside()
    with ahead:
        ahead.publish(0)
        opened[0].fail(RecorderError("the recorder has died"))
        for call in (ahead.take, ahead.take, lambda: ahead.publish(1), ahead.idle_seconds):
            with pytest.raises(RecorderError, match="the recorder has died"):
                call()


def test_leaving_stops_the_schedule_and_its_thread():
    ahead, opened = beside()
    with ahead:
        ahead.publish(0)
    assert all(result.cancelled() for result in opened[0].submitted.values())
    assert not any(thread.name.startswith("rolltap-ahead") for thread in threading.enumerate())


def test_sessions_are_stopped_by_the_weights_with_which_they_began():
    ahead, opened = beside()
    with ahead:
        ahead.cancel_running(lambda version: version == "1", "it is old")
        assert opened[0].cancelled == [("1", "it is old")]


def test_only_the_time_in_which_no_session_runs_is_idle():
    ahead, opened = beside()
    with ahead:
        ahead.publish(0)
        opened[0].advance("", 0, 2)
        assert ahead.idle_seconds() > 0
        assert ahead.idle_seconds() == 0
