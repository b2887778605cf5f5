import json
import math

import numpy as np
import pytest
import torch

from rolltap.addons.errors import RunError
from rolltap.trainer.training.report import append_metrics, cut_metrics, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_line_is_one_object_with_its_step_and_null_for_what_json_lacks(path):
    values = {"loss": math.nan, "ratio/max": math.inf, "kl": None, "entropy": np.float32(0.5), "lr": torch.tensor(2.0)}
    append_metrics(path, 3, values)
    append_metrics(path, 4, {"tokens": 7, "note": "late"})
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert first == {"step": 3, "loss": None, "ratio/max": None, "kl": None, "entropy": 0.5, "lr": 2.0}
    assert second == {"step": 4, "tokens": 7, "note": "late"}
    assert read_metrics(path) == [first, second]


def test_a_run_without_metrics_has_no_lines(path):
    cut_metrics(path, 0)
    assert read_metrics(path) == []
    assert not path.exists()


def test_a_line_that_is_being_written_is_not_read(path):
    append_metrics(path, 1, {})
    with path.open("a") as file:
        file.write('{"step": 2, "re')
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize("torn", [b'{"step": 4', b'{"step": 4, "note": "\xc3'])
@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_lines_after_the_checkpoint_and_half_a_line_are_cut(path, step, kept, torn):
    for taken in (1, 2, 3):
        append_metrics(path, taken, {"reward": taken / 3})
    with path.open("ab") as file:
        file.write(torn)
    cut_metrics(path, step)
    append_metrics(path, step + 1, {})
    assert [line["step"] for line in read_metrics(path)] == [*kept, step + 1]


@pytest.mark.parametrize("line", ["step 2", '{"loss": 1}', '[{"step": 1}]', '{"step": "2"}', "null"])
def test_a_line_that_is_no_steps_is_named(path, line):
    append_metrics(path, 1, {})
    with path.open("a") as file:
        file.write(f"{line}\n")
    for read in (read_metrics, lambda path: cut_metrics(path, 1)):
        with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is not a step's metrics"):
            read(path)
