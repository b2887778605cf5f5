import itertools
import shutil
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.task import CommandJudge, Limits, PytestJudge, Task
from tests.trainer.tasks.checkouts import make_repository


def make_task(**fields):
    return Task(**{"id": "t", "instruction": "Do it.", "evaluate": ["true"], **fields})


SHELL = {"kind": "command", "command": ["true"]}
LARGE = "x" * 200_000
NUMBERS = (1e308, float("inf"), float("nan"), 0, 1e-9)
UNHOLDABLE = [*itertools.product(("cpus", "memory_gib", "disk_gib"), NUMBERS)]


def judged(judge, **fields):
    """Return the fields of a task with a judge in place of a command."""
    return {"evaluate": [], "judge": {**judge, **fields}}


def weighted(weight):
    several = [{"name": "a", "weight": weight, "judge": SHELL}]
    return judged({"kind": "several", "judges": several})


def test_a_task_has_either_a_command_or_a_judge():
    assert make_task().effective_judge == CommandJudge(command=["true"])
    assert make_task(evaluate=[], judge={"kind": "pytest"}).effective_judge == PytestJudge()
    with pytest.raises(
        InputError, match="'evaluate' is missing: give the judge's command, or a table 'judge'"
    ):
        make_task(evaluate=[])
    with pytest.raises(
        InputError, match="'evaluate' and 'judge' are both given: remove 'evaluate'"
    ):
        make_task(judge={"kind": "pytest"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"commit": "1234567"}, "'commit' is '1234567' without a checkout: give 'workspace'"),
        ({"commit": "HEAD", "workspace": "."}, "commit"),
        ({"files": {"../x": "a"}}, "give a path inside the workspace"),
        ({"files": {"/x": "a"}}, "give a path inside the workspace"),
        ({"files": {".git/hooks/x": "a"}}, "give a path inside the workspace"),
        ({"id": ".."}, "id"),
        ({"id": "x" * 201}, "id"),
        ({"limits": {"memory": 1}}, "memory"),
        ({"workdir": "/"}, "workdir"),
        ({"image": "a", "build": {"folder": "x"}}, "'image' and 'build' are both given: remove"),
        ({"instruction": 3}, "task 't': 'instruction' is 3: Input should be a valid string"),
        ({"instuction": "Do it."}, "task 't': unknown key 'instuction'"),
        ({"evaluate": "true"}, r"'evaluate' is 'true': give a list of words: \["),
        (judged({"kind": "bash"}), "'judge.kind' is 'bash': write one of command, pytest"),
        ({"source": "rows, line 3", "workspace": 4}, "rows, line 3: 'workspace' is 4: Input is"),
    ],
)
def test_a_mistake_is_refused_in_one_line(fields, message):
    with pytest.raises(InputError, match=message) as refused:
        make_task(**fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[({"limits": {key: value}}, f"'limits.{key}' is") for key, value in UNHOLDABLE],
        ({"limits": {"processes": 1 << 30}}, "'limits.processes' is"),
        ({"timeout": float("inf")}, "'timeout' is inf"),
        ({"timeout": 1e300}, "'timeout' is 1e"),
        (judged(SHELL, timeout=float("inf")), "'judge.timeout' is inf"),
        *[(weighted(weight), "weight' is") for weight in (float("inf"), 1e308, 5e-324)],
        (
            {"instruction": "a\0b"},
            "'instruction' is .* NUL character, which no program can be given",
        ),
        ({"instruction": "a\ud800"}, "'instruction' is .* unicode string"),
        ({"evaluate": ["true", "\0"]}, "'evaluate.1' is .* NUL"),
        ({"evaluate": ["true", LARGE]}, "'evaluate.1' is .* it has 200,001 bytes, and Linux takes"),
        ({"evaluate": ["true"] + ["x" * 100_000] * 20}, "'evaluate' is .* lay them into files"),
        ({"env": {"A=B": "c"}}, "'env.A=B"),
        ({"env": {"": "c"}}, "'env"),
        ({"env": {"-v": "c"}}, "'env"),
        ({"env": {"A": LARGE}}, "'env' is .* Linux takes 131,072"),
        ({"env": {"A": "\0"}}, "'env' is .* NUL"),
        (judged(SHELL, env={"A=B": "c"}), "'judge.env.A=B"),
    ],
)
def test_what_no_machine_holds_and_no_program_can_be_given_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        make_task(**fields)


def test_missing_fields_are_named_and_a_text_is_a_path():
    with pytest.raises(InputError, match="task '': 'id' is missing; 'instruction' is missing"):
        Task(evaluate=["true"])
    assert make_task(workspace="start").workspace == Path("start")


def relink(folder):
    (folder / "link").unlink()
    (folder / "link").symlink_to("sub")


CHANGES = {
    "a mode": lambda folder: (folder / "sub" / "a").chmod(0o755),
    "a text": lambda folder: (folder / "sub" / "a").write_text("b"),
    "a file": lambda folder: (folder / "sub" / "new").touch(),
    "a link": relink,
}


@pytest.fixture
def make_folder(tmp_path):
    def make_folder(name):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "a").write_text("a")
        (folder / "link").symlink_to("sub/a")
        return folder

    return make_folder


def digest(folder, **fields):
    """Return the digest of a task that names a folder wherever a task can."""
    how = judged(SHELL, tests=folder, mounts={"/tests": folder})
    how |= {"workspace": folder, "build": {"folder": folder}, **fields}
    return make_task(**how).digest()


def test_a_digest_is_of_what_the_task_asks_not_of_where_it_lies(make_folder):
    first = make_folder("first")
    second = make_folder("second")
    assert digest(first, source="here") == digest(second, source="there")
    assert digest(first, timeout=3) != digest(first)
    assert digest(first, build=None) != digest(first)
    assert digest(first, build={"folder": second, "timeout": 3, "why": "x"}) == digest(first)
    assert make_task().digest() == make_task(**judged(SHELL)).digest()
    shutil.rmtree(second)
    with pytest.raises(InputError, match=r"cannot read .*second"):
        digest(second)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_folder_changes_the_digest(make_folder, change):
    folder = make_folder("first")
    before = digest(folder)
    change(folder)
    assert digest(folder) != before


def test_a_checkout_counts_by_its_commit(tmp_path):
    base = make_repository(tmp_path / "repository")
    shutil.copytree(tmp_path / "repository", tmp_path / "other")
    (tmp_path / "other" / "code.py").write_text("changed")
    tasks = [
        make_task(workspace=tmp_path / name, commit=base)
        for name in ("repository", "other", "nowhere")
    ]
    assert len({task.digest() for task in tasks}) == 1
    changed = [make_task(workspace=tmp_path / name).digest() for name in ("repository", "other")]
    assert changed[0] != changed[1]


def test_a_box_that_isolates_has_limits_where_a_task_sets_none():
    assert Limits().of_isolated() == Limits(memory_gib=8, processes=1024, disk_gib=20)
    own = Limits(cpus=2, memory_gib=64, processes=3)
    assert own.of_isolated() == own.model_copy(update={"disk_gib": 20})
