import math
from collections import Counter, defaultdict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.queue import Action, SessionQueue, Slots
from tests.trainer.rollouts.simulated import long_tailed, simulate

ONE = Slots(preparing=1, ready=0, running=1, judging=1)
SLOTS = st.builds(Slots, *[st.integers(low, 3) for low in (1, 0, 1, 1, 1)])
PHASES = {"prepare": "preparing", "run": "running", "judge": "judging"}
BEFORE = {"prepare": None, "run": "ready", "judge": "ran"}


def queue_of(*nodes, retries=0):
    """Return a queue with a node of each of the slots, whose names are a, b."""
    queue = SessionQueue(retries)
    for name, slots in zip("ab", nodes, strict=False):
        queue.add_node(name, slots)
    return queue


def place_of(session_id):
    return SessionName.parse(session_id).place


class Rollout(RuleBasedStateMachine):
    """Sessions in any order: prepared, run, judged, retried, cancelled, late, and killed with the
    process or a node."""

    def __init__(self):
        super().__init__()
        self.nodes = {}
        self.retries = 0
        self.now = 0.0
        self.submitted = 0
        self.groups = {}  # group -> places that have not ended
        self.old = []  # sessions that have ended
        self.next = {}  # place -> id of the attempt that a restart begins, of those that were begun
        self.begin()

    @initialize(slots=SLOTS, retries=st.integers(0, 2))
    def start(self, slots, retries):
        self.nodes = {"a": slots}
        self.retries = retries
        self.begin()

    def begin(self):
        self.queue = SessionQueue(self.retries)
        for name, slots in self.nodes.items():
            self.queue.add_node(name, slots)
        self.resting = set()
        self.deadlines = {}
        self.phases = {}  # session -> phase, of those that were given out
        self.on = {}  # session -> its node, unless the node is lost
        self.stopped = set()
        self.spared = set()  # sessions that lost a node before they began to run
        for group_id, places in self.groups.items():
            self.queue.submit(group_id, [self.next.get(place, place) for place in sorted(places)])

    def act(self):
        for action in self.queue.advance(self.now):
            if action.kind == "close":
                assert not self.groups.pop(action.group_id)
            elif action.kind == "stop":
                assert action.session_id in self.phases
                assert action.session_id not in self.stopped
                self.stopped.add(action.session_id)
            else:
                self.begin_phase(*action)

    def begin_phase(self, kind, group_id, session_id, node):
        place = place_of(session_id)
        assert place in self.groups[group_id]
        assert session_id not in {*self.old, *self.stopped}
        assert self.phases.get(session_id) == BEFORE[kind]
        if kind != "prepare":
            assert self.on[session_id] == node
        assert kind in self.free(node)
        self.phases[session_id] = PHASES[kind]
        self.on[session_id] = node
        self.next[place] = str(SessionName.parse(session_id).next)

    def counts(self, node):
        return Counter(self.phases[name] for name, other in self.on.items() if other == node)

    def free(self, node):
        """Return which actions a node has a slot for."""
        slots = self.nodes[node]
        counts = self.counts(node)
        may_run = slots.running if counts["ran"] < max(1, slots.running) else 0
        ahead = counts["preparing"] + counts["ready"]
        may_be_ahead = max(0, may_run - counts["running"]) + slots.ready
        free = {
            "prepare": counts["preparing"] < slots.preparing and ahead < may_be_ahead,
            "run": counts["running"] < may_run,
            "judge": counts["judging"] < slots.judging,
        }
        return {kind for kind, is_free in free.items() if is_free}

    @precondition(lambda self: len(self.nodes) < 3)
    @rule(slots=SLOTS)
    def a_node_comes(self, slots):
        name = min({"a", "b", "c"} - self.nodes.keys())
        self.nodes[name] = slots
        self.queue.add_node(name, slots)
        self.act()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def a_node_is_lost(self, data):
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        del self.nodes[name]
        self.resting.discard(name)
        self.queue.remove_node(name)
        self.on = {session_id: node for session_id, node in self.on.items() if node != name}
        self.act()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), rests=st.booleans())
    def a_node_rests_or_goes_on(self, data, rests):
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        if rests:
            self.resting.add(name)
        else:
            self.resting.discard(name)
        self.queue.rest_node(name, rests)
        self.act()

    @rule(
        sessions=st.integers(0, 3),
        wait=st.sampled_from([math.inf, 2.0]),
        evaluates=st.booleans(),
        priority=st.integers(0, 2),
    )
    def submit(self, sessions, wait, evaluates, priority):
        self.submitted += 1
        group_id = f"g{self.submitted}"
        places = [f"{group_id}-{index}" for index in range(sessions)]
        deadline = self.now + wait
        self.groups[group_id] = {*places}
        self.deadlines[group_id] = deadline
        self.queue.submit(
            group_id, places, deadline=deadline, evaluates=evaluates, priority=priority
        )
        self.act()

    def draw(self, data, phase):
        sessions = [session_id for session_id, each in self.phases.items() if each == phase]
        return data.draw(st.sampled_from(sorted(sessions)))

    @precondition(lambda self: "preparing" in self.phases.values())
    @rule(data=st.data())
    def prepared(self, data):
        session_id = self.draw(data, "preparing")
        if session_id in self.on:  # an event of a lost node changes nothing
            self.phases[session_id] = "ready"
        self.queue.prepared(session_id)
        self.act()

    @precondition(lambda self: "running" in self.phases.values())
    @rule(data=st.data())
    def ran(self, data):
        session_id = self.draw(data, "running")
        if session_id in self.on:  # an event of a lost node changes nothing
            self.phases[session_id] = "ran"
        self.queue.ran(session_id)
        self.act()

    @precondition(lambda self: self.phases)
    @rule(data=st.data(), again=st.booleans())
    def ended(self, data, again):
        self.end(data.draw(st.sampled_from(sorted(self.phases))), again)

    def end(self, session_id, again):
        del self.phases[session_id]
        self.on.pop(session_id, None)
        self.old.append(session_id)
        further = self.queue.ended(session_id, self.now, again=again)
        assert further is None or (again and session_id not in self.stopped)
        if further is None:
            self.finish(place_of(session_id))
        else:
            assert place_of(further) == place_of(session_id)
        self.stopped.discard(session_id)
        self.act()

    def finish(self, place):
        for places in self.groups.values():
            places.discard(place)

    def unbegun(self):
        """Return the sessions whose first nodes were lost before they began to run."""
        found = []
        other = {*self.on, *self.stopped, *self.spared}
        for session_id, phase in self.phases.items():
            if phase in ("preparing", "ready") and session_id not in other:
                found.append(session_id)
        return sorted(found)

    @precondition(lambda self: self.unbegun())
    @rule(data=st.data())
    def a_session_that_had_not_begun_to_run_waits_again(self, data):
        session_id = data.draw(st.sampled_from(self.unbegun()))
        assert self.queue.requeue(session_id)
        self.spared.add(session_id)
        del self.phases[session_id]
        self.act()

    @rule()
    def no_other_session_waits_again(self):
        for session_id in {*self.phases} - {*self.unbegun()}:
            assert not self.queue.requeue(session_id)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def a_late_event_changes_nothing(self, data):
        late = data.draw(st.sampled_from(self.old))
        before = self.queue.counts.copy()
        self.queue.prepared(late)
        self.queue.ran(late)
        assert self.queue.ended(late, self.now, again=True) is None
        self.queue.cancel(late)
        assert self.queue.counts == before
        assert self.queue.advance(self.now) == []

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def cancel_a_group(self, data):
        group_id = data.draw(st.sampled_from(sorted(self.groups)))
        self.queue.cancel(group_id)
        self.forget_waiting(group_id)
        self.act()
        for session_id in self.phases:
            if place_of(session_id) in self.groups.get(group_id, ()):
                assert session_id in self.stopped

    def forget_waiting(self, group_id):
        self.groups[group_id] &= {place_of(session_id) for session_id in self.phases}

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.now += seconds
        for group_id, deadline in self.deadlines.items():
            if deadline <= self.now and group_id in self.groups:
                self.forget_waiting(group_id)
        self.act()

    @rule()
    def the_process_is_killed_and_started_again(self):
        self.old += self.phases
        self.begin()
        self.act()

    @invariant()
    def sessions_are_counted(self):
        counts = Counter(self.phases.values())
        assert {phase: self.queue.counts[phase] for phase in counts} == counts
        for name in self.nodes:
            assert +self.queue.node_counts(name) == self.counts(name)

    @invariant()
    def no_slot_is_idle_while_a_session_waits_for_it(self):
        for name in self.nodes:
            free = self.free(name)
            for session_id, node in self.on.items():
                if node == name and session_id not in self.stopped:
                    assert self.phases[session_id] != "ran" or "judge" not in free
                    assert self.phases[session_id] != "ready" or "run" not in free
            if "prepare" in free:
                self.require_that_none_waits_for(name)

    def require_that_none_waits_for(self, name):
        counts = self.counts(name)
        held = counts["preparing"] + counts["ready"] + counts["running"]
        has_free = len(self.nodes) == 1 or held < self.nodes[name].running
        takes_more = has_free and name not in self.resting
        for group in self.queue._groups.values():
            if group.node == name or (group.node is None and takes_more):
                phases = {self.queue._attempts[session_id].phase for session_id in group.unended}
                assert "waiting" not in phases

    @invariant()
    def a_group_is_on_one_node(self):
        for places in self.groups.values():
            nodes = {node for name, node in self.on.items() if place_of(name) in places}
            assert len(nodes) <= 1

    def teardown(self):
        self.nodes["last"] = ONE
        self.queue.add_node("last", ONE)
        for name in self.resting:
            self.queue.rest_node(name, False)
        while self.groups:
            self.now = max(self.now, self.queue.due() or 0.0)
            self.wait(0.0)
            for session_id in sorted(self.phases):
                self.end(session_id, False)
        assert not +self.queue.counts
        assert (self.queue._groups, self.queue._attempts, self.queue.due()) == ({}, {}, None)
        for name in self.nodes:
            assert not +self.queue.node_counts(name)
            assert self.queue._nodes[name].evaluating == 0
            assert not self.queue._nodes[name].groups


TestRollout = Rollout.TestCase


def names(actions, kind):
    return [action.session_id for action in actions if action.kind == kind]


def begun(queue, now=0.0):
    """Return session -> node of those that are prepared now."""
    actions = queue.advance(now)
    return {action.session_id: action.node for action in actions if action.kind == "prepare"}


def test_a_judge_holds_no_slot_of_those_that_run():
    queue = queue_of(Slots(preparing=2, ready=0, running=1, judging=1))
    queue.submit("g", ["a", "b"])
    assert names(queue.advance(0), "prepare") == ["a"]
    queue.prepared("a")
    assert names(queue.advance(0), "run") == ["a"]
    queue.ran("a")
    judge = Action("judge", "g", "a", "a")
    assert queue.advance(0) == [judge, Action("prepare", "g", "b", "a")]


def test_prepared_sessions_wait_in_a_buffer_of_bounded_size():
    queue = queue_of(Slots(preparing=4, ready=2, running=1, judging=1))
    queue.submit("g", list("abcde"))
    assert names(queue.advance(0), "prepare") == ["a", "b", "c"]
    for session_id in "cba":
        queue.prepared(session_id)
    assert names(queue.advance(0), "run") == ["a"]
    assert queue.counts["ready"] == 2


def test_sessions_that_wait_for_a_judge_hold_back_new_ones():
    queue = queue_of(Slots(preparing=1, ready=1, running=1, judging=1))
    queue.submit("g", list("abcd"))
    assert names(queue.advance(0), "prepare") == ["a"]
    queue.prepared("a")
    assert names(queue.advance(0), "run") == ["a"]
    queue.prepared("b")
    queue.ran("a")
    assert names(queue.advance(0), "judge") == ["a"]  # and b runs
    queue.prepared("c")
    queue.ran("b")
    assert queue.advance(0) == []  # none runs and none is prepared while b waits
    queue.ended("a", 0)
    assert [action.kind for action in queue.advance(0)] == ["judge", "run", "prepare"]


def test_a_session_that_is_stopped_takes_no_further_slot():
    queue = queue_of(ONE)
    queue.submit("g", ["a"])
    queue.advance(0)
    queue.prepared("a")
    queue.cancel("a")
    assert queue.advance(0) == [Action("stop", "g", "a")]


def test_a_single_node_prepares_the_next_group_while_it_runs():
    queue = queue_of(Slots(preparing=2, ready=1, running=1, judging=1))
    queue.submit("g", ["g0"])
    queue.submit("h", ["h0"])
    assert begun(queue) == {"g0": "a", "h0": "a"}


@pytest.mark.parametrize(
    ("group_id", "session_ids"), [("g", ["b"]), ("h", ["a"]), ("h", ["b", "b"])]
)
def test_a_name_is_used_once(group_id, session_ids):
    queue = queue_of(ONE)
    queue.submit("g", ["a"])
    with pytest.raises(ValueError, match="is there already"):
        queue.submit(group_id, session_ids)


def test_a_retry_waits_longer_each_time_and_then_goes_before_younger_groups():
    queue = queue_of(ONE, retries=2)
    queue.submit("old", ["a"])
    queue.advance(0)
    assert queue.ended("a", 0.0, again=True) == "a~1"
    assert queue.due() == 1.0
    assert queue.advance(0.5) == []
    queue.submit("young", ["b", "c"])
    assert names(queue.advance(0.5), "prepare") == ["b"]
    queue.ended("b", 1.0)
    assert names(queue.advance(1.0), "prepare") == ["a~1"]
    assert queue.ended("a~1", 1.0, again=True) == "a~2"
    assert queue.due() == 3.0
    queue.advance(3.0)
    assert queue.ended("a~2", 3.0, again=True) is None


def test_retries_that_were_used_before_count():
    queue = queue_of(Slots(preparing=2, ready=0, running=2, judging=1), retries=2)
    queue.submit("g", ["a~1", "b~7"], retries_used={"a~1": 1})
    queue.advance(0.0)
    assert queue.ended("a~1", 0.0, again=True) == "a~2"
    assert queue.ended("b~7", 0.0, again=True) == "b~8"
    queue.advance(2.0)
    assert queue.ended("a~2", 2.0, again=True) is None
    assert queue.ended("b~8", 2.0, again=True) == "b~9"


@pytest.mark.parametrize(
    ("share", "training", "prepared"),
    [
        (1, ["t0", "t1"], ["e0", "t0", "t1"]),
        (2, ["t0", "t1"], ["e0", "e1", "t0"]),
        (1, [], ["e0", "e1", "e2"]),
    ],
)
def test_evaluation_has_its_share_and_all_slots_while_nothing_else_waits(share, training, prepared):
    queue = queue_of(Slots(preparing=3, ready=0, running=3, judging=1, evaluation=share))
    queue.submit("training", training)
    queue.submit("evaluation", ["e0", "e1", "e2"], evaluates=True)
    assert names(queue.advance(0), "prepare") == prepared


def test_a_higher_priority_goes_first_and_stops_no_session():
    queue = queue_of(ONE)
    queue.submit("running", ["r"])
    order = names(queue.advance(0), "prepare")
    for name, priority in {"low": 0, "usual": 50, "high": 100, "higher": 100}.items():
        queue.submit(name, [name], priority=priority)
    for _ in range(4):
        assert names(queue.advance(0), "stop") == []
        queue.ended(order[-1], 0)
        order += names(queue.advance(0), "prepare")
    assert order == ["r", "high", "higher", "usual", "low"]


class TestTwoNodes:
    @pytest.fixture
    def queue(self):
        slots = Slots(preparing=2, ready=1, running=2, judging=2)
        return queue_of(slots, slots, retries=1)

    def test_a_group_stays_on_the_node_with_the_most_free_slots(self, queue):
        queue.submit("g", ["g0", "g1", "g2"])
        queue.submit("h", ["h0"])
        queue.submit("i", ["i0", "i1"])
        assert begun(queue) == {"g0": "a", "h0": "b", "g1": "a", "i0": "b"}
        queue.ended("g0", 0.0)
        assert begun(queue) == {"g2": "a"}

    def test_a_node_without_a_free_slot_leaves_groups_to_others(self, queue):
        queue.submit("g", ["g0", "g1"])
        queue.submit("h", ["h0", "h1"])
        queue.submit("i", ["i0"])
        for session_id in begun(queue):
            queue.prepared(session_id)
        assert begun(queue) == {}  # `ready` has room on both
        queue.ended("h1", 0.0)
        assert begun(queue) == {"i0": "b"}

    def test_sessions_of_a_lost_node_are_retried_on_another_as_often_as_any_session(self, queue):
        queue.submit("g", ["g0", "g1", "g2"])
        assert begun(queue) == {"g0": "a", "g1": "a"}
        queue.remove_node("a")
        assert queue.ended("g0", 0.0, again=True) == "g0~1"
        queue.ended("g1", 0.0)
        assert begun(queue, 1.0) == {"g0~1": "b", "g2": "b"}
        queue.remove_node("b")
        assert queue.ended("g0~1", 1.0, again=True) is None
        assert queue.ended("g2", 1.0, again=True) == "g2~1"
        queue.add_node("b", ONE)
        assert begun(queue, 2.0) == {"g2~1": "b"}

    def test_a_session_that_ran_on_a_lost_node_does_not_wait_again(self, queue):
        queue.submit("g", ["g0"])
        assert begun(queue) == {"g0": "a"}
        queue.prepared("g0")
        assert names(queue.advance(0.0), "run") == ["g0"]
        queue.remove_node("a")
        assert not queue.requeue("g0")

    def test_a_late_event_of_a_lost_node_gives_its_session_no_slot_of_the_next_one(self, queue):
        queue.submit("g", ["g0"])
        assert begun(queue) == {"g0": "a"}
        queue.remove_node("a")
        queue.add_node("a", ONE)
        queue.prepared("g0")
        assert queue.advance(0.0) == []


def test_sessions_wait_without_a_node_and_their_deadline_acts():
    queue = queue_of()
    queue.submit("g", ["g0"], deadline=5.0)
    assert queue.advance(0.0) == []
    assert queue.due() == 5.0
    assert queue.advance(5.0) == [Action("close", "g")]


def test_the_deadline_of_a_group_that_has_ended_is_not_that_of_a_later_one_with_its_name():
    queue = queue_of(ONE)
    queue.submit("g", ["g0"], deadline=5.0)
    queue.advance(0.0)
    queue.ended("g0", 1.0)
    assert queue.advance(1.0) == [Action("close", "g")]
    queue.submit("g", ["g1"], deadline=50.0)
    assert queue.due() == 50.0
    assert names(queue.advance(5.0), "stop") == []


def test_the_place_of_a_group_that_has_ended_is_not_that_of_a_later_one_with_its_name():
    queue = queue_of()
    queue.submit("g", ["g0"], priority=1)
    queue.cancel("g")
    assert queue.advance(0.0) == [Action("close", "g")]
    queue.submit("older", ["o"])
    queue.submit("g", ["g1"])
    queue.add_node("here", ONE)
    assert names(queue.advance(0.0), "prepare") == ["o"]


class Unwalkable(dict):
    """A dict of which single keys can be looked up."""

    def __iter__(self):
        raise AssertionError("an event walks over all sessions")

    keys = values = items = __iter__


def test_an_event_looks_at_no_other_session():
    queue = queue_of(ONE, retries=1)
    queue._groups = Unwalkable()
    queue._attempts = Unwalkable()
    queue.submit("late", ["l"], deadline=1.0)
    queue.submit("g", ["a", "b"])
    assert names(queue.advance(0.0), "prepare") == ["l"]
    assert names(queue.advance(1.0), "stop") == ["l"]
    queue.ended("l", 1.0)
    assert names(queue.advance(1.0), "prepare") == ["a"]
    queue.ended("a", 1.0, again=True)
    assert queue.due() == 2.0
    assert names(queue.advance(1.0), "prepare") == ["b"]
    queue.ended("b", 2.0)
    assert names(queue.advance(2.0), "prepare") == ["a~1"]


def test_a_group_and_a_session_may_have_the_same_name():
    queue = queue_of(ONE, retries=1)
    queue.submit("a", ["a", "b~1"], deadline=5.0)
    queue.submit("a~1", ["c"])
    queue.advance(0.0)
    queue.ended("a", 0.0, again=True)
    assert queue.due() == 1.0
    queue.advance(1.0)
    assert queue.due() == 5.0


def test_a_thousand_sessions_take_little_more_than_their_slots_allow_and_old_groups_end_first():
    queue = queue_of(Slots(preparing=8, ready=8, running=32, judging=8))
    times = long_tailed(0)
    groups = []
    sessions = defaultdict(list)
    for group in range(125):
        groups.append([f"{group}-{index}" for index in range(8)])
    seen = simulate(queue, groups, times)
    for session_id, end in seen.ended.items():
        sessions[int(session_id.split("-")[0])].append(end)
    assert len(seen.ended) == 1000
    longest = max(times(session_id)[1] for session_id in seen.ended)
    least = seen.ran / 32
    assert least <= seen.end <= least + longest + 1  # Graham's bound for a list schedule
    for group in range(100):
        first_ends = [min(sessions[older]) for older in range(group + 1)]
        assert max(first_ends) < seen.closed[f"g{group + 16}"]
