"""The tables of the pages name what the code has, and nothing else."""

import inspect
import re
from typing import get_args

import numpy as np
import pytest
from trl import GRPOTrainer

import rolltap
from rolltap.addons.store.records import CallRole
from rolltap.trainer.boxes.environment import Proxy
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.traces.build import GroupReward, Strategy, TraceBatch
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, LeftOut
from rolltap.trainer.training.step.batch import KINDS
from rolltap.trainer.training.step.metrics import StepPart, batch_metrics, step_metrics
from tests.conftest import ROOT
from tests.readme.blocks import SITE


def section(page, heading):
    """The text below a heading, up to the next one."""
    text = (SITE / "pages" / page).read_text().partition(f"# {heading}\n")[2]
    assert text, f"{page} has no section {heading}"
    return re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]


def table(page, heading):
    """The names in the first column of a section's tables -> the cells after it."""
    found = {}
    for row in re.findall(r"^\| (.*`.*) \|$", section(page, heading), re.MULTILINE):
        first, *rest = row.split(" | ")
        for name in re.findall(r"`\[?(@?\w[\w/-]*)", first):
            found[name] = rest
    return found


def test_every_preset_has_its_facts():
    assert table("harnesses.md", "Harnesses").keys() == {*rolltap.Harness.names()}


def test_the_frameworks_and_their_versions():
    folder = ROOT / "tests" / "harness" / "frameworks"
    text = (ROOT / "recipes" / "environments.sh").read_text()
    for name in ("packages.txt", "requirements.txt"):
        text += (folder / name).read_text()
    text = re.sub(r"\[.*?\]", "", text)
    pinned = re.findall(r"(?<!\S)(\S+?)(?:==|@)(\d[\w.]*)", text)
    for name, cells in table("harnesses.md", "Frameworks and SDKs").items():
        assert (name, cells[0]) in pinned


def test_the_variables_of_a_session(tmp_path):
    (tmp_path / "ca.pem").touch()
    variables = Proxy("http://127.0.0.1:1", ca=tmp_path / "ca.pem").environment("s")
    assert table("harnesses.md", "Variables").keys() == variables.keys()


def test_the_runtimes():
    assert tuple(table("boxes.md", "Runtimes")) == get_args(
        RolloutConfig.model_fields["runtime"].annotation
    )


def test_the_strategies_and_the_reasons_of_the_ledger():
    named = table("traces.md", "Traces").keys()
    assert named == {*get_args(Strategy), *flat(LeftOut)} - {*get_args(CallRole)}


def flat(literal):
    """The values of a Literal, of those in it too."""
    values = []
    for each in get_args(literal):
        values += flat(each) if get_args(each) else [each]
    return values


def test_the_public_names_in_the_section_from_python():
    cells = table("python.md", "From Python")
    assert len(cells) > 5
    assert cells.keys() <= {*rolltap.__all__}
    [methods] = re.findall(r"^\| `Run` .*", section("python.md", "From Python"), re.MULTILINE)
    for name in re.findall(r"`(\w+)\(", methods):
        assert hasattr(rolltap.Run, name)


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_metrics_of_a_step(on_policy):
    page = (SITE / "pages" / "metrics.md").read_text()
    names = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)))
    known = re.compile("|".join(re.sub(r"[A-Z]+", ".+", re.escape(name)) for name in names))

    of_loss = re.findall(
        r'self\._metrics\[mode\]\["(.+?)"\]', inspect.getsource(GRPOTrainer._compute_loss)
    )
    assert len(of_loss) > 5
    values = np.ones((6, len(KINDS)))
    values[-1] = range(len(KINDS))
    part = StepPart(seconds=1.0, replayed=(2.0, 1.0), scored=[([0], values)])
    # the router's loss is refused
    part.of_loss.append(({name: [1.0] for name in of_loss if name != "aux_loss"}, 1))
    metrics = step_metrics([part], on_policy=on_policy, is_corrected=True, has_teacher=True)

    rewards = {
        session: GroupReward(
            group_id=group, reward=1.0, task_id="t", harness="codex", suspicions=("git_history",)
        )
        for session, group in (("a", "t-1.0.0"), ("b", "fork~t-1.0.0"))
    }
    batch = TraceBatch(rewards=rewards, ledger=Ledger(sampled=1, trained=1))
    batch.continued = {
        "codex": CachedPrompts(calls=1, prompt_tokens=2, known_tokens=2, cached_tokens=1)
    }
    metrics |= batch_metrics(batch, batch, {"t"})
    assert [name for name in metrics if not known.fullmatch(name)] == []
