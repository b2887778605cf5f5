"""Test programs of SWE repositories whose tests are not pytest's, with the `swebench` parsers of what they print.

The commands are those of swebench's own harness: https://github.com/SWE-bench/SWE-bench (`TEST_DJANGO`, `TEST_SYMPY`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_PATCHED = re.compile(r"^diff --git a/.+ b/(.+\.py)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TestProgram:
    """A repository's own test program.

    Attributes:
        log_parser: Name of the parser of its output: see `PytestJudge.log_parser`.
        command: The program with its options, for one version of the repository.
        label: Path of a test file -> the program's name of it.
        files: Files of the program, which the agent's changes do not replace.
    """

    log_parser: str
    command: Callable[[str], Sequence[str]]
    label: Callable[[str], str]
    files: Sequence[str]

    def run(self, version: str, test_patch: str) -> list[str]:
        """Return the command that runs the test files of a patch; empty when the patch has none."""
        files = list(dict.fromkeys(_PATCHED.findall(test_patch)))
        return [*self.command(version), *map(self.label, files)] if files else []


def _django(version: str) -> Sequence[str]:
    # one process, so that the output of tests does not mix; the program of 1.9 cannot be told so
    alone = () if version == "1.9" else ("--settings=test_sqlite", "--parallel", "1")
    return ("env", "LC_ALL=C.UTF-8", "PYTHONIOENCODING=utf8", "./tests/runtests.py", "--verbosity", "2", *alone)


def _django_label(file: str) -> str:
    return file.removesuffix(".py").removeprefix("tests/").replace("/", ".")


def _sympy(version: str) -> Sequence[str]:
    return ("env", "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning", "bin/test", "-C", "--verbose")


TEST_PROGRAMS = {
    "django/django": TestProgram("parse_log_django", _django, _django_label, ("tests/runtests.py",)),
    "sympy/sympy": TestProgram("parse_log_sympy", _sympy, str, ("bin/test",)),
}
"""Repository, as OWNER/NAME -> its test program."""
