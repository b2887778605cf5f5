import asyncio
import threading
from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.names import Version
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.training.rollouts import AsyncRollouts, Starts
from rolltap.trainer.training.steps import step_group

TASK = Task(id="a", instruction="go", evaluate=["true"])


@given(
    staleness=st.integers(0, 3),
    size=st.integers(1, 3),
    steps=st.integers(1, 5),
    in_order=st.booleans(),
    data=st.data(),
)
def test_no_group_starts_too_early_none_is_lost_and_the_training_never_waits_for_nothing(
    staleness, size, steps, in_order, data
):
    running, complete, begun, taken, given_up = [], [], {}, Counter(), 0
    forked = set()

    def untaken():
        for number in count():
            if number not in taken:
                yield number
            elif number in forked and f"forks of {number}" not in taken:
                yield f"forks of {number}"

    def start():
        for group in starts.take():
            assert group not in running + complete
            begun.setdefault(group, step)
            running.append(group)

    starts = Starts(staleness, size, steps, untaken())
    for step in range(steps):
        if data.draw(st.booleans(), label="the training was killed"):
            running, complete = [], []
            starts = Starts(staleness, size, steps, untaken(), begun=step * size)
        starts.step = step
        start()
        wanted = size
        while wanted:
            if not complete:
                assert running, "nothing runs, and nothing may start"
                place = 0 if in_order else data.draw(st.integers(0, len(running) - 1))
                complete.append(running.pop(place))
            group = complete.pop()
            taken[group] += 1
            if in_order and not given_up and not forked:
                assert 0 <= step - begun[group] <= staleness
            assert len(begun) <= (staleness + step + 1) * size + given_up + len(forked)
            end = data.draw(st.sampled_from(["trained", "given up", "forked"]))
            if end == "given up" and given_up < 3:
                given_up += 1
                starts.replace()
                start()
                continue
            wanted -= 1
            if end == "forked" and isinstance(group, int):
                forked.add(group)
                running.append(f"forks of {group}")
                begun[f"forks of {group}"] = step
                wanted += 1
    assert set(taken.values()) == {1}
    assert begun.keys() == {*taken}
    numbers = [group for group in begun if isinstance(group, int)]
    assert len(numbers) == steps * size + given_up, "no more groups start than the steps train"
    assert sorted(numbers) == [*range(len(numbers))]


class Played:
    """A runner of which a test ends the groups. `submitted` has group id -> what it waits for."""

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

    @property
    def numbers(self):
        return [int(name.split(".")[1]) for name in self.submitted]

    def end(self, number, *names):
        """End a group with sessions of these names in it."""
        group_id = f"a-1a2b3c4d.{number}.0"
        sessions = [Session(session_id=f"{group_id}-{name}", status="completed") for name in names]
        self.running = 0
        self.loop.call_soon_threadsafe(self.submitted[group_id].set_result, sessions)

    def fail(self, error):
        self.failure = error
        self.loop.call_soon_threadsafe(self.block.cancel)


def beside(finished=lambda group: {}):
    """Return rollouts one step ahead, of one group with two sessions a step, and a list for their
    schedule."""
    opened = []

    def open_runner(advance):
        opened.append(Played(advance))
        return opened[0]

    groups = (
        (number, step_group(Version("1a2b3c4d", number, 0), 0, TASK, 2)) for number in count()
    )
    return AsyncRollouts(Starts(1, 1, 9, groups), open_runner, finished=finished), opened


def taken(rollouts):
    """Return the number of the oldest complete group, and the names of its sessions in it."""
    group = rollouts.take()
    return group.number, *(
        each.session_id.removeprefix(f"{group.group.group_id}-") for each in group.sessions
    )


def test_the_oldest_complete_group_comes_first_and_new_weights_let_others_start():
    rollouts, opened = beside()
    with rollouts:
        (schedule,) = opened
        rollouts.publish(0)
        assert schedule.numbers == [0, 1]
        schedule.end(1, "1.0", "0.0")
        assert taken(rollouts) == (1, "0.0", "1.0")
        rollouts.publish(1)
        assert schedule.numbers == [0, 1, 2]
        schedule.end(2, "0.0")
        schedule.end(0, "0.0", "1.0~1")
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), schedule.loop).result()
        assert taken(rollouts) == (0, "0.0", "1.0~1")
        rollouts.replace()
        assert schedule.numbers == [0, 1, 2, 3]
        assert taken(rollouts) == (2, "0.0"), "a session that never began has no row"


def test_sessions_that_have_ended_before_are_not_run_again():
    known = Session(session_id="a-1a2b3c4d.0.0-1.7", status="completed")
    rollouts, opened = beside(
        lambda group: {"a-1a2b3c4d.0.0-1.0": known} if ".0.0" in group.group_id else {}
    )
    with rollouts:
        rollouts.publish(0)
        opened[0].end(0, "0.0")
        assert taken(rollouts) == (0, "0.0", "1.7")


def test_progress_is_shown_from_where_it_is():
    rollouts, opened = beside()
    shown = []
    with rollouts:
        opened[0].advance("sessions", 1, 2)
        rollouts.show(lambda *progress: shown.append(progress))
        opened[0].advance("sessions", 2, 2)
    assert shown == [("sessions", 1, 2), ("sessions", 2, 2)]


def test_a_schedule_that_fails_ends_every_call_with_its_error():
    rollouts, opened = beside()
    with rollouts:
        rollouts.publish(0)
        opened[0].fail(RecorderError("the recorder has died"))
        for call in (
            rollouts.take,
            rollouts.take,
            lambda: rollouts.publish(1),
            rollouts.idle_seconds,
        ):
            with pytest.raises(RecorderError, match="the recorder has died"):
                call()


def test_leaving_stops_the_schedule_and_its_thread():
    rollouts, opened = beside()
    with rollouts:
        rollouts.publish(0)
    assert all(result.cancelled() for result in opened[0].submitted.values())
    assert not any(thread.name.startswith("rolltap-rollouts") for thread in threading.enumerate())


def test_sessions_are_stopped_by_the_weights_with_which_they_began():
    rollouts, opened = beside()
    with rollouts:
        rollouts.cancel_running(lambda version: version == "1", "it is old")
        assert opened[0].cancelled == [("1", "it is old")]


def test_only_the_time_in_which_no_session_runs_is_idle():
    rollouts, opened = beside()
    with rollouts:
        rollouts.publish(0)
        opened[0].advance("", 0, 2)
        assert rollouts.idle_seconds() > 0
        assert rollouts.idle_seconds() == 0
