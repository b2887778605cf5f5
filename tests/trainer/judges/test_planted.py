import pytest

from rolltap.trainer.judges.changes import Changes
from rolltap.trainer.judges.folders import Entry
from rolltap.trainer.judges.planted import computed_makefiles, select
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import shell, write


@pytest.fixture
def refused(tmp_path):
    """Return a function that returns what is refused of new files, of a start and a program that
    judges it."""

    def refused(files, program, *names):
        write(tmp_path / "start", files)
        task = Task(id="t", instruction="x", evaluate=program.split())
        new = Changes(dict.fromkeys(names, Entry("file")), added=frozenset(names))
        start = tmp_path / "start"
        return select(new, task, task.effective_judge, set(), start, tmp_path / "work").refused

    return refused


def test_names_without_end_take_no_time(refused):
    start = {"package.json": "{}", "Makefile": "%.ok: x\n", "checks/test_a.py": "import yaml\n"}
    deep = "-test/" * 600 + "a.py"
    names = [f"{deep}{number}.jsx.py" for number in range(100)]
    assert not refused(start, "pytest", *names)


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
def test_targets_that_make_computes_make_every_new_path_the_judges(refused, how):
    start = {"Makefile": COMPUTED[how], "docs/Makefile": "%: Makefile\n"}
    assert refused(start, "make test", "new.c") == {"new.c": "planted"}


@pytest.mark.parametrize(
    ("path", "script", "paths", "matters"),
    [
        ("Makefile", "make test", None, False),  # it computes no target
        ("docs/Makefile", "make test", None, False),
        ("docs/Makefile", "./remake docs", None, False),
        ("docs/Makefile", "make -C docs", ["**"], False),
        ("docs/Makefile", "make -C docs", None, True),
    ],
)
def test_computed_targets_matter_where_the_judge_runs_that_make_and_has_no_paths(
    tmp_path, path, script, paths, matters
):
    computes_none = "OUT = build\ntest: $(OUT)/%.o\n\t$(shell ls)\n"
    write(tmp_path, {"Makefile": computes_none, "docs/Makefile": "%: Makefile\n"})
    task = Task(id="t", instruction="x", judge=shell(script, paths=paths))
    assert computed_makefiles(tmp_path, [path], task.judge) == [path] * matters
