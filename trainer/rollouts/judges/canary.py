"""Tests that must fail, among the task's own: a report in which they pass is not pytest's."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rolltap.trainer.rollouts.judges.junit import Name, Outcome

# for every Python and pytest that a task may have
_TESTS = """import unittest


def test_{token}():
    assert [] == [1]


class Test{token}(unittest.TestCase):
    def test_{token}(self):
        self.assertEqual([], [1])
"""
_PLUGIN = """import os

import pytest

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "test_{token}.py")
found = []


def pytest_configure(config):
    config.args.append(FILE)


def pytest_itemcollected(item):
    if "{token}" in item.nodeid:
        found.append(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item not in found] + found
"""


@dataclass(frozen=True, slots=True)
class Canary:
    """A pytest plugin that adds two failing tests, a function and a `unittest` method, after all others.

    Their names are random, and in no test of the task's. It finds a program in place of pytest that writes a report by
    itself, and code of the agent's that makes pytest's tests pass. It does not find code that reads the plugin.
    """

    token: str

    @classmethod
    def write(cls, folder: Path) -> "Canary":
        """Write the plugin into a folder."""
        canary = cls("q" + secrets.token_hex(8))
        (folder / f"{canary.plugin}.py").write_text(_PLUGIN.replace("{token}", canary.token))
        (folder / f"test_{canary.token}.py").write_text(_TESTS.replace("{token}", canary.token))
        return canary

    @property
    def plugin(self) -> str:
        """The plugin's module, for PYTEST_PLUGINS."""
        return f"plugin_{self.token}"

    def take(
        self, outcomes: Mapping[Name, Outcome]
    ) -> tuple[dict[Name, Outcome], Literal["failed", "passed", "absent"]]:
        """Return the outcomes of the other tests, and what the canary's did: `passed` if one did not fail."""
        rest = {name: outcome for name, outcome in outcomes.items() if self.token not in f"{name.classname}{name.name}"}
        own = [outcome for name, outcome in outcomes.items() if name not in rest]
        if not own:
            return rest, "absent"
        return rest, "failed" if all(outcome == "failed" for outcome in own) else "passed"
