"""A checkout that is prepared while the session runs."""

from dataclasses import replace

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.judges import checkout, layout
from rolltap.trainer.judges.judge import judge, prepare_ahead
from tests.trainer.judges.sessions import Left, command, shell


@pytest.fixture
def made(monkeypatch):
    """The folders of the checkouts that were laid out."""
    made = []
    lay_out = layout.lay_out

    async def laid(job, spec):
        found = await lay_out(job, spec)
        made.append(found[0])
        return found

    for module in (layout, checkout):
        monkeypatch.setattr(module, "lay_out", laid)
    return made


@pytest.fixture
def left(tmp_path):
    tests = "def test_a():\n    assert open('a.txt').read() == 'new'\n"
    start = {"a.txt": "old", "c.txt": "old", "test_a.py": tests}
    return Left(tmp_path, start, SandboxRuntime())


@pytest.mark.parametrize(
    ("spec", "checkouts"),
    [
        (shell("test $(cat ?.txt) = newnew"), 1),
        # a command that names pytest is judged by its report if there is one on the start: by a
        # second checkout
        (command("pytest", "-q", "test_a.py"), 2),
    ],
)
async def test_it_is_prepared_before_the_agent_has_ended_and_is_the_one_that_judges(
    left, made, spec, checkouts
):
    job = left.job(spec)
    ahead = prepare_ahead(job)
    folder, _ = await ahead._laid
    left.do({"a.txt": "new", "b.txt": "new", "c.txt": None})
    judged = await judge(replace(job, ahead=ahead))
    assert judged.reward == 1.0, judged
    assert made[0] == folder
    assert len(made) == checkouts
    assert not folder.exists()


async def test_only_the_first_who_asks_gets_it(left):
    left.do({"b.txt": "new"})
    job = left.job(shell("test -e b.txt"))
    job = replace(job, ahead=prepare_ahead(job))
    assert [(await judge(job)).reward for _ in range(2)] == [1.0, 1.0]


async def test_why_one_cannot_be_prepared_is_said_by_the_judge_and_nothing_is_left(left):
    patch = "--- a/none\n+++ b/none\n@@ -1 +1 @@\n-a\n+b\n"
    left.do({"a.txt": "new"})
    why = await left.is_unjudged({"kind": "pytest", "test_patch": patch})
    assert "test_patch does not fit its start" in why
    await prepare_ahead(left.job(shell("true"))).close()  # while it is laid out
    assert not [*left.workspace.parent.glob("judge-*")]


async def test_a_judge_in_a_box_with_hosts_needs_a_recorder(left):
    message = r"its judge may reach pypi\.org .* only the recorder of a rollout"
    with pytest.raises(InputError, match=message):
        await left.judge(shell("true", allow=["pypi.org"]))
    await left.earns(1.0, shell("true", allow=[]))


def test_none_is_prepared_where_the_agent_could_reach_it(tmp_path):
    assert prepare_ahead(Left(tmp_path, {}).job(shell("true"))) is None
