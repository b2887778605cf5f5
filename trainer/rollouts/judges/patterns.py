"""Glob patterns of paths relative to a workspace, with `/` between the parts."""

import re
import sys
from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=1024)
def _expression(pattern: str) -> re.Pattern[str]:
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.rstrip("/"))
    return re.compile("".join(tokens.get(part) or re.escape(part) for part in parts) + "(?:/.*)?", re.DOTALL)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern names the path or a folder above it.

    `*` and `?` match within a part, `**` matches any number of parts. Upper and lower case differ.
    """
    return any(_expression(pattern).fullmatch(path) for pattern in patterns)


TEST_FILES = (
    "**/test_*.py",
    "**/*_test.py",
    "**/tests.py",
    "**/conftest.py",
    "**/tests/**",
    "**/__tests__/**",
    "**/*.test.js",
    "**/*.test.ts",
)
"""Files that are tests by the usual names. A folder `test` may be source code: Django's is."""

STARTUP = (
    "**/sitecustomize",
    "**/sitecustomize.*",
    "**/usercustomize",
    "**/usercustomize.*",
    "**/*.pth",
    "**/*.dist-info",
    "**/*.egg-info",
    "**/*.egg",
)
"""Files and folders that run code in every Python, or that name plugins which programs load by themselves."""

PLANTED = (
    *STARTUP,
    "**/conftest.py",
    "**/pytest.ini",
    "**/.pytest.ini",
    "**/pytest.toml",
    "**/.pytest.toml",
    "**/.pytest_cache/**",
    "**/.coveragerc",
)
"""Files that run code in the judge's pytest, or change what it does, without being asked for."""

SHADOWS = tuple(
    f"**/{name}{end}"
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "xdist", "py")
    for end in ("", ".py", ".pyc", ".*.so", ".so")
)
"""Modules that Python would import in place of pytest's own. New ones are not applied; a start may be pytest itself."""

_OF_PLUGINS = ("packaging", "pygments", "exceptiongroup", "tomli", "colorama", "typing_extensions", "coverage", "attr")
_MODULE = re.compile(r"(?:(?:src|lib)/)?([^/.]+)(?:\.(?:py|pyc|(?:[^/]+\.)?so)|/__init__\.[^/]+|)")


def is_shadow(path: str, *, is_folder: bool) -> bool:
    """Return True for a module at the top that Python would import in place of one of its own, or of a library's.

    `python -m` and scripts look for modules in their own folder first. A folder without `__init__` hides no module.
    """
    found = _MODULE.fullmatch(path)
    return not is_folder and found is not None and (found[1] in sys.stdlib_module_names or found[1] in _OF_PLUGINS)


SETTINGS = ("**/pyproject.toml", "**/setup.cfg", "**/tox.ini")
"""Files in which settings of pytest may stand among others."""
