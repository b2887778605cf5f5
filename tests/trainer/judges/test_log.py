import importlib.util
import sys

import pytest

from rolltap.errors import MissingPackageError
from rolltap.trainer.judges import log
from tests.trainer.judges.sessions import Left

START = {
    "calc.py": "def add(a, b): return a - b\n",
    "run.py": (
        "import sys, unittest, calc\n"
        "class T(unittest.TestCase):\n"
        "    def test_add(self): self.assertEqual(calc.add(2, 2), 4)\n"
        "    def test_zero(self): self.assertEqual(calc.add(0, 0), 0)\n"
        "unittest.main(verbosity=2)\n"
    ),
}
NAMES = [f"{name} (__main__.T.{name})" for name in ("test_add", "test_zero")]
SPEC = {
    "kind": "pytest",
    "command": [sys.executable, "run.py"],
    "log_parser": "parse_log_django",
    "fail_to_pass": NAMES[:1],
    "pass_to_pass": NAMES[1:],
    "files": ["run.py"],
}


async def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swebench.harness.log_parsers", None)
    log._swebench.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install -e '\S+\[swe\]'"):
        await Left(tmp_path, START).judge(SPEC)


@pytest.mark.skipif(
    importlib.util.find_spec("swebench") is None, reason="swebench is not installed"
)
class TestWithThePackage:
    @pytest.mark.parametrize(
        ("code", "reward", "parts"),
        [
            ("def add(a, b): return a + b\n", 1.0, (1.0, 1.0)),
            ("def add(a, b): return 4\n", 0.0, (1.0, 0.0)),
            ("def add(a, b): return 2\n", 0.0, (0.0, 0.0)),
            ("import os; os._exit(0)\n", 0.0, ()),
            ("import os; os._exit(3)\n", 0.0, ()),
        ],
    )
    async def test_a_log_of_other_tests_than_pytests_is_graded(self, tmp_path, code, reward, parts):
        left = Left(tmp_path, START, did={"calc.py": code})
        judged = await left.judge(SPEC)
        assert (judged.reward, tuple(judged.parts.values())) == (reward, parts), left.log

    async def test_a_parser_that_is_not_there_is_unjudged(self, tmp_path):
        judged = await Left(tmp_path, START).judge({**SPEC, "log_parser": "parse_log_no"})
        assert judged.unjudged == "swebench has no log parser 'parse_log_no'"
