"""A training takes its sessions from this machine, from Ray's nodes and from a service, whatever
else its recipe has.

`TABLE` has every combination of the keys that a recipe may have, and `SHORT` some, in which each
key comes with each other. Sessions, recorder, nodes and service are real. The engine has a script
for calls, and is a folder for weights.
"""

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from rolltap.trainer.cli import main
from rolltap.trainer.engine import engines
from rolltap.trainer.engine.admin import EngineAdmin, Sampled
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from rolltap.trainer.training.report import METRICS, read_metrics
from rolltap.trainer.training.steps import BATCHES
from tests import tiny_checkpoints
from tests.deep import DEEP
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.engine.answering import serving as serving_engine
from tests.trainer.nodes import conftest as fleet
from tests.trainer.runs.views.test_score import Scoring
from tests.trainer.service.served import program, serving
from tests.trainer.training.stand_ins import FolderEngine, Points
from tests.trainer.training.test_loop import DRAW

temporary = fleet.temporary
head = fleet.head
cluster = fleet.cluster

STEPS = 2
HARNESS = """
import json, urllib.request
messages = []
for turn in ("Hello", "Go on"):
    messages.append({"role": "user", "content": turn})
    request = urllib.request.Request(
        "https://api.openai.com/v1/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
open("answer.txt", "w").write(messages[-1]["content"])
"""
"""A program that makes two model calls, and writes the last reply to answer.txt."""
RECIPE = f"""
model = "model"
tasks = "tasks.jsonl"
harness = "harness.toml"
steps = {STEPS}
groups_per_step = 2
sessions = 2
concurrency = 2
publish = "lora"
max_difference = 1000.0
"""
TABLES = """
[lora]
r = 2
target_modules = "all-linear"

[grpo]
learning_rate = 1e-2
use_cpu = true
"""


class Combination(NamedTuple):
    """Where the sessions run, and what a recipe asks for: true for what it has."""

    nodes: str
    is_ahead: bool
    forks: bool
    evaluates: bool
    has_teacher: bool

    @property
    def name(self) -> str:
        """Its name among the tests."""
        asked = [key for key, value in self._asdict().items() if value is True]
        return "-".join([self.nodes, *asked])

    def recipe(self, where: dict[str, str]) -> str:
        """Return the text of the recipe. `where` has the addresses of nodes and teacher."""
        text = RECIPE
        tables = TABLES
        if self.nodes != "local":
            text += f"{self.nodes} = {json.dumps(where[self.nodes])}\n"
        if self.is_ahead:
            text += "max_staleness = 1\n"
        if self.has_teacher:
            text += f"teacher = 'big'\nteacher_engine = {json.dumps(where['teacher'])}\n"
        if self.forks:
            tables += "[forks]\nsessions = 2\n"
        if self.evaluates:
            tables += "[evaluation]\ntasks = 'held_out.jsonl'\nsessions = 1\n"
        return text + tables


TABLE = []
for values in product(("local", "ray", "service"), *[(False, True)] * 4):
    combination = Combination(*values)
    if not (combination.forks and combination.has_teacher):  # a recipe with both is refused
        TABLE.append(combination)
SHORT = [
    Combination("local", is_ahead=True, forks=True, evaluates=True, has_teacher=False),
    Combination("ray", is_ahead=True, forks=True, evaluates=True, has_teacher=False),
    Combination("service", is_ahead=True, forks=True, evaluates=True, has_teacher=False),
    Combination("local", is_ahead=True, forks=False, evaluates=True, has_teacher=True),
]
"""Each key with each other one."""


class Engine(FolderEngine):
    """Has weights, and samples anything."""

    def sample(self, model: str, prompt_ids: Sequence[int], tokens: int) -> Sampled:
        return Sampled([2] * tokens, [-1.0] * tokens)


@pytest.fixture(scope="module")
def scripted(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = lambda request: Say("good.")
        yield engine


@pytest.fixture
def teacher(tmp_path, tokenizer):
    with serving_engine(Scoring(tmp_path / "big", tokenizer)) as engine:
        yield engine.url


@pytest.fixture
def ray(cluster):
    cluster.add(2)
    return cluster.address


@pytest.fixture
def service(folder, scripted):
    tasks = [*lines(folder / "tasks.jsonl"), *lines(folder / "held_out.jsonl")]
    where = (folder / "out" / "run", scripted.url, folder / "model", folder / "harness.toml")
    with serving(*where, tasks=tasks) as service:
        yield service.url


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(*tasks: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(task)}\n" for task in tasks)


@pytest.fixture
def folder(tmp_path, tokenizer_folder, scripted, monkeypatch):
    """A folder with all that the recipes name."""
    tiny_checkpoints.qwen3(tmp_path / "model", tokenizer_folder, tied=False)
    chance = {"kind": "command", "command": [sys.executable, "-c", DRAW], "result": "number"}
    free = {"id": "free", "instruction": "go", "judge": chance}
    flat = {"id": "flat", "instruction": "go", "evaluate": ["false"]}
    held_out = {"id": "held-out", "instruction": "go", "evaluate": ["true"]}
    (tmp_path / "tasks.jsonl").write_text(lines_of(flat, free))
    (tmp_path / "held_out.jsonl").write_text(lines_of(held_out))
    program(tmp_path, HARNESS)
    Engine.folder = tmp_path / "engine"
    Engine.model = tmp_path / "model"
    Engine.points = Points(None)

    def admin(url):
        if url == scripted.url:
            return Engine(url)
        return EngineAdmin(url)

    monkeypatch.setattr(engines, "EngineAdmin", admin)
    return tmp_path


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("row", TABLE if DEEP else SHORT, ids=lambda row: row.name)
def test_a_training_takes_what_its_recipe_asks_for_from_all_nodes(row, folder, scripted, request):
    run = folder / "out" / "run"
    where = {}
    if row.has_teacher:
        where["teacher"] = request.getfixturevalue("teacher")
    if row.nodes != "local":
        where[row.nodes] = request.getfixturevalue(row.nodes)
    (folder / "recipe.toml").write_text(row.recipe(where))
    arguments = ["train", str(folder / "recipe.toml"), "--out", str(run), "--engine", scripted.url]
    ended = CliRunner().invoke(main.rolltap, arguments, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output

    taken = [name for batch in lines(run / BATCHES) for name, _ in batch["sessions"]]
    sessions = load_sessions(run)
    assert sorted(taken) == sorted(sessions)
    assert {session.status for session in sessions.values()} == {"completed"}
    forks = [name for name in taken if name.startswith("fork~flat-")]
    assert len(forks) == 2 * STEPS * row.forks
    assert len(taken) - len(forks) == 4 * STEPS
    metrics = read_metrics(run / METRICS)
    steps = [line for line in metrics if "loss" in line]
    assert len(steps) == STEPS
    assert sum(line["tokens_trained"] for line in steps) > 0
    assert ("age/max" in steps[-1]) == row.is_ahead
    evaluated = sorted(line["eval/step"] for line in metrics if "eval/step" in line)
    assert evaluated == list(range(STEPS + 1)) * row.evaluates
    if row.evaluates:
        held_out = load_sessions(run / EVALUATION)
        versions = sorted(session.policy_version for session in held_out.values())
        assert [version.split(".")[1] for version in versions] == ["0", "1", "2"]
        for calls in RecordedCalls(run / EVALUATION).values():
            assert {json.loads(call.sampling)["temperature"] for call in calls} == {0.0}
