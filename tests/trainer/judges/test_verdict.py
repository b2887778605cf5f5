import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.judges.verdict import Reward, UnjudgedError, parse_json, parse_text

FINITE = st.floats(-1e6, 1e6)
NO_NUMBERS = (
    "|nan|inf|-Infinity|1e999|1000001|-1e300|1_000|0x1|0,5|0.3 0.4|score: 0.3|½|\uff11|50%|."
)


@pytest.mark.parametrize("text", NO_NUMBERS.split("|"))
def test_what_is_not_one_finite_number_is_refused(text):
    with pytest.raises(UnjudgedError):
        parse_text(text)


@pytest.mark.parametrize(
    ("text", "reward"), [(" -3\n", -3.0), ("+.5", 0.5), ("1.", 1.0), ("1e-3", 0.001)]
)
def test_a_number_may_be_written_as_a_program_writes_it(text, reward):
    assert parse_text(text).reward == reward


NO_REWARDS = """[]
1
"1"
null
{}
{"reward": null}
{"reward": true}
{"reward": "1"}
{"reward": NaN}
{"reward": 1e999}
{"reward": 1, "reward": 0}
{"reward": 1, "part": {}}
{"reward": 1, "parts": []}
{"reward": 1, "parts": {"a": Infinity}}
{"reward": 1, "parts": {"a": false}}
{"reward": 1} {}
{"reward": 1, "reason": 3}"""
LONG = ["[" * 100_000, '{"reward": 1' + "0" * 400 + "}", '{"reward": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("text", [*NO_REWARDS.splitlines(), *LONG, '{"reward": 1}\n0.5'])
def test_json_that_is_no_reward_is_refused(text):
    with pytest.raises(UnjudgedError):
        parse_json(text)


@given(FINITE, st.dictionaries(st.text(), FINITE, max_size=5), st.text())
def test_a_reward_survives_its_json(reward, parts, reason):
    text = json.dumps({"reward": reward, "parts": parts, "reason": reason})
    assert parse_json(text) == Reward(reward=reward, parts=parts, reason=reason)


@given(FINITE)
def test_a_printed_number_is_read_as_printed(number):
    assert parse_text(f"{number!r}\n") == Reward(reward=number)


@given(st.text(max_size=200))
def test_no_text_gives_a_reward_that_is_not_finite_or_fails_otherwise(text):
    try:
        found = parse_text(text)
    except UnjudgedError:
        return
    assert math.isfinite(found.reward)
