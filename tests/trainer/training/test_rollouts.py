import asyncio
import threading
from collections import Counter
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.names import Version
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.training.rollouts import AsyncRollouts, StalenessBound
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
    running = []
    complete = []
    begun = {}
    taken = Counter()
    forked = set()
    given_up = 0

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

    starts = StalenessBound(staleness, size, steps, untaken())
    for step in range(steps):
        if data.draw(st.booleans(), label="the training was killed"):
            running = []
            complete = []
            starts = StalenessBound(staleness, size, steps, untaken(), begun=step * size)
        starts.step = step
        start()
        wanted = size
        while wanted:
            if not complete:
                assert running, "nothing runs, and nothing may start"
                place = 0
                if not in_order:
                    place = data.draw(st.integers(0, len(running) - 1))
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
        self.advance = advance
        self.loop = asyncio.get_running_loop()
        self.submitted = {}
        self.running = 0
        self.failure = None

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
        return self.submitted[group.group_id]

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


def numbered():
    for number in count():
        yield number, step_group(Version("1a2b3c4d", number, 0), 0, TASK, 2)


@pytest.fixture
def opened():
    """Rollouts one step ahead, of one group with two sessions a step, and their runner."""
    runners = []

    def open_runner(advance):
        runners.append(Played(advance))
        return runners[0]

    starts = StalenessBound(1, 1, 9, numbered())
    with AsyncRollouts(starts, open_runner, finished=lambda group: {}) as rollouts:
        yield rollouts, runners[0]


def taken(rollouts):
    """Return the number of the oldest complete group, and the names of its sessions in it."""
    group = rollouts.take()
    prefix = f"{group.group.group_id}-"
    return group.number, *(each.session_id.removeprefix(prefix) for each in group.sessions)


def test_the_oldest_complete_group_comes_first_and_new_weights_let_others_start(opened):
    rollouts, runner = opened
    rollouts.publish(0)
    assert runner.numbers == [0, 1]
    runner.end(1, "1.0", "0.0")
    assert taken(rollouts) == (1, "0.0", "1.0")
    rollouts.publish(1)
    assert runner.numbers == [0, 1, 2]
    runner.end(2, "0.0")
    runner.end(0, "0.0", "1.0~1")
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), runner.loop).result()
    assert taken(rollouts) == (0, "0.0", "1.0~1")
    rollouts.replace()
    assert runner.numbers == [0, 1, 2, 3]
    assert taken(rollouts) == (2, "0.0"), "a session that never began has no row"


def test_progress_is_shown_from_where_it_is(opened):
    rollouts, runner = opened
    shown = []
    runner.advance("sessions", 1, 2)
    rollouts.show(lambda *progress: shown.append(progress))
    runner.advance("sessions", 2, 2)
    assert shown == [("sessions", 1, 2), ("sessions", 2, 2)]


def test_a_runner_that_fails_ends_every_call_with_its_error(opened):
    rollouts, runner = opened
    rollouts.publish(0)
    runner.fail(RecorderError("the recorder has died"))
    for call in (rollouts.take, rollouts.take, partial(rollouts.publish, 1), rollouts.idle_seconds):
        with pytest.raises(RecorderError, match="the recorder has died"):
            call()


def test_leaving_stops_the_runner_and_its_thread(opened):
    rollouts, runner = opened
    rollouts.publish(0)
    rollouts.__exit__()
    assert all(result.cancelled() for result in runner.submitted.values())
    threads = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("rolltap-rollouts") for name in threads)


def test_only_the_time_in_which_no_session_runs_is_idle(opened):
    rollouts, runner = opened
    rollouts.publish(0)
    runner.advance("", 0, 2)
    assert rollouts.idle_seconds() > 0
    assert rollouts.idle_seconds() == 0
