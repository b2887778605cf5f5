import pytest

from rolltap.trainer.judges.changes import Changes
from rolltap.trainer.judges.folders import Entry
from rolltap.trainer.judges.planted import computed_makefiles, select, taken_by_make
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import write


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
