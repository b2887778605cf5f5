"""The line that ends a command: what a person may do next."""

import pytest

from rolltap.trainer.cli.main import said_when_stopped
from rolltap.trainer.cli.options import next_line


def test_the_next_command_can_be_pasted():
    assert next_line("view", "runs/my first") == "next: rolltap view 'runs/my first'"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "r.toml", "--out", "a b"], "; the same command goes on: rolltap train r.toml --out 'a b'"),
        (["rollout", "t.jsonl"], "; the same command goes on: rolltap rollout t.jsonl"),
        (["record", "--", "true"], "; committed calls stay in the run"),
        (["view", "runs/first"], ""),
        ([], ""),
    ],
)
def test_a_command_that_a_signal_stopped_says_how_it_goes_on(arguments, said):
    assert said_when_stopped(arguments) == f"stopped by a signal{said}"
