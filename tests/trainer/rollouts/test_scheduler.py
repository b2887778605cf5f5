import math
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rolltap.trainer.rollouts.resume import next_attempt, place_of
from rolltap.trainer.rollouts.scheduler import (
    Action,
    Scheduler,
    Slots,
)
from tests.trainer.rollouts.simulated import long_tailed, simulate

ACTIVE = {"prepare": "preparing", "run": "running", "judge": "judging"}


def names(actions, kind):
    return [action.session_id or action.group_id for action in actions if action.kind == kind]


class Rollout(RuleBasedStateMachine):
    """Sessions in any order: prepared, run, judged, retried, cancelled, late, and killed with the process."""

    @initialize(slots=st.builds(Slots, *[st.integers(low, 3) for low in (1, 0, 1, 1, 1)]), retries=st.integers(0, 2))
    def start(self, slots, retries):
        self.slots, self.retries, self.now = slots, retries, 0.0
        self.groups = {}  # group -> places that have not ended
        self.finished, self.old = set(), []
        self.next = {}  # place -> id of the attempt that a restart begins, of those that were begun
        self.begin()

    def begin(self):
        self.scheduler = Scheduler(self.slots, self.retries, 1.0)
        self.phases = {}  # session -> phase, of those that were given out
        self.stopped, self.begun = set(), Counter()
        for group_id, places in self.groups.items():
            self.scheduler.submit(group_id, [self.next.get(place, place) for place in sorted(places)])

    def act(self):
        for kind, group_id, session_id in self.scheduler.advance(self.now):
            if kind == "close":
                assert not self.groups.pop(group_id)
            elif kind == "stop":
                assert session_id in self.phases
                assert session_id not in self.stopped
                self.stopped.add(session_id)
            else:
                before = {"prepare": None, "run": "ready", "judge": "ran"}[kind]
                assert self.phases.get(session_id) == before
                assert session_id not in self.stopped
                assert place_of(session_id) in self.groups[group_id]
                assert session_id not in self.old
                self.begun[session_id, kind] += 1
                self.next[place_of(session_id)] = next_attempt(session_id)
                self.phases[session_id] = ACTIVE[kind]

    @rule(
        sessions=st.integers(0, 3),
        wait=st.sampled_from([math.inf, 2.0]),
        evaluates=st.booleans(),
        priority=st.integers(0, 2),
    )
    def submit(self, sessions, wait, evaluates, priority):
        group_id = f"g{len(self.groups) + len(self.finished) + len(self.old)}-{self.now:g}"
        while group_id in self.groups:
            group_id += "x"
        places = [f"{group_id}-{index}" for index in range(sessions)]
        self.groups[group_id] = {*places}
        how = {"evaluates": evaluates, "priority": priority}
        self.scheduler.submit(group_id, places, deadline=self.now + wait, **how)
        self.act()

    def some(self, data, phase):
        return data.draw(st.sampled_from(sorted(name for name, each in self.phases.items() if each == phase)))

    @precondition(lambda self: "preparing" in self.phases.values())
    @rule(data=st.data())
    def prepared(self, data):
        session_id = self.some(data, "preparing")
        self.phases[session_id] = "ready"
        self.scheduler.prepared(session_id)
        self.act()

    @precondition(lambda self: "running" in self.phases.values())
    @rule(data=st.data())
    def ran(self, data):
        session_id = self.some(data, "running")
        self.phases[session_id] = "ran"
        self.scheduler.ran(session_id)
        self.act()

    @precondition(lambda self: self.phases)
    @rule(data=st.data(), again=st.booleans())
    def ended(self, data, again):
        self.end(data.draw(st.sampled_from(sorted(self.phases))), again)

    def end(self, session_id, again):
        del self.phases[session_id]
        self.old.append(session_id)
        further = self.scheduler.ended(session_id, self.now, again=again)
        assert further is None or (again and session_id not in self.stopped)
        if further is None:
            self.finish(session_id)
        else:
            assert place_of(further) == place_of(session_id)
        self.stopped.discard(session_id)
        self.act()

    def finish(self, session_id):
        self.finished.add(place_of(session_id))
        for places in self.groups.values():
            places.discard(place_of(session_id))

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def a_late_event_changes_nothing(self, data):
        late, before = data.draw(st.sampled_from(self.old)), self.scheduler.counts.copy()
        self.scheduler.prepared(late)
        self.scheduler.ran(late)
        assert self.scheduler.ended(late, self.now, again=True) is None
        self.scheduler.cancel(late)
        assert self.scheduler.counts == before
        assert self.scheduler.advance(self.now) == []

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def cancel_a_group(self, data):
        group_id = data.draw(st.sampled_from(sorted(self.groups)))
        self.scheduler.cancel(group_id)
        self.forget_waiting(self.groups[group_id])
        self.act()
        active = {name for name in self.phases if place_of(name) in self.groups.get(group_id, ())}
        assert active <= self.stopped

    def forget_waiting(self, places):
        active = {place_of(name) for name in self.phases}
        for place in [place for place in places if place not in active]:
            self.finish(place)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.now += seconds
        over = [name for name, group in self.scheduler._groups.items() if group.deadline <= self.now]
        for group_id in over:
            self.forget_waiting(self.groups[group_id])
        self.act()

    @rule(running=st.integers(0, 3))
    def admit(self, running):
        self.slots = self.slots._replace(running=running)
        self.scheduler.slots = self.slots
        self.act()

    @rule()
    def the_process_is_killed_and_started_again(self):
        self.old += self.phases
        self.begin()
        self.act()

    @invariant()
    def slots_are_used_once_and_none_is_idle(self):
        if not hasattr(self, "scheduler"):
            return
        counts, slots = Counter(self.phases.values()), self.slots
        assert {phase: self.scheduler.counts[phase] for phase in counts} == counts
        assert counts["preparing"] <= slots.preparing
        assert counts["judging"] <= slots.judging
        assert set(self.begun.values()) <= {1}
        waits = {
            phase: [n for n, each in self.phases.items() if each == phase and n not in self.stopped] for phase in counts
        }
        assert not waits.get("ran") or counts["judging"] == slots.judging
        held = counts["ran"] >= max(1, slots.running)
        assert not waits.get("ready") or held or counts["running"] >= slots.running
        ahead = counts["preparing"] + counts["ready"]
        full = (
            counts["preparing"] == slots.preparing or ahead >= max(0, slots.running - counts["running"]) + slots.ready
        )
        assert full or not self.scheduler.counts["waiting"]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.slots = self.scheduler.slots = self.slots._replace(running=1)
        while self.groups:
            self.now = max(self.now, self.scheduler.due() or 0.0)
            self.wait(0.0)
            for session_id in sorted(self.phases):
                self.end(session_id, False)
        assert not +self.scheduler.counts
        assert (self.scheduler._groups, self.scheduler._attempts, self.scheduler.due()) == ({}, {}, None)
        assert self.scheduler._evaluating == 0


TestRollout = Rollout.TestCase


def test_a_judge_holds_no_slot_of_those_that_run():
    scheduler = Scheduler(Slots(preparing=2, ready=0, running=1, judging=1))
    scheduler.submit("g", ["a", "b"])
    assert names(scheduler.advance(0), "prepare") == ["a"]
    scheduler.prepared("a")
    assert names(scheduler.advance(0), "run") == ["a"]
    scheduler.ran("a")
    assert scheduler.advance(0) == [Action("judge", "g", "a"), Action("prepare", "g", "b")]


def test_prepared_sessions_wait_in_a_buffer_of_bounded_size():
    scheduler = Scheduler(Slots(preparing=4, ready=2, running=1, judging=1))
    scheduler.submit("g", list("abcde"))
    assert names(scheduler.advance(0), "prepare") == ["a", "b", "c"]
    for session_id in "cba":
        scheduler.prepared(session_id)
    assert names(scheduler.advance(0), "run") == ["a"]
    assert scheduler.counts["ready"] == 2


def test_no_more_are_prepared_while_slow_judges_hold_new_ones_back():
    scheduler = Scheduler(Slots(preparing=8, ready=4, running=8, judging=1))
    scheduler.submit("g", [f"s-{number}" for number in range(200)])
    for _ in range(60):
        for action in scheduler.advance(0):
            {"prepare": scheduler.prepared, "run": scheduler.ran, "judge": str}[action.kind](action.session_id)
    assert scheduler.counts["ready"] <= 4 + 8


def test_a_name_is_used_once():
    scheduler = Scheduler(Slots(preparing=1, ready=0, running=1, judging=1))
    scheduler.submit("g", ["a"])
    for group_id, session_ids in (("g", ["b"]), ("h", ["a"]), ("h", ["b", "b"])):
        with pytest.raises(ValueError, match="is there already"):
            scheduler.submit(group_id, session_ids)


def test_sessions_that_wait_for_a_judge_hold_back_new_ones():
    scheduler = Scheduler(Slots(preparing=1, ready=0, running=1, judging=1))
    scheduler.submit("g", list("abcd"))
    for session_id in "abc":
        scheduler.advance(0)
        scheduler.prepared(session_id)
        scheduler.advance(0)
        scheduler.ran(session_id)
    scheduler.advance(0)  # a is judged, b and c wait
    scheduler.prepared("d")
    assert names(scheduler.advance(0), "run") == []
    scheduler.ended("a", 0)
    assert names(scheduler.advance(0), "judge") == ["b"]


def test_a_retry_waits_longer_each_time_and_then_goes_before_younger_groups():
    scheduler = Scheduler(Slots(preparing=1, ready=0, running=1, judging=1), retries=2, pause=1.0)
    scheduler.submit("old", ["a"])
    scheduler.advance(0)
    assert scheduler.ended("a", 0.0, again=True) == "a~1"
    assert scheduler.due() == 1.0
    assert scheduler.advance(0.5) == []
    scheduler.submit("young", ["b", "c"])
    assert names(scheduler.advance(0.5), "prepare") == ["b"]
    scheduler.ended("b", 1.0)
    assert names(scheduler.advance(1.0), "prepare") == ["a~1"]
    assert scheduler.ended("a~1", 1.0, again=True) == "a~2"
    assert scheduler.due() == 3.0
    scheduler.advance(3.0)
    assert scheduler.ended("a~2", 3.0, again=True) is None


@pytest.mark.parametrize(("evaluation", "prepared"), [(1, ["e0", "t0", "t1"]), (2, ["e0", "e1", "t0"])])
def test_evaluation_has_its_share_while_training_waits(evaluation, prepared):
    scheduler = Scheduler(Slots(preparing=3, ready=0, running=3, judging=1, evaluation=evaluation))
    scheduler.submit("training", ["t0", "t1"])
    scheduler.submit("evaluation", ["e0", "e1"], evaluates=True)
    assert names(scheduler.advance(0), "prepare") == prepared


def test_evaluation_has_all_slots_while_nothing_else_waits():
    scheduler = Scheduler(Slots(preparing=3, ready=0, running=3, judging=1, evaluation=1))
    scheduler.submit("evaluation", ["e0", "e1", "e2"], evaluates=True)
    assert names(scheduler.advance(0), "prepare") == ["e0", "e1", "e2"]


def test_a_higher_priority_goes_first_and_stops_no_session():
    scheduler = Scheduler(Slots(preparing=1, ready=0, running=1, judging=1))
    scheduler.submit("running", ["r"])
    assert names(scheduler.advance(0), "prepare") == ["r"]
    for name, priority in (("low", 0), ("usual", 50), ("high", 100), ("higher", 100)):
        scheduler.submit(name, [name], priority=priority)
    order = ["r"]
    for _ in range(4):
        assert names(scheduler.advance(0), "stop") == []
        scheduler.ended(order[-1], 0)
        order += names(scheduler.advance(0), "prepare")
    assert order == ["r", "high", "higher", "usual", "low"]


class Unwalkable(dict):
    """A dict of which single keys can be looked up."""

    def __iter__(self):
        raise AssertionError("an event walks over all sessions")

    keys = values = items = __iter__


def test_an_event_looks_at_no_other_session():
    scheduler = Scheduler(Slots(preparing=1, ready=0, running=1, judging=1), retries=1)
    scheduler._groups = Unwalkable()
    scheduler._attempts = Unwalkable()
    scheduler.submit("late", ["l"], deadline=1.0)
    scheduler.submit("g", ["a", "b"])
    assert names(scheduler.advance(0.0), "prepare") == ["l"]
    assert names(scheduler.advance(1.0), "stop") == ["l"]
    scheduler.ended("l", 1.0)
    assert names(scheduler.advance(1.0), "prepare") == ["a"]
    scheduler.ended("a", 1.0, again=True)
    assert scheduler.due() == 2.0
    assert names(scheduler.advance(1.0), "prepare") == ["b"]
    scheduler.ended("b", 2.0)
    assert names(scheduler.advance(2.0), "prepare") == ["a~1"]


def test_a_group_and_a_session_may_have_the_same_name():
    scheduler = Scheduler(Slots(preparing=1, ready=0, running=1, judging=1), retries=1)
    scheduler.submit("a", ["a", "b~1"], deadline=5.0)
    scheduler.submit("a~1", ["c"])
    scheduler.advance(0.0)
    scheduler.ended("a", 0.0, again=True)
    assert scheduler.due() == 1.0
    scheduler.advance(1.0)
    assert scheduler.due() == 5.0


def test_a_thousand_sessions_with_long_tails_take_little_more_than_their_slots_allow_and_old_groups_end_first():
    slots = Slots(preparing=8, ready=8, running=32, judging=8)
    groups = [[f"{group}-{index}" for index in range(8)] for group in range(125)]
    seen = simulate(Scheduler(slots), groups, long_tailed(0))
    assert seen.ended.keys() == {session_id for group in groups for session_id in group}
    longest = max(long_tailed(0)(session_id)[1] for session_id in seen.ended)
    assert seen.ran / 32 <= seen.end <= seen.ran / 32 + longest + 1  # Graham's bound for a list schedule
    begun = [min(seen.ended[session_id] for session_id in group) for group in groups]
    assert all(max(begun[: group + 1]) < seen.closed[f"g{group + 16}"] for group in range(100))
