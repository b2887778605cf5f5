"""A used-up budget ends a program at once."""

import pytest

from rolltap.trainer.tasks.task import Task
from rolltap.types import Budget
from tests.deep import cases
from tests.harness.play import installed, shell

pytestmark = pytest.mark.harness

TASK = Task(id="work", instruction="Go on working.", evaluate=["true"])
MOST_REFUSALS = 2
"""Of a session. A program that retries has more: Codex 6 after status 403, mini-swe-agent 10 in
minutes after 400."""


@pytest.mark.parametrize(
    ("name", "limited"),
    cases(
        [
            ("claude-code", "calls"),
            ("codex", "calls"),
            ("claude-code", "sampled_tokens"),
            ("mini-swe-agent", "calls"),
            ("qwen-code", "calls"),
            ("codex", "sampled_tokens"),
        ],
        0,
        1,
        2,
    ),
)
async def test_a_program_ends_when_its_budget_is_used_up(
    name, limited, lead, play, scripted_engine
):
    harness = installed(name)
    said = shell(harness, "echo hi")
    lead(lambda prompt: said)
    turn = len(scripted_engine.ids(said)) + 1
    most = {"calls": 2, "sampled_tokens": 2 * turn}[limited]
    played = await play(harness, TASK, budget=Budget(**{limited: most}))
    assert (played.session.status, played.session.exit_status) != ("timeout", None), played.log
    assert [call.status for call in played.calls] == ["completed"] * 2
    assert played.sampled == 2 * turn
    assert 1 <= len(played.of("budget")) <= MOST_REFUSALS, played.log
    assert played.of("fault") == []
    assert limited != "calls" or "budget" in played.log
