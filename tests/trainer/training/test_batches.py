"""The file with the sessions of the trained steps."""

import pytest

from rolltap.addons.errors import RunError
from rolltap.trainer.training.online import BATCHES, TrainedBatches


def test_the_sessions_of_a_step_are_found_by_the_next_attempt_in_their_order(tmp_path):
    TrainedBatches(tmp_path).add(3, [("b", 0), ("a", 2)])
    assert TrainedBatches(tmp_path).get(3) == [("b", 0), ("a", 2)]
    assert TrainedBatches(tmp_path).get(4) is None


@pytest.mark.parametrize("torn", [b'{"step": 4, "sess', b'{"step": 4, "sessions": ["\xc3', b"\x00\x00"])
def test_a_torn_line_is_as_if_it_had_not_been_written(tmp_path, torn):
    TrainedBatches(tmp_path).add(3, [("a", 0)])
    with (tmp_path / BATCHES).open("ab") as file:
        file.write(torn)
    batches = TrainedBatches(tmp_path)
    assert batches.get(4) is None
    batches.add(4, [("c", 1)])
    again = TrainedBatches(tmp_path)
    assert (again.get(3), again.get(4)) == ([("a", 0)], [("c", 1)])


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"step": 1, "sessions": ["a-0"]}', '{"step": 1}', '{"step": "x", "sessions": []}', "{"]
)
def test_a_damaged_line_is_named(tmp_path, line):
    TrainedBatches(tmp_path).add(3, [("a", 0)])
    with (tmp_path / BATCHES).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunError, match=r"batches\.jsonl, line 2 is damaged"):
        TrainedBatches(tmp_path)
