import json
import re
import shutil

import pytest
from datasets import Dataset, DatasetDict

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.sources import load_tasks
from tests.trainer.tasks.checkouts import git, make_repository

PATCH = "diff --git a/tests/test_code.py b/tests/test_code.py\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository and its base commit. Tests have copies."""
    folder = tmp_path_factory.mktemp("repository") / "owner__name"
    return folder, make_repository(folder)


@pytest.fixture
def row(tmp_path, repository):
    folder, base = repository
    shutil.copytree(folder, tmp_path / "repositories" / "owner__name", symlinks=True)
    return {
        "instance_id": "owner__name-1",
        "repo": "owner/name",
        "base_commit": base,
        "problem_statement": "The sum is wrong.",
        "hints_text": "SECRET-HINT",
        "patch": "SECRET-PATCH",
        "test_patch": PATCH,
        "version": "1.0",
        "FAIL_TO_PASS": '["tests/test_code.py::test_a[1-b c]"]',
        "PASS_TO_PASS": '["tests/test_code.py::TestB::test_c", "tests/other.py::test_d"]',
    }


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def load(folder, *rows, local=True, path=None, **options):
    """Load the tasks of rows, or of `path` in the folder."""
    path = folder / path if path else write(folder, *rows)
    return load_tasks(path, repositories=folder / "repositories" if local else None, **options)


def test_a_row_becomes_a_task_that_pytest_judges(tmp_path, row):
    (task,) = load(tmp_path, row)
    place = tmp_path / "repositories" / "owner__name"
    assert (task.id, task.workspace, task.commit) == ("owner__name-1", place, row["base_commit"])
    assert (task.image, task.source) == (None, f"{tmp_path / 'rows.jsonl'}, line 1 (owner__name-1)")
    assert task.instruction.endswith("\n\nThe sum is wrong.")
    judge = task.effective_judge
    assert judge.kind == "pytest"
    assert judge.command[-2:] == ["tests/other.py", "tests/test_code.py"]
    assert judge.command[:3] == ["python", "-m", "pytest"]
    assert judge.fail_to_pass == ["tests/test_code.py::test_a[1-b c]"]
    assert judge.pass_to_pass == ["tests/test_code.py::TestB::test_c", "tests/other.py::test_d"]
    assert (judge.test_patch, judge.files) == (PATCH, ["tests/other.py", "tests/test_code.py"])
    assert "SECRET" not in task.model_dump_json() + repr(task)
    assert task.gold_patch == "SECRET-PATCH"


@pytest.mark.parametrize("key", ["image", "docker_image", "image_name"])
def test_an_image_of_the_row_is_used_without_repositories(tmp_path, row, key):
    (task,) = load(tmp_path, {**row, key: "swebench/x:1"}, local=False)
    assert (task.image, task.image_optional, task.workspace) == ("swebench/x:1", False, None)
    assert (task.workdir, task.commit) == ("/testbed", row["base_commit"])
    assert task.effective_judge.command[0] == "bash"
    (task,) = load(tmp_path, {**row, key: "swebench/x:1"})
    assert (task.image, task.image_optional) == ("swebench/x:1", True)
    assert task.workspace.name == "owner__name"


@pytest.mark.parametrize("name", ["owner__name", "owner__name.git", "owner/name", "owner/name.git"])
def test_a_repository_is_found_by_its_names(tmp_path, row, name):
    place = tmp_path / "more" / name
    place.parent.mkdir(parents=True)
    git(tmp_path, "clone", "--quiet", "--mirror", "repositories/owner__name", str(place))
    (task,) = load_tasks(write(tmp_path, row), repositories=tmp_path / "more")
    assert task.workspace == place


def test_a_plain_folder_inside_a_larger_repository_is_no_repository(tmp_path, row):
    (tmp_path / "repositories" / "owner__name" / "other" / "name").mkdir(parents=True)
    path = write(tmp_path, {**row, "repo": "other/name"})
    with pytest.raises(InputError, match="other/name has no commit"):
        load_tasks(path, repositories=tmp_path / "repositories" / "owner__name")


def test_the_rows_of_every_dataset_format_are_the_same(tmp_path, row):
    rows = [
        row,
        {**row, "instance_id": "owner__name-2", "FAIL_TO_PASS": '["tests/test_code.py::test_z"]'},
    ]
    dataset = Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "one")
    DatasetDict({"test": dataset}).save_to_disk(tmp_path / "split")
    DatasetDict({"test": dataset, "dev": dataset}).save_to_disk(tmp_path / "splits")
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    expected = load(tmp_path, *rows)
    for name in ("one", "split", "splits/dev", "rows.parquet", "hub"):
        tasks = load(tmp_path, path=name)
        for task, other in zip(tasks, expected, strict=True):
            assert task == other.model_copy(update={"source": task.source}), name
        assert "row 1 (owner__name-2)" in tasks[1].source
    with pytest.raises(InputError, match="splits has the splits test, dev: give the folder of one"):
        load(tmp_path, path="splits")
    dataset.to_parquet(tmp_path / "hub" / "data" / "dev-00000-of-00001.parquet")
    with pytest.raises(InputError, match="hub has the splits dev, test: give one Parquet file"):
        load(tmp_path, path="hub")


def test_lists_of_names_may_be_lists(tmp_path, row):
    lists = {key: json.loads(row[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    assert load(tmp_path, {**row, **lists}) == load(tmp_path, row)
    Dataset.from_list([{**row, **lists}]).to_parquet(tmp_path / "lists.parquet")
    (task,) = load(tmp_path, path="lists.parquet")
    assert task.effective_judge == load(tmp_path, row)[0].effective_judge


def test_a_row_inside_a_nemo_gym_row_is_found(tmp_path, row):
    inner = {"instance_dict": json.dumps(row)}
    outer = {"instance_id": row["instance_id"], "responses_create_params": {"metadata": inner}}
    assert load(tmp_path, outer) == load(tmp_path, row)
    inner["instance_dict"] = "{"
    with pytest.raises(InputError, match="line 1: 'instance_dict' is not JSON"):
        load(tmp_path, outer)


COMMAND = {"test_cmd": "pytest -rA --tb=line", "python": "3.9"}


@pytest.mark.parametrize(
    ("config", "begin"),
    [
        ({"install_config": COMMAND}, ["pytest", "-rA", "--tb=line"]),
        ({"install_config": '{"test_cmd": "pytest -rA"}'}, ["pytest", "-rA"]),
        ({"test_cmd": ["TZ=UTC pytest -q"]}, ["env", "TZ=UTC", "pytest", "-q"]),
        ({"install_config": {"python": "3.9"}}, ["python", "-m", "pytest"]),
    ],
)
def test_the_test_command_of_a_row_is_used(tmp_path, row, config, begin):
    (task,) = load(tmp_path, {**row, **config})
    command = task.effective_judge.command
    assert command[: len(begin)] == begin
    assert command[-2:] == ["tests/other.py", "tests/test_code.py"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FAIL_TO_PASS": "[]"}, "'FAIL_TO_PASS' is"),
        ({"FAIL_TO_PASS": "[1"}, "'FAIL_TO_PASS' is '\\[1'"),
        ({"FAIL_TO_PASS": None}, "'FAIL_TO_PASS' is None"),
        ({"FAIL_TO_PASS": '["test_sum (utils.Tests)"]'}, "FAIL_TO_PASS names the test 'test_sum "),
        ({"PASS_TO_PASS": '["test_sum"]'}, "PASS_TO_PASS names the test 'test_sum', which is not"),
        ({"repo": "name"}, "'repo' is 'name'"),
        ({"base_commit": "f" * 40}, r"has no commit f{40} \('base_commit'\): fetch it there"),
        ({"repo": "other/name"}, r"has no repository other__name or other/name \('repo'\): clone"),
        ({"test_cmd": "./runtests.py"}, r"'test_cmd' is '\./runtests\.py', and only one pytest"),
        ({"test_cmd": "make && pytest"}, "'test_cmd' is 'make && pytest', and only one pytest"),
        ({"test_cmd": ["make", "pytest"]}, "'test_cmd' is .*, and only one pytest command"),
        ({"problem_statement": ""}, "'problem_statement' is ''"),
        ({"instance_id": "a b"}, "'id' is 'a b'"),
    ],
)
def test_what_a_row_asks_for_and_cannot_have_is_named(tmp_path, row, change, message):
    refused = []
    load(tmp_path, {**row, "instance_id": "good"}, {**row, **change}, refused=refused)
    assert re.search(rf"rows\.jsonl, line 2.*{message}", *refused)


DJANGO = {
    "repo": "django/django",
    "FAIL_TO_PASS": '["test_sum (utils.tests.Sums)"]',
    "version": "4.2",
}


TEST_PATCH = "diff --git a/tests/utils/test_x.py b/tests/utils/test_x.py\n+x\n"
SYMPY = {"repo": "sympy/sympy", "FAIL_TO_PASS": '["test_sum"]', "PASS_TO_PASS": "[]"}
SQLITE = ["--settings=test_sqlite", "--parallel", "1"]


@pytest.mark.parametrize(
    ("fields", "parser", "command"),
    [
        ({}, "parse_log_django", ["--verbosity", "2", *SQLITE, "utils.test_x"]),
        ({"version": "1.9"}, "parse_log_django", ["--verbosity", "2", "utils.test_x"]),
        (SYMPY, "parse_log_sympy", ["bin/test", "-C", "--verbose", "tests/utils/test_x.py"]),
    ],
    ids=["django", "an old django", "sympy"],
)
def test_a_row_of_django_or_sympy_is_judged_by_its_own_program_in_the_image(
    tmp_path, row, fields, parser, command
):
    patch = f"{TEST_PATCH}diff --git a/a.txt b/a.txt\n"
    row = {**row, **DJANGO, "test_patch": patch, "image": "swebench/x", **fields}
    (task,) = load(tmp_path, row, local=False)
    judge = task.effective_judge
    assert (judge.log_parser, task.image_optional) == (parser, False)
    assert judge.command[-len(command) :] == command
    if parser == "parse_log_django":
        assert judge.files == ["tests/runtests.py"]


def test_without_an_image_or_a_test_file_it_is_refused(tmp_path, row):
    (tmp_path / "repositories" / "django__django").symlink_to("owner__name")
    with pytest.raises(
        InputError, match=r"the test program of django/django runs in the row's image only"
    ):
        load(tmp_path, {**row, **DJANGO})
    with pytest.raises(InputError, match=r"'test_patch' has no Python file"):
        load(tmp_path, {**row, **DJANGO, "image": "x", "test_patch": ""}, local=False)


def test_refused_rows_cost_only_themselves_and_are_counted_or_listed(tmp_path, row, caplog):
    others = [{**row, "instance_id": f"o-{n}", "FAIL_TO_PASS": f'["test_{n}"]'} for n in range(3)]
    rows = [*others[:2], {**row, "repo": "name"}, row, others[2], {"instance_id": 1}]
    assert [task.id for task in load(tmp_path, *rows)] == ["owner__name-1"]
    (line,) = caplog.messages
    assert re.search(
        r"rows\.jsonl: 5 refused of 6 tasks: 3 x .*line 1 \(o-0\).*; 1 x .*'repo' is 'name'", line
    )
    refused = []
    load(tmp_path, *rows, refused=refused)
    assert [re.search(r", line (\d)", line)[1] for line in refused] == ["1", "2", "3", "5", "6"]


def test_only_refused_rows_are_an_error(tmp_path, row):
    for options in ({}, {"refused": []}):
        with pytest.raises(
            InputError, match=r"has no tasks: 2 refused of 2 tasks: 2 x .*line 1.*'FAIL_TO_PASS' is"
        ):
            load(tmp_path, *[{**row, "FAIL_TO_PASS": "[]"}] * 2, **options)
    with pytest.raises(
        InputError, match=r"line 1 \(owner__name-1\): the row has no image \(keys .*owner__name"
    ):
        load(tmp_path, row, local=False)
    with pytest.raises(InputError, match=r"the folder of repositories .*none is not a folder"):
        load_tasks(write(tmp_path, row), repositories=tmp_path / "none")
    del row["test_patch"]
    with pytest.raises(InputError, match=r"line 1: 'test_patch' is missing"):
        load(tmp_path, row)
