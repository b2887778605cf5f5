import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.engine.admin import Load
from rolltap.trainer.rollouts.scheduler import AT_ONCE, POLL_SECONDS, QUEUE_POLLS, STALE_SECONDS, Admission

IDLE = Load(running=8, waiting=0, cache=0.3, preemptions=0)


def poll(admission, load, running=100, ended=0, now=0.0):
    return admission.poll(load, running=running, ended=ended, now=now)


def test_it_grows_by_a_quarter_each_time_as_many_have_ended_as_may_run():
    admission = Admission(100)
    assert [poll(admission, IDLE, ended=ended) for ended in (0, 24, 25, 26, 56, 57)] == [25, 25, 31, 31, 31, 39]


def test_it_is_never_over_the_most_nor_below_one():
    admission = Admission(10)
    assert max(poll(admission, IDLE, ended=100 * number) for number in range(20)) == 10
    full = Load(running=8, waiting=80, cache=1.0, preemptions=0)
    assert min(poll(admission, full._replace(preemptions=number), running=0) for number in range(20)) == 1


@pytest.mark.parametrize(
    ("cache", "limit"), [(0.59, 62), (0.6, 50), (0.79, 50), (0.8, 45), (0.89, 45), (0.9, 31), (1.0, 28)]
)
def test_a_full_cache_trims_softly_and_then_hard(cache, limit):
    admission = Admission(200)
    poll(admission, IDLE._replace(cache=cache), running=40, ended=50)
    assert int(admission.limit) == limit


def test_a_queue_trims_after_some_polls_and_holds_growth_back():
    admission = Admission(100)
    queued = Load(running=8, waiting=5, cache=0.3, preemptions=0)
    seen = [poll(admission, queued, ended=100 * number) for number in range(2 * QUEUE_POLLS)]
    assert seen == [*[25] * (QUEUE_POLLS - 1), *[22] * QUEUE_POLLS, 20]
    assert poll(admission, queued._replace(waiting=4), ended=10_000) == 25


def test_preemptions_trim_and_trim_more_when_they_go_on():
    admission = Admission(400)
    assert [poll(admission, IDLE._replace(preemptions=n)) for n in (7, 7, 8, 9, 9)] == [100, 100, 80, 40, 40]


def test_without_a_word_of_the_engines_it_does_not_grow():
    admission = Admission(100)
    poll(admission, IDLE)
    assert poll(admission, None, running=20, ended=50, now=STALE_SECONDS) == 22
    assert poll(admission, None, running=20, ended=50, now=STALE_SECONDS + 1) == 20
    assert poll(admission, IDLE, running=20, ended=50, now=STALE_SECONDS + 2) == 22


@given(
    st.lists(st.builds(Load, st.integers(0, 300), st.integers(0, 300), st.floats(0, 1), st.integers(0, 3))),
    st.integers(1, 300),
)
def test_at_most_a_tenth_is_admitted_at_once(loads, most):
    admission, running = Admission(most), 0
    for number, load in enumerate(loads):
        allowed = poll(admission, load, running=running, ended=10 * number, now=POLL_SECONDS * number)
        assert 1 <= allowed <= max(running + 1, running + AT_ONCE * most)
        running = max(running, allowed)
