import math
from collections import Counter, defaultdict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.queue import Action, SessionQueue, Slots
from tests.trainer.rollouts.simulated import long_tailed, simulate


def queue_of(slots, **settings):
    """Return a queue with one node."""
    queue = SessionQueue(**settings)
    queue.add_node("here", slots)
    return queue


ACTIVE = {"prepare": "preparing", "run": "running", "judge": "judging"}


def names(actions, kind):
    return [action.session_id or action.group_id for action in actions if action.kind == kind]


SLOTS = st.builds(Slots, *[st.integers(low, 3) for low in (1, 0, 1, 1, 1)])


class Rollout(RuleBasedStateMachine):
    """Sessions in any order: prepared, run, judged, retried, cancelled, late, and killed with the
    process or a node."""

    @initialize(slots=SLOTS, retries=st.integers(0, 2))
    def start(self, slots, retries):
        self.nodes = {"a": slots}
        self.resting = set()
        self.retries, self.now = retries, 0.0
        self.groups = {}  # group -> places that have not ended
        self.finished, self.old = set(), []
        self.next = {}  # place -> id of the attempt that a restart begins, of those that were begun
        self.begin()

    def begin(self):
        self.queue = SessionQueue(self.retries, 1.0)
        for name, slots in self.nodes.items():
            self.queue.add_node(name, slots)
        self.resting = set()
        self.phases = {}  # session -> phase, of those that were given out
        self.on = {}  # session -> its node, unless the node is lost
        self.stopped, self.begun = set(), Counter()
        self.spared = set()  # sessions that lost a node before they began to run
        for group_id, places in self.groups.items():
            self.queue.submit(group_id, [self.next.get(place, place) for place in sorted(places)])

    def act(self):
        for kind, group_id, session_id, node in self.queue.advance(self.now):
            if kind == "close":
                assert not self.groups.pop(group_id)
            elif kind == "stop":
                assert session_id in self.phases
                assert session_id not in self.stopped
                self.stopped.add(session_id)
            else:
                before = {"prepare": None, "run": "ready", "judge": "ran"}[kind]
                assert self.phases.get(session_id) == before
                assert before is None or self.on[session_id] == node
                assert session_id not in self.stopped
                assert SessionName.parse(session_id).place in self.groups[group_id]
                assert session_id not in self.old
                assert node in self.nodes
                self.begun[session_id, kind] += 1
                self.next[SessionName.parse(session_id).place] = str(
                    SessionName.parse(session_id).next
                )
                self.phases[session_id] = ACTIVE[kind]
                self.on[session_id] = node

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
        (self.resting.add if rests else self.resting.discard)(name)
        self.queue.rest_node(name, rests)
        self.act()

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
        self.queue.submit(group_id, places, deadline=self.now + wait, **how)
        self.act()

    def some(self, data, phase):
        return data.draw(
            st.sampled_from(sorted(name for name, each in self.phases.items() if each == phase))
        )

    @precondition(lambda self: "preparing" in self.phases.values())
    @rule(data=st.data())
    def prepared(self, data):
        session_id = self.some(data, "preparing")
        if session_id in self.on:  # an event of a lost node changes nothing
            self.phases[session_id] = "ready"
        self.queue.prepared(session_id)
        self.act()

    @precondition(lambda self: "running" in self.phases.values())
    @rule(data=st.data())
    def ran(self, data):
        session_id = self.some(data, "running")
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
            self.finish(session_id)
        else:
            assert SessionName.parse(further).place == SessionName.parse(session_id).place
        self.stopped.discard(session_id)
        self.act()

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
        for kind in ACTIVE:
            del self.begun[session_id, kind]
        self.act()

    @rule()
    def no_other_session_waits_again(self):
        for session_id in {*self.phases} - {*self.unbegun()}:
            assert not self.queue.requeue(session_id)

    def finish(self, session_id):
        self.finished.add(SessionName.parse(session_id).place)
        for places in self.groups.values():
            places.discard(SessionName.parse(session_id).place)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def a_late_event_changes_nothing(self, data):
        late, before = data.draw(st.sampled_from(self.old)), self.queue.counts.copy()
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
        self.forget_waiting(self.groups[group_id])
        self.act()
        active = {
            name
            for name in self.phases
            if SessionName.parse(name).place in self.groups.get(group_id, ())
        }
        assert active <= self.stopped

    def forget_waiting(self, places):
        active = {SessionName.parse(name).place for name in self.phases}
        for place in [place for place in places if place not in active]:
            self.finish(place)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.now += seconds
        over = [name for name, group in self.queue._groups.items() if group.deadline <= self.now]
        for group_id in over:
            self.forget_waiting(self.groups[group_id])
        self.act()

    @rule()
    def the_process_is_killed_and_started_again(self):
        self.old += self.phases
        self.begin()
        self.act()

    @invariant()
    def slots_are_used_once_and_none_is_idle(self):
        if not hasattr(self, "queue"):
            return
        counts = Counter(self.phases.values())
        assert {phase: self.queue.counts[phase] for phase in counts} == counts
        assert set(self.begun.values()) <= {1}
        for name, slots in self.nodes.items():
            self.require_busy(name, slots)

    def require_busy(self, name, slots):
        on_node = {n: phase for n, phase in self.phases.items() if self.on.get(n) == name}
        counts = Counter(on_node.values())
        assert +self.queue.node_counts(name) == counts
        assert counts["preparing"] <= slots.preparing
        assert counts["judging"] <= slots.judging
        assert counts["running"] <= slots.running
        waits = defaultdict(list)
        for session_id, phase in on_node.items():
            if session_id not in self.stopped:
                waits[phase].append(session_id)
        assert not waits["ran"] or counts["judging"] == slots.judging
        held = counts["ran"] >= max(1, slots.running)
        assert not waits["ready"] or held or counts["running"] >= slots.running
        ahead = counts["preparing"] + counts["ready"]
        may_run = 0 if held else slots.running
        full = (
            counts["preparing"] == slots.preparing
            or ahead >= max(0, may_run - counts["running"]) + slots.ready
        )
        has_free = len(self.nodes) == 1 or ahead + counts["running"] < slots.running
        takes_more = has_free and name not in self.resting
        for group in self.queue._groups.values():
            waiting = [
                each for each in group.unended if self.queue._attempts[each].phase == "waiting"
            ]
            assert (
                full
                or not waiting
                or not (group.node == name or (group.node is None and takes_more))
            )

    @invariant()
    def a_group_is_on_one_node(self):
        places = {
            place: group_id
            for group_id, group in getattr(self, "groups", {}).items()
            for place in group
        }
        nodes = defaultdict(set)
        for session_id, node in getattr(self, "on", {}).items():
            nodes[places[SessionName.parse(session_id).place]].add(node)
        assert all(len(each) == 1 for each in nodes.values())

    def teardown(self):
        if not hasattr(self, "queue"):
            return
        self.queue.add_node("last", Slots(1, 0, 1, 1))
        self.nodes["last"] = Slots(1, 0, 1, 1)
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


def test_a_judge_holds_no_slot_of_those_that_run():
    queue = queue_of(Slots(preparing=2, ready=0, running=1, judging=1))
    queue.submit("g", ["a", "b"])
    assert names(queue.advance(0), "prepare") == ["a"]
    queue.prepared("a")
    assert names(queue.advance(0), "run") == ["a"]
    queue.ran("a")
    assert queue.advance(0) == [
        Action("judge", "g", "a", "here"),
        Action("prepare", "g", "b", "here"),
    ]


def test_prepared_sessions_wait_in_a_buffer_of_bounded_size():
    queue = queue_of(Slots(preparing=4, ready=2, running=1, judging=1))
    queue.submit("g", list("abcde"))
    assert names(queue.advance(0), "prepare") == ["a", "b", "c"]
    for session_id in "cba":
        queue.prepared(session_id)
    assert names(queue.advance(0), "run") == ["a"]
    assert queue.counts["ready"] == 2


def test_no_more_are_prepared_while_slow_judges_hold_new_ones_back():
    queue = queue_of(Slots(preparing=8, ready=4, running=8, judging=1))
    queue.submit("g", [f"s-{number}" for number in range(200)])
    for _ in range(60):
        for action in queue.advance(0):
            {"prepare": queue.prepared, "run": queue.ran, "judge": str}[action.kind](
                action.session_id
            )
    assert queue.counts["ready"] <= 4 + 8


def test_a_name_is_used_once():
    queue = queue_of(Slots(preparing=1, ready=0, running=1, judging=1))
    queue.submit("g", ["a"])
    for group_id, session_ids in (("g", ["b"]), ("h", ["a"]), ("h", ["b", "b"])):
        with pytest.raises(ValueError, match="is there already"):
            queue.submit(group_id, session_ids)


def test_sessions_that_wait_for_a_judge_hold_back_new_ones():
    queue = queue_of(Slots(preparing=1, ready=0, running=1, judging=1))
    queue.submit("g", list("abcd"))
    for session_id in "abc":
        queue.advance(0)
        queue.prepared(session_id)
        queue.advance(0)
        queue.ran(session_id)
    queue.advance(0)  # a is judged, b and c wait
    queue.prepared("d")
    assert names(queue.advance(0), "run") == []
    queue.ended("a", 0)
    assert names(queue.advance(0), "judge") == ["b"]


def test_a_retry_waits_longer_each_time_and_then_goes_before_younger_groups():
    queue = queue_of(Slots(preparing=1, ready=0, running=1, judging=1), retries=2, pause=1.0)
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
    ("evaluation", "prepared"), [(1, ["e0", "t0", "t1"]), (2, ["e0", "e1", "t0"])]
)
def test_evaluation_has_its_share_while_training_waits(evaluation, prepared):
    queue = queue_of(Slots(preparing=3, ready=0, running=3, judging=1, evaluation=evaluation))
    queue.submit("training", ["t0", "t1"])
    queue.submit("evaluation", ["e0", "e1"], evaluates=True)
    assert names(queue.advance(0), "prepare") == prepared


def test_evaluation_has_all_slots_while_nothing_else_waits():
    queue = queue_of(Slots(preparing=3, ready=0, running=3, judging=1, evaluation=1))
    queue.submit("evaluation", ["e0", "e1", "e2"], evaluates=True)
    assert names(queue.advance(0), "prepare") == ["e0", "e1", "e2"]


def test_a_higher_priority_goes_first_and_stops_no_session():
    queue = queue_of(Slots(preparing=1, ready=0, running=1, judging=1))
    queue.submit("running", ["r"])
    assert names(queue.advance(0), "prepare") == ["r"]
    for name, priority in (("low", 0), ("usual", 50), ("high", 100), ("higher", 100)):
        queue.submit(name, [name], priority=priority)
    order = ["r"]
    for _ in range(4):
        assert names(queue.advance(0), "stop") == []
        queue.ended(order[-1], 0)
        order += names(queue.advance(0), "prepare")
    assert order == ["r", "high", "higher", "usual", "low"]


def two_nodes(**settings):
    queue = SessionQueue(**settings)
    for name in ("a", "b"):
        queue.add_node(name, Slots(preparing=2, ready=1, running=2, judging=2))
    return queue


def prepared_on(queue, now=0.0):
    """Return session -> node of those that are prepared now."""
    return {act.session_id: act.node for act in queue.advance(now) if act.kind == "prepare"}


def test_a_group_stays_on_the_node_with_the_most_free_slots():
    queue = two_nodes()
    queue.submit("g", ["g0", "g1", "g2"])
    queue.submit("h", ["h0"])
    queue.submit("i", ["i0", "i1"])
    assert prepared_on(queue) == {"g0": "a", "h0": "b", "g1": "a", "i0": "b"}
    queue.ended("g0", 0.0)
    assert prepared_on(queue) == {"g2": "a"}


def test_a_node_without_a_free_slot_leaves_groups_to_others():
    queue = two_nodes()
    queue.submit("g", [f"g{number}" for number in range(2)])
    queue.submit("h", [f"h{number}" for number in range(2)])
    queue.submit("i", ["i0"])
    for session_id in prepared_on(queue):
        queue.prepared(session_id)
    assert prepared_on(queue) == {}  # `ready` has room on both
    queue.ended("h1", 0.0)
    assert prepared_on(queue) == {"i0": "b"}


def test_a_single_node_prepares_the_next_group_while_it_runs():
    queue = queue_of(Slots(preparing=2, ready=1, running=1, judging=1))
    queue.submit("g", ["g0"])
    queue.submit("h", ["h0"])
    assert prepared_on(queue) == {"g0": "here", "h0": "here"}


def test_sessions_of_a_lost_node_are_retried_on_another_as_often_as_any_session():
    queue = two_nodes(retries=1)
    queue.submit("g", ["g0", "g1", "g2"])
    assert prepared_on(queue) == {"g0": "a", "g1": "a"}
    queue.remove_node("a")
    assert queue.ended("g0", 0.0, again=True) == "g0~1"
    queue.ended("g1", 0.0)
    assert prepared_on(queue, 1.0) == {"g0~1": "b", "g2": "b"}
    queue.remove_node("b")
    assert queue.ended("g0~1", 1.0, again=True) is None
    assert queue.ended("g2", 1.0, again=True) == "g2~1"
    queue.add_node("b", Slots(1, 0, 1, 1))
    assert prepared_on(queue, 2.0) == {"g2~1": "b"}


def test_a_late_event_of_a_lost_node_gives_its_session_no_slot_of_the_next_one():
    queue = two_nodes()
    queue.submit("g", ["g0"])
    assert prepared_on(queue) == {"g0": "a"}
    queue.remove_node("a")
    queue.add_node("a", Slots(1, 0, 1, 1))
    queue.prepared("g0")
    assert queue.advance(0.0) == []


def test_sessions_wait_without_a_node_and_their_deadline_acts():
    queue = SessionQueue()
    queue.submit("g", ["g0"], deadline=5.0)
    assert queue.advance(0.0) == []
    assert queue.due() == 5.0
    assert queue.advance(5.0) == [Action("close", "g")]


class Unwalkable(dict):
    """A dict of which single keys can be looked up."""

    def __iter__(self):
        raise AssertionError("an event walks over all sessions")

    keys = values = items = __iter__


def test_an_event_looks_at_no_other_session():
    queue = queue_of(Slots(preparing=1, ready=0, running=1, judging=1), retries=1)
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
    queue = queue_of(Slots(preparing=1, ready=0, running=1, judging=1), retries=1)
    queue.submit("a", ["a", "b~1"], deadline=5.0)
    queue.submit("a~1", ["c"])
    queue.advance(0.0)
    queue.ended("a", 0.0, again=True)
    assert queue.due() == 1.0
    queue.advance(1.0)
    assert queue.due() == 5.0


def test_a_thousand_sessions_with_long_tails_take_little_more_than_their_slots_allow_and_old_groups_end_first():
    slots = Slots(preparing=8, ready=8, running=32, judging=8)
    groups = [[f"{group}-{index}" for index in range(8)] for group in range(125)]
    seen = simulate(queue_of(slots), groups, long_tailed(0))
    assert seen.ended.keys() == {session_id for group in groups for session_id in group}
    longest = max(long_tailed(0)(session_id)[1] for session_id in seen.ended)
    assert (
        seen.ran / 32 <= seen.end <= seen.ran / 32 + longest + 1
    )  # Graham's bound for a list schedule
    begun = [min(seen.ended[session_id] for session_id in group) for group in groups]
    assert all(max(begun[: group + 1]) < seen.closed[f"g{group + 16}"] for group in range(100))
