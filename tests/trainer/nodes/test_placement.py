"""Placement by itself: groups stay whole, slots bound what a node gets, and nothing is lost or run twice."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.store.records import Session
from rolltap.trainer.nodes.placement import Placement, deal, run_again


def placement(**nodes):
    made = Placement()
    for name, slots in nodes.items():
        made.join(name, slots)
    return made


def submit(made, group_id, sessions=4, **how):
    made.submit(group_id, [f"{group_id}-{index}" for index in range(sessions)], **how)


def given_to(made, *resting):
    return [(name, piece.group_id) for name, piece in made.advance(resting)]


def ended(session_id, status="completed"):
    return Session(session_id=session_id, status=status)


def test_a_group_goes_to_the_node_with_the_most_free_slots_as_a_whole():
    made = placement(small=4, large=8)
    for group_id in "abc":
        submit(made, group_id)
    assert given_to(made) == [("large", "a"), ("small", "b"), ("large", "c")]


def test_no_node_gets_more_while_its_slots_are_taken_and_a_slow_one_gets_few():
    made = placement(slow=4, quick=4)
    for group_id in "abcd":
        submit(made, group_id)
    assert given_to(made) == [("slow", "a"), ("quick", "b")]
    for index in range(4):
        made.ended("quick", ended(f"b-{index}"))
    assert given_to(made) == [("quick", "c")]
    made.ended("slow", ended("a-0"))
    assert given_to(made) == [("slow", "d")]


def test_a_session_that_its_node_may_retry_keeps_its_slot():
    made = placement(one=1)
    submit(made, "a", 1)
    submit(made, "b", 1)
    assert given_to(made) == [("one", "a")]
    made.ended("one", ended("a-0", "infrastructure"))
    assert given_to(made) == []
    made.ended("one", ended("a-0~1"))
    assert given_to(made) == [("one", "b")]


def test_groups_that_evaluate_go_first_then_those_of_a_higher_priority_then_the_older_ones():
    made = Placement()
    submit(made, "old", priority=1)
    submit(made, "new", priority=1)
    submit(made, "urgent", priority=2)
    submit(made, "held out", evaluates=True)
    made.join("node", 100)
    assert [group_id for _, group_id in given_to(made)] == ["held out", "urgent", "old", "new"]


def test_a_resting_node_gets_none_and_its_groups_stay_with_it():
    made = placement(silent=8, other=2)
    submit(made, "a")
    assert given_to(made, "silent") == [("other", "a")]
    submit(made, "b")
    assert given_to(made, "silent") == []
    assert given_to(made) == [("silent", "b")]


def test_what_a_lost_node_held_goes_to_others_at_its_old_place_in_the_order():
    made = placement(lost=4)
    submit(made, "a")
    assert given_to(made) == [("lost", "a")]
    submit(made, "b")
    [piece] = made.lost("lost")
    made.again(piece, run_again(piece.session_ids, [ended("a-0"), ended("a-1", "infrastructure")], [], retries=2))
    made.join("other", 100)
    assert [(node, *piece.session_ids) for node, piece in made.advance()] == [
        ("other", "a-1~1", "a-2", "a-3"),
        ("other", "b-0", "b-1", "b-2", "b-3"),
    ]


def test_a_node_never_holds_two_pieces_of_a_group():
    made = placement(one=8)
    made.join("two", 1)
    submit(made, "a")
    assert given_to(made) == [("one", "a")]
    submit(made, "a")  # what another node lost of it
    assert given_to(made, "two") == []
    assert given_to(made) == [("two", "a")]


def test_a_lost_session_is_not_retried_for_ever():
    attempts = [ended("a-0", "infrastructure"), ended("a-0~1", "cancelled"), ended("a-0~2", "infrastructure")]
    assert run_again(["a-0"], attempts[:2], ["a-0"], retries=2) == ["a-0~2"]
    assert run_again(["a-0~1"], attempts[:2], ["a-0"], retries=2) == ["a-0~2"]
    assert run_again(["a-0~2"], attempts, ["a-0"], retries=2) == []  # each loss of a node is one of its retries
    assert run_again(["a-0~2"], attempts, ["a-0~2"], retries=2) == ["a-0~3"]  # of a rerun that counts anew


def test_engines_are_dealt_to_the_nodes_that_each_group_has_one_prefix_cache():
    dealt = []
    for _ in range(4):
        dealt.append(deal(["a", "b"], dealt, 4))
    assert dealt == [["a"], ["b"], ["a"], ["b"]]
    assert deal(["a", "b", "c", "d"], [], 2) == ["a", "b"]
    assert deal(["http://one:8000", "http://two:8000"], [], 2, host="two") == ["http://two:8000"]
    assert deal(["a", "b", "c", "d"], [["a", "b"]], 2) == ["c", "d"]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_every_session_ends_once_whatever_nodes_come_and_go(groups, nodes, seed):
    made, over, random = Placement(), {}, Random(seed)
    for number, slots in enumerate(nodes):
        made.join(f"n{number}", slots)
    for number, sessions in enumerate(groups):
        submit(made, f"g{number}", sessions)
    holds: dict[str, list[tuple[str, list[str]]]] = {}
    joined = len(nodes)
    while True:
        for name, piece in made.advance():
            holds.setdefault(name, []).append((piece.group_id, list(piece.session_ids)))
        held = [(name, entry) for name, entries in holds.items() for entry in entries]
        if not held:
            break
        name, (group_id, left) = random.choice(held)
        if random.random() < 0.15:
            done = [ended(each) for each in over]
            for piece in made.lost(name):
                again = run_again(piece.session_ids, done, piece.session_ids, retries=2)
                if again:
                    made.again(piece, again)
            del holds[name]
            made.join(f"n{joined}", random.choice(nodes))
            joined += 1
            continue
        session_id = left.pop()
        assert session_id not in over
        over[session_id] = name
        made.ended(name, ended(session_id))
        if not left:
            holds[name].remove((group_id, left))
            made.closed(name, group_id)
    assert sorted(over) == sorted(f"g{n}-{index}" for n, sessions in enumerate(groups) for index in range(sessions))
    assert made.pieces() == []
    assert made.waiting() == 0
