"""Checks before the first session: engines, judges, and tasks that the runtime can run."""

import asyncio
import subprocess

import pytest

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.boxes.containers.build import image_of
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.engine.weights import write_policy
from rolltap.trainer.rollouts import check
from rolltap.trainer.rollouts.check import build_images, check_engines, fit_tasks
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.tasks.task import Task
from tests.scripted_engine import ScriptedEngine


@pytest.fixture
def check_with(tmp_path):
    """Return a function that checks the engines of a recorder that has not started."""

    def check(engine, say=print, model="m"):
        return check_engines(Recorder(tmp_path, engine=engine, model=model), say)

    return check


def test_an_engine_that_does_not_answer_or_has_no_window_is_an_error(scripted_engine, check_with):
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/models: no engine answers"):
        check_with(f"{scripted_engine.url}, http://127.0.0.1:9")
    scripted_engine.max_model_len = 0
    with pytest.raises(EngineError, match="has a context window of 0 tokens: restart it"):
        check_with(scripted_engine.url)


def test_a_model_that_cannot_be_recorded_is_refused_before_an_engine_is_started_for_it(
    check_with, save_tokenizer, tokenizer_folder, tmp_path
):
    with pytest.raises(InputError, match="has no chat template"):
        check_with("http://127.0.0.1:9", model=save_tokenizer(tmp_path / "model", None))
    with pytest.raises(EngineError, match="no engine answers"):
        check_with("http://127.0.0.1:9", model=tokenizer_folder)


def test_a_path_that_does_not_exist_is_refused_with_the_models_that_the_engines_serve(
    scripted_engine, check_with
):
    served = f"the engine at {scripted_engine.url} serves {scripted_engine.root}"
    with pytest.raises(InputError, match=rf"there is no folder \./none: .*; {served}$"):
        check_with(f"http://127.0.0.1:9,{scripted_engine.url}", model="./none")


def test_what_engines_serve_is_said_and_other_weights_than_the_runs_policy_are_a_warning(
    scripted_engine, tmp_path, caplog, check_with
):
    said = []
    assert check_with(scripted_engine.url, said.append) == "default"
    assert not caplog.messages
    scripted_engine.weight_version = "1a2b3c4d.3.0"
    assert check_with(scripted_engine.url, said.append) == "1a2b3c4d.3.0"
    serves = f"the engine at {scripted_engine.url} serves {scripted_engine.root}: "
    published = "the weights 1a2b3c4d.3.0 (step 3 of the training 1a2b3c4d)"
    assert said == [serves + "its base weights", serves + published]
    assert f"samples by {published}, not by the base weights: `rolltap engine reset" in caplog.text
    caplog.clear()
    write_policy(tmp_path, None, "1a2b3c4d.3.0")
    check_with(scripted_engine.url, said.append)
    assert not caplog.messages


@pytest.mark.parametrize(("model", "version"), [("org/other", "default"), (None, None)])
def test_engines_of_different_models_or_weights_are_named(
    scripted_engine, tokenizer, check_with, caplog, model, version
):
    with ScriptedEngine(tokenizer) as other:
        other.root = model or other.root
        other.weight_version = version
        check_with(f"{scripted_engine.url},{other.url}")
    (warning,) = caplog.messages
    assert warning.startswith("the engines serve different weights (")
    assert f"{other.url}: {version or 'unknown'} of {other.root}" in warning


class Plain:
    warning = None
    programs_here = True
    check = show = box = image_digest = print

    def __init__(self, name, isolated):
        self.name = name
        self.isolated = isolated


class Images(Plain):
    copy_out = print


PROCESS = Plain("process", False)
SANDBOX = Plain("sandbox", True)
CONTAINER = Images("container", True)
MOUNTS = {"kind": "command", "command": ["x"], "mounts": {"/tests": "tests"}}
SEVERAL = {"kind": "several", "judges": [{"name": "a", "judge": MOUNTS}]}
ELSEWHERE = {**MOUNTS, "writable": ["/etc/x"]}
NO_PATHS = r"its judge needs absolute paths of its own"
NO_IMAGES = r"needs the image a/b, and the runtime {} has no images"
NETWORK = r"needs a network: x\. .*"


def make_task(**fields):
    given = {"id": "t", "instruction": "Do it.", "source": "a.jsonl, line 3", **fields}
    return Task(**given) if "judge" in fields else Task(evaluate=["true"], **given)


@pytest.mark.parametrize(
    ("fields", "runtime", "message"),
    [
        ({"image": "a/b"}, SANDBOX, NO_IMAGES.format("sandbox")),
        ({"image": "a/b"}, PROCESS, NO_IMAGES.format("process")),
        ({}, CONTAINER, r"has no image, and the runtime container needs one: give 'image'"),
        ({"needs_network": "x"}, SANDBOX, NETWORK + "use the runtime process$"),
        ({"image": "a", "needs_network": "x"}, CONTAINER, NETWORK + "name the hosts in .* 'allow'"),
        ({"judge": MOUNTS, "needs_network": "x"}, SANDBOX, NETWORK + "downloads from the task$"),
        ({"judge": MOUNTS, "needs_network": "x"}, PROCESS, NETWORK + "downloads from the task$"),
        ({"judge": MOUNTS}, PROCESS, f"{NO_PATHS}, .* runtime process does not have"),
        ({"judge": SEVERAL}, PROCESS, NO_PATHS),
        ({"workdir": "/usr/src/app"}, SANDBOX, "has /usr/src/app in its box, and a sandbox shows"),
        ({"judge": ELSEWHERE}, SANDBOX, "has /etc/x in its box, and a sandbox shows"),
    ],
)
def test_what_the_runtime_does_not_have_is_named_with_its_task(fields, runtime, message):
    with pytest.raises(InputError, match=rf"task 't' \(a\.jsonl, line 3\):? {message}"):
        fit_tasks([make_task(**fields)], runtime)


@pytest.mark.parametrize("command", [["make", "test"], ["sh", "judge.sh"], ["sh", "laid.sh"]])
def test_a_judge_whose_make_computes_its_targets_is_refused_without_paths(tmp_path, command):
    (tmp_path / "Makefile").write_text("$(shell ls): all\n")
    for script in ("judge.sh", "tests/laid.sh"):
        (tmp_path / script).parent.mkdir(exist_ok=True)
        (tmp_path / script).write_text("# make sure\ncd . && CC=gcc /usr/bin/make test\n")
    make = {"kind": "command", "command": command, "tests": tmp_path / "tests"}
    computes = r"'t' .*runs make, and Makefile computes names .* Set the judge's 'paths'"
    with pytest.raises(InputError, match=computes):
        fit_tasks([make_task(workspace=tmp_path, judge=make)], PROCESS)
    (tmp_path / "other.sh").write_text("# make sure\necho make\n")
    for fitting in ({"paths": ["*.c"]}, {"command": ["sh", "other.sh"]}):
        task = make_task(workspace=tmp_path, judge={**make, **fitting})
        assert fit_tasks([task], PROCESS) == [task]


HARNESS = Harness(name="h", program="h", headless=["-p", "--prompt={instruction}"])


@pytest.mark.parametrize(
    ("harness", "longest"), [(None, 131071), (HARNESS, 131071 - len("--prompt="))]
)
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
    assert "task 'large' (a.jsonl, line 3): its instruction makes an argument of 131,073" in line
    with pytest.raises(InputError, match=r"'large' .*shorten it, or lay its text into the"):
        fit_tasks([large], PROCESS, harness)


def test_of_many_tasks_those_that_do_not_fit_are_left_out_and_counted(caplog):
    bad = [make_task(id=f"b{number}", image="a/b") for number in range(2)]
    assert fit_tasks([bad[0], make_task(), bad[1]], SANDBOX) == [make_task()]
    (line,) = caplog.messages
    assert line.startswith(
        "2 refused of 3 tasks: 2 x task 'b0' (a.jsonl, line 3) needs the image a/b"
    )
    with pytest.raises(InputError, match=r"2 refused of 2 tasks: 2 x task 'b0'"):
        fit_tasks(bad, SANDBOX)


TESTS = {"kind": "pytest", "tests": "nope"}
NO_MOUNTS = {**MOUNTS, "mounts": {"/t": "nope"}}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"workspace": "nope"}, "the workspace nope is not a folder"),
        ({"files": {"a": "nope"}}, "'files' names nope, which does not exist"),
        ({"judge": TESTS}, r"'judge\.tests' names nope, which does not exist"),
        ({"judge": NO_MOUNTS}, r"'judge\.mounts' names nope, which does not exist"),
    ],
)
def test_a_path_that_is_not_there_is_named_before_anything_starts(fields, what):
    with pytest.raises(InputError, match=rf"task 't' \(a\.jsonl, line 3\): {what}"):
        fit_tasks([make_task(), make_task(**fields)], SANDBOX)


def test_a_log_parser_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install -e '\S+\[swe\]'"):
        fit_tasks([make_task(judge={"kind": "pytest", "log_parser": "parse_log_django"})], PROCESS)


def test_an_optional_image_is_used_where_the_runtime_has_images_and_what_it_has_is_left():
    task = make_task(image="python:3.13", image_optional=True)
    assert [fit_tasks([task], runtime)[0].image for runtime in (PROCESS, SANDBOX)] == [None, None]
    assert fit_tasks([task], CONTAINER) == [task]
    for fields, runtime in (({"needs_network": "x"}, PROCESS), ({"judge": MOUNTS}, SANDBOX)):
        assert fit_tasks([make_task(**fields)], runtime) == [make_task(**fields)]


class Builder(ContainerRuntime):
    """A runtime whose builds fail where the Dockerfile says so. It counts them, and those at the
    same time."""

    def __init__(self, build=True):
        super().__init__(build=build)
        self.built = []
        self.running = 0
        self.most = 0

    async def build(self, image, build, log):
        self.built.append((image, log))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if "fails" in (build.folder / "Dockerfile").read_text():
            raise InputError("its image cannot be built: exit 1")


@pytest.fixture
def to_build(tmp_path):
    """A function that returns a task with a Dockerfile of a text."""

    def to_build(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "Dockerfile").write_text(text)
        return make_task(id=name, build={"folder": tmp_path / name, "why": "line 2: RUN make"})

    return to_build


@pytest.mark.parametrize("runtime", [Builder(build=False), PROCESS, SANDBOX, CONTAINER])
def test_a_task_that_needs_a_build_is_refused_without_it_and_the_option_is_named(to_build, runtime):
    message = r"a/Dockerfile, line 2: RUN make: this needs an image to be built: use --build"
    with pytest.raises(InputError, match=message):
        fit_tasks([to_build("a", "FROM x")], runtime)


async def test_images_are_built_at_the_same_time_and_alike_ones_once(to_build, tmp_path):
    runtime = Builder()
    tasks = [to_build(name, f"FROM {name[0]}") for name in ("a1", "a2", "b", "c", "d")]
    tasks = fit_tasks(tasks, runtime)
    assert [task.image for task in tasks] == [image_of(task.build) for task in tasks]
    tasks.append(make_task(image="x"))
    assert await build_images(tasks, runtime, tmp_path, at_once=3) == tasks
    images, logs = zip(*runtime.built, strict=True)
    assert len(images) == len({*images}) == len({*logs}) == 4
    assert runtime.most == 3


async def test_a_build_that_fails_costs_its_tasks_and_no_other(to_build, tmp_path, caplog):
    runtime = Builder()
    bad, good = fit_tasks([to_build("bad", "RUN fails"), to_build("good", "FROM x")], runtime)
    assert await build_images([bad, good], runtime, tmp_path, at_once=1) == [good]
    assert "1 refused of 2 tasks: 1 x task 'bad' (a.jsonl, line 3): its image" in caplog.text
    with pytest.raises(InputError, match=r"task 'bad' .*: its image cannot be built: exit 1"):
        await build_images([bad], runtime, tmp_path, at_once=1)
