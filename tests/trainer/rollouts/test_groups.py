from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.rollouts.resume import attempt_of, group_key, key_parts, next_attempt, place_of

IDS = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)


@given(IDS, st.integers(0, 20))
def test_an_attempt_has_the_place_of_the_first_and_a_number(session_id, number):
    name = session_id
    for _ in range(number):
        name = next_attempt(name)
    assert (place_of(name), attempt_of(name)) == (session_id, number)


def test_the_key_of_a_group_tells_its_parts_apart():
    values = [{"a": "b"}, {"ab": ""}, {"a": "c"}, {"b": "a"}, {"a": "b", "c": None}, {"a": ["b"]}]
    keys = [group_key(key_parts(each)) for each in values]
    assert len(set(keys)) == len(values)
    assert all(len(key) == 8 and int(key, 16) >= 0 for key in keys)
