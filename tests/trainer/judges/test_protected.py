import pytest

from rolltap.trainer.judges.changes import Changes
from rolltap.trainer.judges.folders import Entry
from rolltap.trainer.judges.protected import (
    ambiguous,
    computed_makefiles,
    own_files,
    select,
    taken_by_make,
)
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import write

START = [
    *(
        "check.py",
        "tools/check.py",
        "run/check.sh",
        "my check.py",
        "check/__main__.py",
        "bin/go",
        "calc.py",
        "notes.txt",
    ),
    *("pkg/data.json", "Makefile", "tests/test_old.py", "tests/data.json"),
]
BY_NAME = {"Makefile", "tests/test_old.py", "tests/data.json"}


def own(tmp_path, command, **fields):
    write(tmp_path, dict.fromkeys(START, ""))
    judge = {"kind": "command", "command": command, **fields}
    task = Task.model_validate({"id": "t", "instruction": "Mend notes.txt", "judge": judge})
    return own_files(tmp_path, task, task.effective_judge) - BY_NAME, ambiguous(
        START, task, task.effective_judge
    )


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["python", "check.py"], {"check.py", "tools/check.py"}),
        (["/usr/bin/python3.11", "-B", "./tools/check.py"], {"check.py", "tools/check.py"}),
        (["./run/check.sh", "a"], {"run/check.sh"}),
        (["env", "A=b", "bash", "-c", "true&&. run/check.sh"], {"run/check.sh"}),
        (["sh", "-c", "cd run; x=check.sh; sh <$x"], {"run/check.sh"}),
        (
            ["sh", "-c", "python './my check.py'; true"],
            {"my check.py", "check.py", "tools/check.py"},
        ),
        (["sh", "-c", "it's broken; exec python<check.py"], {"check.py", "tools/check.py"}),
        (["nice", "timeout", "9", "/workspace/bin/go"], {"bin/go"}),
        (["python", "-m", "tools.check"], {"tools/check.py"}),
        (["python", "-B", "-mcheck"], {"check.py", "check/__main__.py"}),
        (["sh", "-c", "diff data.json pkg/data.json"], {"pkg/data.json"}),
        (["go", "build", "-o", "x", "check.python", "recheck.py", "check.py.orig"], set()),
    ],
)
def test_files_that_a_command_names_are_the_judges(tmp_path, command, named):
    assert own(tmp_path, command) == (named, [])


def test_what_paths_match_is_never_the_judges_and_what_files_match_is(tmp_path):
    assert own(tmp_path, ["python", "check.py"], paths=["check.py"])[0] == {"tools/check.py"}
    assert own(tmp_path, ["true"], files=["pkg/**", "*.txt"])[0] == {"pkg/data.json", "notes.txt"}


def test_a_file_that_the_command_and_the_instruction_name_is_ambiguous_without_paths(tmp_path):
    assert own(tmp_path, ["grep", "-q", "new", "notes.txt"]) == ({"notes.txt"}, ["notes.txt"])
    assert own(tmp_path, ["grep", "-q", "new", "notes.txt"], paths=["*.txt"]) == (set(), [])


def test_names_without_end_take_no_time(tmp_path):
    start, work = tmp_path / "start", tmp_path / "work"
    write(
        start, {"package.json": "{}", "Makefile": "%.ok: x\n", "checks/test_a.py": "import yaml\n"}
    )
    deep = "-test/" * 600 + "a.py"
    names = [f"{deep}{number}.jsx.py" for number in range(100)]
    task = Task.model_validate({"id": "t", "instruction": "x", "evaluate": ["pytest"]})
    changes = Changes(dict.fromkeys(names, Entry("file")), added=frozenset(names))
    assert not select(changes, task, task.effective_judge, set(), start, work).refused


COMPUTED = {
    "a function": "test: $(wildcard checks/*)\n\techo\n$(wildcard checks/*.c): x\n",
    "a function in a function": "$(patsubst %.c,%.o,$(wildcard *.c)): x\n",
    "a program": "TESTS := $(shell ls)\n$(TESTS): x\n",
    "another end of each name": "OBJECTS = $(wildcard *.c)\n$(OBJECTS:.c=.o): x\n",
    "a rule that is evaluated": "$(foreach name,$(NAMES),$(eval $(call rule,$(name))))\n",
    "an included file": "-include $(wildcard *.mk)\n",
    "every name": "%: %.c\n\tcc -o $@ $<\n",
    "a line that goes on": "all \\\n  $(wildcard *): x\n",
    "a variable that grows without end": "A=$(A)$(A)\n" * 1000 + "$(A): x\n",
}


@pytest.mark.parametrize("how", COMPUTED)
def test_targets_that_make_computes_make_every_new_path_the_judges(tmp_path, how):
    start, work = tmp_path / "start", tmp_path / "work"
    write(start, {"Makefile": COMPUTED[how], "docs/Makefile": "%: Makefile\n"})
    task = Task.model_validate({"id": "t", "instruction": "x", "evaluate": ["make", "test"]})
    new = Changes({"new.c": Entry("file")}, added=frozenset({"new.c"}))
    assert select(new, task, task.effective_judge, set(), start, work).refused == {
        "new.c": "planted"
    }


def test_targets_that_make_computes_do_not_matter_where_the_judge_runs_another_program_or_has_paths(
    tmp_path,
):
    write(
        tmp_path,
        {
            "Makefile": "OUT = build\ntest: $(OUT)/%.o\n\t$(shell ls)\n",
            "docs/Makefile": "%: Makefile\n",
        },
    )
    for path, command, paths in (
        ("Makefile", "make test", None),
        ("docs/Makefile", "make test", None),
        ("docs/Makefile", "./remake docs", None),
        ("docs/Makefile", "make -C docs", ["**"]),
    ):
        spec = {"kind": "command", "command": ["sh", "-c", command], "paths": paths}
        task = Task.model_validate({"id": "t", "instruction": "x", "judge": spec})
        assert computed_makefiles(tmp_path, [path], task.effective_judge) == []
    task = Task.model_validate({"id": "t", "instruction": "x", "evaluate": ["make", "-C", "docs"]})
    assert computed_makefiles(tmp_path, ["docs/Makefile"], task.effective_judge) == [
        "docs/Makefile"
    ]


def test_targets_and_includes_of_make_are_the_judges_and_variables_in_them_stand_for_their_values(
    tmp_path,
):
    (tmp_path / "Makefile").write_text(
        "OUT = build\n-include local.mk\ntest: $(OUT)/x.o %.out\n$(OUT)/x.o:\n"
    )
    assert {"local.mk", "test", "build/x.o"} <= {*taken_by_make(tmp_path, ["Makefile"])}
