"""No actions of an agent's own make a session of it, which has a completed call, a fault of the
machine."""

import asyncio
import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from rolltap.trainer.rollouts import mitmdump
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions
from tests.deep import DEEP, examples
from tests.trainer.rollouts.contexts import context_of, run_groups

DESCRIPTORS = 420
"""Limit of the recorder's open files: the agents can use them up."""
AGENT = Path(__file__).with_name("hostile_agent.py")
CALLS = [
    "call",
    "hang_up",
    "half_sent",
    "flood",
    "malformed",
    "odd_text",
    "odd_grammar",
    "too_long",
    "side_question",
]
OTHERS = [
    "listing",
    "end",
    "other_session",
    "odd_files",
    "no_workspace",
    "no_home",
    "closed_workspace",
]
LAST = ["kill_itself", "kill_group", "odd_status"]
PLANS = st.tuples(
    st.lists(st.sampled_from(CALLS + OTHERS), max_size=6),
    st.lists(st.sampled_from(LAST), max_size=1),
).map(lambda parts: [*parts[0], "call", *parts[1]])


@pytest.fixture(scope="module")
def recorder(engine, tmp_path_factory, tokenizer_folder):
    program = tmp_path_factory.mktemp("bin") / "mitmdump"
    program.write_text(
        f'#!/bin/sh\nexec prlimit --nofile={DESCRIPTORS} {mitmdump.program()} "$@"\n'
    )
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mitmdump, "program", lambda: str(program))
        with Recorder(
            tmp_path_factory.mktemp("run"), engine=engine.url, model=tokenizer_folder
        ) as recorder:
            yield recorder


@pytest.fixture(scope="module")
def rewards(recorder, tmp_path_factory):
    """Return a function that runs a session for each list of actions. It returns their statuses and
    rewards."""
    numbers = itertools.count()
    harness = Harness(
        name="agent", version="1", program=sys.executable, headless=[str(AGENT), "{instruction}"]
    )
    context = context_of(recorder, tmp_path_factory.mktemp("work"), harness)

    def rewards(plans):
        tasks = [
            Task(id=f"t{next(numbers)}", instruction=json.dumps(plan), evaluate=["false"])
            for plan in plans
        ]
        groups = [Group(task, task.id, [f"{task.id}-0"]) for task in tasks]
        asyncio.run(run_groups(groups, context))
        rows = load_sessions(recorder.path)
        ended = [rows[f"{task.id}-0"] for task in tasks]
        return [
            (row.status, row.reward, row.error, *plan)
            for row, plan in zip(ended, plans, strict=True)
        ]

    return rewards


def voided(outcomes):
    """Return the outcomes that are no verdict of the judge, who gives 0 to everything."""
    return [
        outcome
        for outcome in outcomes
        if outcome[0] not in ("completed", "failed") or outcome[1] != 0
    ]


def test_no_action_voids_a_reward(rewards):
    assert voided(rewards([[name, "call"] for name in CALLS + OTHERS + LAST])) == []


@examples(60 if DEEP else 3, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(st.lists(PLANS, min_size=4, max_size=4))
def test_no_sequence_of_actions_voids_a_reward(rewards, plans):
    assert voided(rewards(plans)) == []
