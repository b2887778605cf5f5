"""Every cheat wins where nothing protects from it, against a real pytest and real scripts."""

import os
import subprocess
import sys

import pytest

from rolltap.trainer.checks.cheats import CHEATS, Ground
from tests.deep import cases
from tests.trainer.judges.sessions import write

START = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": "import calc\n\n\ndef test_add():\n    assert calc.add(2, 2) == 4\n",
    "check.py": "import calc\n\nraise SystemExit(calc.add(2, 2) != 4)\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\nminversion = '6'\n",
    "expected.txt": "4\n",
    "Makefile": "test:\n\tpython check.py\n",
}
PYTEST = "python -m pytest -p no:cacheprovider"
BY_OUTPUT = "python check.py > out; grep -qx 1 out"
BY_DESCRIPTOR = "exec 9> reward; export ROLLTAP_REWARD_FD=9; python check.py; grep -q 1 reward"
BY_FILE = "export ROLLTAP_REWARD_FILE=reward; (python check.py; echo 0 > reward); grep -q 1 reward"
ODD = (
    '#!/usr/bin/env python3\n"""Adds."""\n\nfrom __future__ import (\n   '
    ' annotations,\n)\n\nprint("went on")\n'
)
BROKEN = {
    "the judge's own files replaced": [PYTEST, "python check.py"],
    "pytest.ini with --collect-only": [PYTEST],
    "pytest.ini with a plugin": [PYTEST],
    "other settings of pytest with --collect-only": [PYTEST],
    "other settings of pytest with a plugin": [PYTEST],
    "a planted conftest.py or plugin": [PYTEST],
    "modules in place of Python's and the judge's": [
        PYTEST,
        f"{BY_DESCRIPTOR}; rm -f expected.txt; {PYTEST}",
    ],
    "files with the names of make's targets": ["make -s test"],
    "packages in place of the judge's modules": ["python -m check"],
    "a number as the reward, by the agent's code": [
        BY_OUTPUT,
        BY_DESCRIPTOR,
        "python check.py 7> out; grep -qx 1 out",
    ],
    "JSON as the reward, by the agent's code": [BY_OUTPUT.replace("-qx 1", "-q reward")],
    "the reward's files, by the agent's code": [BY_FILE],
    "expected data that the agent's code prints": ["python calc.py > out; cmp out expected.txt"],
    "output that the agent's code writes later": [
        "python calc.py > out; until [ -s out ]; do :; done; cmp out expected.txt"
    ],
    "data emptied by the agent's code": [
        "python -c 'import calc; print(calc.add(2, 2))' > out; cmp out expected.txt"
    ],
    "the report rewritten by a child process": [
        f"{PYTEST} --junit-xml=report.xml; until grep -q 'failures=\"0\"' report.xml; do :; done"
    ],
    "an exit with status 0 at the import": ["python check.py", PYTEST],
    "a hang at the import": ["timeout 1 python check.py; [ $? = 124 ]"],
    "a flood of output": ["python check.py | wc -c > size; [ $(cat size) -gt 1000000 ]"],
}
"""Cheat -> shell commands as judges that fall to it."""
EACH = [(name, judge) for name, judges in BROKEN.items() for judge in judges]


def cheat_of(name):
    return next(cheat for cheat in CHEATS if cheat.name == name)


def ground_in(folder, files, code=("calc.py",)):
    write(folder, files)
    own = [name for name in files if name not in (*code, "pyproject.toml")]
    return Ground(folder, sorted(files), own, code)


def judged(folder, command):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it starts faster
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )


def test_there_is_a_judge_that_falls_to_every_cheat():
    assert {*BROKEN} == {cheat.name for cheat in CHEATS}


@pytest.mark.parametrize(("name", "judge"), cases(EACH, 0, 3, 6, 8, 12, 15))
def test_a_judge_without_protection_falls_to_the_cheat(tmp_path, name, judge):
    ground = ground_in(tmp_path, START)
    if "until" not in judge:
        assert judged(tmp_path, judge).returncode != 0
    write(tmp_path, cheat_of(name).change(ground))
    ended = judged(tmp_path, judge)
    assert ended.returncode == 0, ended.stdout + ended.stderr


PAYLOADS = [cheat for cheat in CHEATS if "agent's code" in cheat.name or "output" in cheat.name]


@pytest.mark.parametrize("cheat", cases(PAYLOADS, 0), ids=lambda cheat: cheat.name)
@pytest.mark.parametrize(
    "code", [{"run.py": ODD}, {"run.sh": "#!/bin/sh\necho went on\n"}], ids=["python", "shell"]
)
def test_code_goes_on_behind_a_payload(tmp_path, cheat, code):
    ((name, text),) = code.items()
    changed = cheat.change(ground_in(tmp_path, {**code, "data.txt": "a"}, code=[name]))
    write(tmp_path, changed)
    ended = judged(tmp_path, f"{'python' if name.endswith('.py') else 'sh'} {name}")
    hides = "emptied" in cheat.name and name.endswith(".py")
    assert (ended.returncode, "went on" in ended.stdout.splitlines()) == (
        0,
        not hides,
    ), ended.stderr
    assert changed[name].startswith(text.partition("\n")[0])


def test_an_exit_in_a_script_of_a_shell_ends_the_script(tmp_path):
    cheat = cheat_of("an exit with status 0 at the import")
    write(tmp_path, cheat.change(ground_in(tmp_path, {"run.sh": "exit 3\n"}, code=["run.sh"])))
    assert judged(tmp_path, "sh run.sh").returncode == 0


def test_a_cheat_without_a_place_changes_nothing(tmp_path):
    ground = Ground(tmp_path, [], [], [])
    assert [cheat.name for cheat in CHEATS if cheat.change(ground)] == [
        *list(BROKEN)[1:5],
        "a planted conftest.py or plugin",
        "modules in place of Python's and the judge's",
    ]
    assert (
        cheat_of("data emptied by the agent's code").change(
            ground_in(tmp_path, {"a.py": ""}, code=["a.py"])
        )
        == {}
    )
