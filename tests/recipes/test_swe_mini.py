"""The miniature: its files are what they say, and the real programs get the rewards that they earn
on it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import rolltap
from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.choose import make_runtime
from rolltap.trainer.checks import trial
from rolltap.trainer.checks.cheats import CHEATS
from tests.boxes import sandboxed
from tests.conftest import ROOT
from tests.deep import DEEP, cases
from tests.harness.play import installed
from tests.recipes.mini_agents import AGENTS, ATTEMPTS, ask, lead
from tests.scripted_engine import ScriptedEngine

MAKE = ROOT / "recipes" / "swe" / "mini" / "make.py"
BASE = "3fb9a65ae893c8749fba78377090211074d348ea"


def make(folder, **environment):
    subprocess.run([sys.executable, MAKE, folder], env={**os.environ, **environment}, check=True)
    return folder


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    return make(tmp_path_factory.mktemp("mini") / "made")


@pytest.fixture(scope="module")
def row(mini):
    (line,) = (mini / "tasks.jsonl").read_text().splitlines()
    return json.loads(line)


@pytest.fixture
def checkout(mini, tmp_path):
    return shutil.copytree(mini / "repositories" / "example__spans", tmp_path / "checkout")


def apply(patch: str, checkout: Path) -> None:
    subprocess.run(["git", "-C", checkout, "apply"], input=patch, text=True, check=True)


def outcomes(checkout: Path, report: Path) -> dict[str, bool]:
    """Return which tests pass, by the names that pytest gives them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append(f"--junit-xml={report}")
    subprocess.run(command, cwd=checkout, stdout=subprocess.DEVNULL)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        folder, file, *classes = case.attrib["classname"].split(".")
        name = "::".join([f"{folder}/{file}.py", *classes, case.attrib["name"]])
        found[name] = case.find("failure") is None
    return found


def test_it_comes_out_the_same_whatever_git_is_told(mini, row, tmp_path):
    (tmp_path / "gitconfig").write_text(
        "[user]\nname = Somebody\n[am]\nkeepcr = true\n[commit]\ngpgsign = true\n"
    )
    settings = {"TZ": "Asia/Tokyo", "GIT_AUTHOR_NAME": "Somebody"}
    settings["GIT_CONFIG_GLOBAL"] = str(tmp_path / "gitconfig")
    again = make(tmp_path / "again", **settings)
    assert (again / "tasks.jsonl").read_bytes() == (mini / "tasks.jsonl").read_bytes()
    assert row["base_commit"] == BASE


def test_the_tests_of_the_row_are_those_that_the_reference_patch_mends_and_keeps(
    row, checkout, tmp_path
):
    apply(row["test_patch"], checkout)
    before = outcomes(checkout, tmp_path / "before.xml")
    expected = dict.fromkeys(json.loads(row["FAIL_TO_PASS"]), False)
    expected |= dict.fromkeys(json.loads(row["PASS_TO_PASS"]), True)
    assert before == expected
    apply(row["patch"], checkout)
    assert outcomes(checkout, tmp_path / "after.xml") == dict.fromkeys(before, True)


def test_the_checkout_is_a_clone_that_has_the_fix_and_the_harbor_task_starts_before_it(mini, row):
    def log(checkout, *which):
        command = ["git", "-C", checkout, "log", "--format=%H %s", *which]
        return subprocess.check_output(command, text=True).splitlines()

    clone = mini / "repositories" / "example__spans"
    start = mini / "harbor" / row["instance_id"] / "environment" / "repo"
    assert log(clone)[0] == log(start)[0] == f"{BASE} Version 0.2"
    assert log(clone, "--all")[2:] == log(start, "--all")


def test_the_solution_of_the_harbor_task_is_the_reference_patch(mini, row, tmp_path):
    task = mini / "harbor" / row["instance_id"]
    start = shutil.copytree(task / "environment" / "repo", tmp_path / "start")
    subprocess.run(["bash", task / "solution" / "solve.sh"], cwd=start, check=True)
    assert subprocess.check_output(["git", "diff"], cwd=start, text=True) == row["patch"]


FORMS = {"harbor": "harbor", "row": "tasks.jsonl"}
WON = ["an exit with status 0 at the import", "JSON as the reward, by the agent's code"]
"""Cheats that win where the exit status of pytest decides alone, or the reward's file is not
written last."""


@sandboxed
@pytest.mark.parametrize("form", cases(FORMS, 0))
def test_no_cheat_wins_in_either_form_and_the_solution_earns_the_best(
    form, mini, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trial, "CHEATS", [cheat for cheat in CHEATS if DEEP or cheat.name in WON])
    (found,) = rolltap.check_tasks(
        mini / FORMS[form], repositories=mini / "repositories", runtime="sandbox", progress=False
    )
    assert (found.start, found.solution, found.weaknesses, found.wrong) == (0.0, 1.0, (), ())
    assert {*WON} <= {*found.tried}


EARNED = {"right": 1.0, "wrong": 0.0, "deletes-tests": 0.0, "breaks-others": 0.0}
"""Attempt -> its reward."""


DONE = {
    "right": (6, 26, ["spans/reading.py"]),
    "wrong": (4, 26, ["spans/reading.py"]),
    "deletes-tests": (0, 26, ["tests", "tests/test_reading.py", "tests/test_writing.py"]),
    "breaks-others": (6, 24, ["spans/reading.py", "spans/writing.py"]),
}
"""Attempt -> the tests that pass of those to mend and of those to keep, and what it changes."""


def attempted(task, attempt):
    return task.model_copy(update={"id": attempt, "instruction": ask(task.instruction, attempt)})


@pytest.fixture(scope="module")
def swe_task(mini):
    (task,) = rolltap.load_tasks(mini / "tasks.jsonl", repositories=mini / "repositories")
    return task


@pytest.fixture
def play(mini, tokenizer, tokenizer_folder, tmp_path):
    """Return a function that runs tasks in one rollout, and returns the run and the last row of
    each task."""

    def play(tasks, harness, where):
        installed(harness)
        runtime = make_runtime(where)
        try:
            runtime.check()
        except InputError as error:
            pytest.skip(str(error))
        files = {}
        for name in ("spans/reading.py", "spans/writing.py"):
            files[name] = (mini / "repositories" / "example__spans" / name).read_text()
        with ScriptedEngine(tokenizer, max_model_len=200_000) as engine:
            lead(engine, harness, files)
            run = rolltap.rollout(
                tasks,
                harness=harness,
                engine=engine.url,
                model=tokenizer_folder,
                out=tmp_path / "run",
                sessions=1,
                concurrency=2,
                timeout=1200.0,
                runtime=runtime,
                progress=False,
                recorder={"confdir": str(tmp_path / "mitmproxy")},
            )
        return run, {session.task_id: session for session in run.sessions()}

    return play


@pytest.mark.harness
@pytest.mark.parametrize(
    ("harness", "runtime"),
    cases([*((name, "sandbox") for name in AGENTS), ("pi", "process")], 0, -1),
)
def test_every_attempt_gets_the_reward_that_it_earns(harness, runtime, play, swe_task):
    tasks = [attempted(swe_task, attempt) for attempt in EARNED]
    # a judge without its module ends with status 1, as failing tests do
    command = ["python", "-S", "-m", "pytest", "--junit-xml", "{report}"]
    judge = swe_task.judge.model_copy(update={"command": command})
    broken = tasks[0].model_copy(update={"id": "without-pytest", "judge": judge})
    _, sessions = play([*tasks, broken], harness, runtime)
    for attempt, reward in EARNED.items():
        session = sessions[attempt]
        assert (session.status, session.reward) == ("completed", reward)
    session = sessions["without-pytest"]
    assert (session.status, session.reward) == ("infrastructure", None)  # it did not run
    for name, (mended, kept, changed) in DONE.items():
        parts = {"fail_to_pass": mended / 6, "pass_to_pass": kept / 26}
        assert sessions[name].parts == pytest.approx(parts)
        assert sessions[name].evidence["changed"] == changed


@pytest.mark.harness
def test_the_harbor_task_gives_the_same_rewards(play, mini):
    (task,) = rolltap.load_tasks(mini / "harbor")
    _, sessions = play([attempted(task, attempt) for attempt in EARNED], "pi", "sandbox")
    assert {name: session.reward for name, session in sessions.items()} == EARNED


FIX_TOLD = [
    "A sign counts for the whole",
    "a sign stands first",
    "test_a_sign_counts",
    "8d4a5e8",
    "v0.3",
]
"""Parts of the fix's message, code, test, id and of a later tag, which only the history has."""


def test_git_tells_the_fix_to_who_digs_in_the_clone(checkout):
    script = "\n".join(step.command for step in ATTEMPTS["digs"])
    how = {"cwd": checkout, "stdout": subprocess.PIPE, "text": True}
    said = subprocess.run(["bash", "-c", script], **how)
    assert [part for part in FIX_TOLD if part not in said.stdout] == []


@pytest.mark.harness
@pytest.mark.parametrize("runtime", cases(["process", "sandbox"]))
def test_an_agent_that_digs_in_its_copy_finds_the_history_without_the_fix(
    runtime, play, swe_task, tokenizer
):
    run, sessions = play([attempted(swe_task, "digs")], "pi", runtime)
    (calls,) = run.calls.values()
    said = tokenizer.decode(calls[-1].prompt_ids)
    assert said.count("<tool_response>") == len(ATTEMPTS["digs"])
    assert BASE in said
    assert "Read durations of several parts, and signs" in said
    assert [part for part in FIX_TOLD if part in said] == []
    assert sessions["digs"].reward == 0.0
