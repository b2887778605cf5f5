"""A run that an earlier version recorded (schema 5) opens, resumes and exports as it did then.

`stored_run/run` has three tasks of two sessions: `right` was rewarded, `fails` ended with status 3,
and the rollout was killed while the first session of `waits` ran. `stored_run/exports` is what the
version that recorded it made of it, and `stored_run/training.json` what it wrote of a training with
`RECIPE`.
"""

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import rolltap
from rolltap.addons.store.records import LATER_COLUMNS
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.resume import Recorded, group_keys, interrupted_sessions
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.training.attempt import online_fingerprint, require_same_fingerprint
from rolltap.trainer.training.recipe import load_recipe
from tests.scripted_engine import Say
from tests.trainer.cli.program import run_rolltap

STORED = Path(__file__).with_name("stored_run")
EXPORTS = STORED / "exports"
ASK = (
    "import httpx; httpx.post('https://api.openai.com/v1/chat/completions', json={'messages': []},"
    " timeout=600)"
)

RECIPE = """
model = "/models/Qwen3-4B"
tasks = "tasks.jsonl"
harness = "harness.toml"
steps = 5
sessions = 4

[budget]
calls = 9

[lora]
r = 16
target_modules = "all-linear"

[grpo]
learning_rate = 1e-5
"""


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(STORED / "run", tmp_path / "run"))


def test_every_row_is_read_and_verified(run):
    report = json.loads(run_rolltap("verify", run, "--json").stdout)
    assert (report["verdict"], report["rows"]) == ("ok", {"calls": 9, "sessions": 4, "events": 20})


@pytest.mark.parametrize("target", ["atif", "messages"])
def test_its_exports_are_the_same(run, tmp_path, target):
    rolltap.Run(run).export(target, tmp_path / "out")
    names = {path.relative_to(EXPORTS / target) for path in (EXPORTS / target).rglob("*.json*")}
    assert names
    for name in names:
        [now] = (tmp_path / "out" / name.parent).glob(f"{name.stem}*")
        assert read_json(now) == read_json(EXPORTS / target / name), name


def test_its_dataset_is_the_same(run, tmp_path):
    rolltap.Run(run).export("parquet", tmp_path / "out")
    for path in (EXPORTS / "parquet").rglob("*.parquet"):
        now = pq.read_table(tmp_path / "out" / path.parent.name)
        later = [name for name in now.column_names if name in LATER_COLUMNS]
        assert all(now[name].null_count == len(now) for name in later)
        assert now.drop_columns(later).equals(pq.read_table(path)), path.parent.name


def test_its_traces_and_their_ledger_are_the_same(run, tmp_path):
    printed = run_rolltap("traces", run, "--json", "--ledger", tmp_path / "ledger").stdout
    assert [json.loads(line) for line in printed.splitlines()] == read_json(
        EXPORTS / "traces.jsonl"
    )
    assert read_json(tmp_path / "ledger") == read_json(EXPORTS / "ledger.json")


def test_only_what_is_missing_of_its_groups_is_run():
    keys = group_keys(STORED / "run")
    sessions = load_sessions(STORED / "run").values()
    recorded = Recorded([*sessions, *interrupted_sessions(STORED / "run")])
    missing = {}
    for name in ("right", "fails", "waits"):
        task = rolltap.Task(id=name, instruction="-", evaluate=["true"])
        group = recorded.group(task, keys[name], 2, further=False)
        missing[name] = recorded.missing(group).session_ids
    assert missing == {
        "right": [],
        "fails": [],
        "waits": ["waits-2dfec203.0-0~1", "waits-2dfec203.0-1"],
    }


def test_a_rollout_goes_on_with_its_groups_unless_a_part_of_their_key_changed(
    run, scripted_engine, tokenizer_folder, tmp_path
):
    scripted_engine.otherwise = lambda request: Say("Hello")
    task = {
        "id": "right",
        "instruction": "List the files.",
        "evaluate": ["sh", "-c", "cat answer.txt"],
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    harness = f"name = 'stored'\nprogram = '{sys.executable}'\nheadless = ['-c', {json.dumps(ASK)}]"
    (tmp_path / "stored.toml").write_text(harness)
    what = [tmp_path / "tasks.jsonl", "--harness", tmp_path / "stored.toml", "-n", 1]
    where = ["--out", run, "--engine", scripted_engine.url, "--model", tokenizer_folder]
    done = run_rolltap("rollout", *what, *where)
    (line,) = (line for line in done.stderr.splitlines() if "changed" in line)
    # the harness, the model and the judge are others here; the limits and all else are the same
    changed = set(line.rpartition(": ")[2].removesuffix(" changed").split(", "))
    assert {"harness", "model", "task"} <= changed
    assert changed <= {"harness", "model", "task", "program", "harness_version"}


def test_a_training_that_was_begun_goes_on(tmp_path):
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.toml")
    begun = online_fingerprint(
        recipe, rolltap.load_tasks(recipe.tasks), Harness.load(str(recipe.harness)), 0
    )
    require_same_fingerprint("the run", json.loads((STORED / "training.json").read_text()), begun)


def read_json(path: Path):
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [json.loads(line) for line in lines]
