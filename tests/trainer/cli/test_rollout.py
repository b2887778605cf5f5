"""`rolltap rollout`."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.tasks.content import content_digest
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.boxes import copy_programs, imported, require_podman
from tests.deep import cases
from tests.scripted_engine import Say
from tests.trainer.cli.program import ASK, ASK_WITH_TOOLS, HELLO, NO_CALL, ROLLTAP, run_rolltap
from tests.trainer.tasks.test_harbor import write_task


@pytest.fixture
def tasks(tmp_path):
    script = "(cat answer.txt || echo 0) > $ROLLTAP_REWARD_FILE"
    judge = {"kind": "command", "command": ["sh", "-c", script], "result": "number"}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "t", "instruction": "Say it.", "judge": judge}))
    return path


@pytest.fixture
def preset(tmp_path):
    """Return a function that writes the preset of a command, and returns the option for it."""

    def preset(program, *headless):
        path = tmp_path / "harness.toml"
        path.write_text(
            'name = "x"\nversion = "1"\n'
            f"program = {json.dumps(program)}\nheadless = {json.dumps(headless)}\n"
        )
        return "--harness", path

    return preset


def test_rollout_records_every_session_and_prints_the_summary_as_json(
    options, tmp_path, tasks, preset
):
    answers = ASK.replace("print(", "open('answer.txt', 'w').write(")
    harness = preset(sys.executable, "-c", answers)
    ended = run_rolltap("rollout", tasks, *harness, "-n", 3, "--recorders", 2, *options, "--json")
    assert ended.returncode == 0, ended.stderr
    assert "tasks not tried with cheats: t: run" in ended.stderr
    assert f"the engine at {options[3]} serves {options[5]}: its base weights\n" in ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["sessions"] == {"failed": 3}
    assert summary["calls"] == {"completed": 3}
    assert summary["steps"][0]["mean_reward"] == 0.5
    assert summary["ledger"]["sampled"] == summary["ledger"]["trained"] > 0
    sessions = load_sessions(tmp_path / "run")
    assert len({session.group_id for session in sessions.values()}) == 1
    assert set(sessions) == set(RecordedCalls(tmp_path / "run"))


def test_rollout_says_which_files_of_the_judge_sessions_changed_and_what_may_come_next(
    options, tasks, preset
):
    plants = ASK.replace("print(", "open('conftest.py', 'w').write(")
    harness = preset(sys.executable, "-c", plants)
    said = run_rolltap("rollout", tasks, *harness, "-n", 2, *options).stderr
    assert "2 sessions changed files of the judge, which it did not take: conftest.py (2)" in said
    assert f"next: rolltap view {options[1]}\n" in said


ASK_OF_SYSTEM = f"""
import json, urllib.request
request = urllib.request.Request(
    "https://api.openai.com/v1/chat/completions",
    json.dumps({HELLO!r}).encode(),
    {{"content-type": "application/json"}},
)
reply = json.load(urllib.request.urlopen(request))
open("answer.txt", "w").write(reply["choices"][0]["message"]["content"])
"""
"""A program for an image that has the Python of this machine's system."""


def test_rollout_builds_the_images_of_harbor_tasks_and_a_build_that_fails_costs_its_task(
    options, tmp_path, preset
):
    require_podman()
    copy_programs(tmp_path / "base", "sh", "sleep", "cat", "cp", "mkdir")
    judge = "#!/bin/sh\ncat /made && cat Dockerfile && cp answer.txt /logs/verifier/reward.txt\n"
    with imported(tmp_path / "base", ["podman"], "ENV PATH=/programs") as base:
        for name, line in {"good": "RUN echo built > /made", "bad": "RUN exit 3"}.items():
            dockerfile = f"FROM {base}\n{line}\nCOPY . /app\nWORKDIR /app\n"
            write_task(tmp_path / "tasks" / name, dockerfile=dockerfile, test=judge)
        arguments = ["rollout", tmp_path / "tasks", *options, "-n", 2, "--runtime", "container"]
        arguments += preset("/usr/bin/python3", "-c", ASK_OF_SYSTEM)
        refused = run_rolltap(*arguments)
        assert refused.returncode == 1
        assert "line 2: RUN" in refused.stderr
        assert "use --build with --runtime container" in refused.stderr
        built = run_rolltap(
            *arguments, "--build", "--container-engine", "podman", "--tools", "/usr"
        )
        assert "1 refused of 2 tasks: 1 x task 'bad'" in built.stderr
        digest = content_digest(tmp_path / "tasks" / "good" / "environment")
        image = f"localhost/rolltap-build:{digest}"
        inspect = ["podman", "image", "inspect", "--format", "sha256:{{.Id}}", image]
        found = subprocess.run(inspect, capture_output=True, text=True, check=True)
        sessions = list(load_sessions(tmp_path / "run").values())
        assert len(sessions) == 2
        for session in sessions:
            assert session.task_id == "good"
            assert session.status == "completed", built.stderr
            assert session.reward == 0.5
            assert session.image_digest == found.stdout.strip()
        logs = [log.read_text() for log in (tmp_path / "run" / "logs").glob("build-*.log")]
        assert any("echo built" in log for log in logs)
        remove = ["podman", "image", "rm", "--force", image]
        subprocess.run(remove, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("command", "answered", "words"),
    cases(
        [
            ([sys.executable, "-c", ASK], 0, ["answered 500: its log says why"]),
            ([sys.executable, "-c", ASK], 1, ["answered 500: its log says why"]),
            (["true"], 0, ["(2 infrastructure)", *NO_CALL]),
        ],
        *(1, 2),
    ),
)
def test_sessions_without_a_reward_are_counted_with_what_to_try_and_all_of_them_are_status_1(
    options, scripted_engine, tasks, preset, command, answered, words
):
    scripted_engine.otherwise = None
    scripted_engine.replies.extend([Say("0.5")] * answered)
    how = ("--set", "rolltap_patience=0", "-n", 2, "--concurrency", 1, "--retries", 0)
    ended = run_rolltap("rollout", tasks, *preset(*command), *options, *how)
    assert ended.returncode == (0 if answered else 1)
    failed = 2 - answered
    for said in (f"{failed} of 2 sessions have no reward", f"  {failed} of them: ", *words):
        assert said in ended.stderr


@pytest.mark.parametrize(
    "number", cases([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
)  # test_main has each
def test_stopping_it_leaves_no_process_and_a_readable_run(options, tmp_path, tasks, preset, number):
    os.mkfifo(tmp_path / "started")
    harness = preset("sh", "-c", f"sleep 600 & echo {tmp_path} > {tmp_path}/started; wait")
    process = subprocess.Popen(
        [ROLLTAP, "rollout", tasks, *harness, "-n", "1", *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # background jobs ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    (tmp_path / "started").read_text()
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    for each in psutil.process_iter(["cmdline"]):
        assert str(tmp_path) not in " ".join(each.info["cmdline"] or ())
    assert list(read_rows(tmp_path / "run", "calls")) == []


def test_a_rollout_of_a_model_whose_calls_cannot_be_read_ends_at_the_first_call_with_tools(
    unreadable, tmp_path, tasks, preset
):
    line = ["rollout", tasks, *preset(sys.executable, "-c", ASK_WITH_TOOLS), *unreadable]
    ended = run_rolltap(*line, "-n", 4)
    assert ended.returncode == 2
    assert ended.stderr.count("cannot be read") == 2  # at the start, and at the end
    assert "rolltap_tool_parser: hermes, qwen-xml" in ended.stderr
    assert "Traceback" not in ended.stderr
    sessions = load_sessions(tmp_path / "run").values()
    assert {session.status for session in sessions} == {"cancelled"}
    assert any("cannot be read" in session.error for session in sessions)

    line[line.index("--out") + 1] = tmp_path / "chosen"
    chosen = run_rolltap(*line, "--set", "rolltap_renderer=default", "-n", 1, "--json")
    assert json.loads(chosen.stdout)["calls"] == {"completed": 1}
