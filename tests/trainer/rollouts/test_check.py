"""Checks before the first session: engines, judges, and tasks that the runtime can run."""

import subprocess

import pytest

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.rollouts import check
from rolltap.trainer.rollouts.check import check_engines, fit_tasks
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.tasks.task import Task
from tests.scripted_engine import ScriptedEngine


def test_an_engine_that_does_not_answer_or_has_no_window_is_an_error(scripted_engine):
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/models: no engine answers"):
        check_engines(f"{scripted_engine.url}, http://127.0.0.1:9", scripted_engine.root)
    scripted_engine.max_model_len = 0
    with pytest.raises(EngineError, match="has a context window of 0 tokens"):
        check_engines(scripted_engine.url, scripted_engine.root)


def test_another_model_weights_without_a_name_and_different_weights_are_named(scripted_engine, tokenizer, caplog):
    scripted_engine.weight_version = "1a2b3c4d.3.0"
    assert check_engines(scripted_engine.url, scripted_engine.root) == "1a2b3c4d.3.0"
    assert not caplog.messages
    scripted_engine.weight_version = None
    with ScriptedEngine(tokenizer) as other:
        assert check_engines(f"{scripted_engine.url},{other.url}", "org/model") == "default,unknown"
    named = ("the recorder's model is org/model", "does not tell which weights it serves", "serve different weights")
    assert [sum(words in line for line in caplog.messages) for words in named] == [2, 1, 1]


class Plain:
    warning = None
    check = box = image_digest = print

    def __init__(self, name, isolated):
        self.name = name
        self.isolated = isolated


class Images(Plain):
    copy_out = print


PROCESS, SANDBOX, CONTAINER = Plain("process", False), Plain("sandbox", True), Images("container", True)
MOUNTS = {"kind": "command", "command": ["x"], "mounts": {"/tests": "tests"}}
SEVERAL = {"kind": "several", "judges": [{"name": "a", "judge": MOUNTS}]}


def make_task(**fields):
    given = {"id": "t", "instruction": "Do it.", "source": "a.jsonl, line 3", **fields}
    return Task(**given) if "judge" in fields else Task(evaluate=["true"], **given)


@pytest.mark.parametrize(
    ("fields", "runtime", "message"),
    [
        ({"image": "a/b"}, SANDBOX, r"needs the image a/b, and the runtime sandbox has no images"),
        ({"image": "a/b"}, PROCESS, r"needs the image a/b, and the runtime process has no images"),
        ({}, CONTAINER, r"has no image, and the runtime container needs one: give 'image'"),
        ({"needs_network": "test.sh, line 3"}, SANDBOX, r"needs a network: test\.sh, line 3\. With .*process$"),
        ({"image": "a", "needs_network": "x"}, CONTAINER, r"needs a network: x\. With the .* its judge has no network"),
        ({"judge": MOUNTS, "needs_network": "x"}, SANDBOX, r"needs a network: x\. .*the downloads from the task$"),
        ({"judge": MOUNTS, "needs_network": "x"}, PROCESS, r"needs a network: x\. .*the downloads from the task$"),
        ({"judge": MOUNTS}, PROCESS, r"its judge needs absolute paths of its own, .* runtime process does not have"),
        ({"judge": SEVERAL}, PROCESS, r"its judge needs absolute paths of its own"),
    ],
)
def test_what_the_runtime_does_not_have_is_named_with_its_task(fields, runtime, message):
    with pytest.raises(InputError, match=rf"task 't' \(a\.jsonl, line 3\):? {message}"):
        fit_tasks([make_task(**fields)], runtime)


HARNESS = Harness(name="h", program="h", headless=["-p", "--prompt={instruction}"])


@pytest.mark.parametrize(("harness", "longest"), [(None, 131071), (HARNESS, 131071 - len("--prompt="))])
def test_an_instruction_that_is_no_argument_of_a_program_is_refused_and_the_other_tasks_are_run(
    harness, longest, caplog
):
    fitting = make_task(instruction="é" * (longest // 2) + "x" * (longest % 2))
    assert fit_tasks([fitting], PROCESS, harness) == [fitting]
    command_for = harness.command_for if harness else lambda instruction: ["-", instruction]
    subprocess.run(["true", *command_for(fitting.instruction)], check=True)
    large = make_task(id="large", instruction=fitting.instruction + "x")
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["true", *command_for(large.instruction)])
    assert fit_tasks([large, fitting], PROCESS, harness) == [fitting]
    (line,) = caplog.messages
    assert "task 'large' (a.jsonl, line 3): its instruction makes an argument of 131,073 bytes" in line
    with pytest.raises(InputError, match=r"'large' .*shorten it, or lay its text into the workspace"):
        fit_tasks([large], PROCESS, harness)


def test_of_many_tasks_those_that_do_not_fit_are_left_out_and_counted(caplog):
    bad = [make_task(id=f"b{number}", image="a/b") for number in range(2)]
    assert fit_tasks([bad[0], make_task(), bad[1]], SANDBOX) == [make_task()]
    (line,) = caplog.messages
    assert line.startswith("2 of 3 tasks are refused: 2 x task 'b0' (a.jsonl, line 3) needs the image a/b")
    with pytest.raises(InputError, match=r"2 of 2 tasks are refused: 2 x task 'b0'"):
        fit_tasks(bad, SANDBOX)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"workspace": "nope"}, "the workspace nope is not a folder"),
        ({"files": {"a": "nope"}}, "'files' names nope, which does not exist"),
        ({"judge": {"kind": "pytest", "tests": "nope"}}, r"'judge\.tests' names nope, which does not exist"),
        ({"judge": {**MOUNTS, "mounts": {"/t": "nope"}}}, r"'judge\.mounts' names nope, which does not exist"),
    ],
)
def test_a_path_that_is_not_there_is_named_before_anything_starts(fields, what):
    with pytest.raises(InputError, match=rf"task 't' \(a\.jsonl, line 3\): {what}"):
        fit_tasks([make_task(), make_task(**fields)], SANDBOX)


def test_a_log_parser_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'rolltap\[swe\]'"):
        fit_tasks([make_task(judge={"kind": "pytest", "log_parser": "parse_log_django"})], PROCESS)


def test_an_optional_image_is_used_where_the_runtime_has_images_and_what_it_has_is_left():
    task = make_task(image="python:3.13", image_optional=True)
    assert [fit_tasks([task], runtime)[0].image for runtime in (PROCESS, SANDBOX)] == [None, None]
    assert fit_tasks([task], CONTAINER) == [task]
    for fields, runtime in (({"needs_network": "x"}, PROCESS), ({"judge": MOUNTS}, SANDBOX)):
        assert fit_tasks([make_task(**fields)], runtime) == [make_task(**fields)]
