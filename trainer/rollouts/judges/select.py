"""The part of an agent's changes that a judge sees."""

import configparser
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from rolltap.trainer.rollouts.judges.changes import Changes
from rolltap.trainer.rollouts.judges.folders import Refusal, read_file
from rolltap.trainer.rollouts.judges.named import is_script, runs_pytest
from rolltap.trainer.rollouts.judges.patterns import PLANTED, SETTINGS, SHADOWS, STARTUP, TEST_FILES, is_shadow, matches
from rolltap.trainer.rollouts.judges.spec import CommandJudge, PytestJudge, PythonJudge

OneJudge = CommandJudge | PytestJudge | PythonJudge
"""A judge that looks at a workspace."""

_MAX_SETTINGS_BYTES = 1 << 20


def select(
    changes: Changes, spec: OneJudge, tests: Collection[str], workdir: str, start: Path, workspace: Path
) -> Changes:
    """Return the changes that are applied for a judge; the others are refused in it.

    `tests` are the paths of the task's own tests. A judge that runs a program also refuses what would run in it without
    being a part of the solution: see `patterns`. Files of the start that its command names, and the start's test files,
    are applied only if `paths` names them; new test files are not applied for pytest.
    """
    tests_folders = {parent for path in tests for parent in _parents(path)}
    refused: dict[str, Refusal] = {}
    for path in [*changes.changed, *changes.deleted]:
        entry = changes.changed.get(path)
        is_folder = entry is not None and entry.kind == "folder"
        if (
            path in tests
            or any(parent in tests for parent in _parents(path))
            or (not is_folder and path in tests_folders and entry is not None)
            or (spec.paths is not None and not is_folder and not matches(path, spec.paths))
            or matches(path, spec.protect)
        ):
            refused[path] = "protected"
        elif isinstance(spec, PytestJudge | CommandJudge):
            refused |= _refuse_for_program(path, changes, spec, workdir, start, workspace)
    stays = (path for path, why in refused.items() if why == "protected" and path not in changes.added)
    kept = {parent for path in stays for parent in _parents(path)}
    replaced = (path for path in kept if path in changes.changed and changes.changed[path].kind != "folder")
    refused.update(dict.fromkeys(replaced, "protected"))
    return changes.without(refused)


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _refuse_for_program(
    path: str, changes: Changes, spec: PytestJudge | CommandJudge, workdir: str, start: Path, workspace: Path
) -> dict[str, Refusal]:
    for_pytest = isinstance(spec, PytestJudge) or runs_pytest(spec.command)
    added = path in changes.added
    entry = changes.changed.get(path)
    shadows = is_shadow(path, is_folder=entry is not None and entry.kind == "folder") or matches(path, SHADOWS)
    if matches(path.lower(), PLANTED if for_pytest else STARTUP) or (added and shadows):
        return {path: "planted"}
    if spec.paths is None or not matches(path, spec.paths):
        if matches(path, TEST_FILES) and (for_pytest or not added):
            return {path: "protected"}
        if not added and is_script(path, spec.command, workdir):
            return {path: "protected"}
    if for_pytest and (why := _refuse_settings(path, start, workspace)):
        return {path: why}
    return {}


def _refuse_settings(path: str, start: Path, workspace: Path) -> Refusal | None:
    if matches(path, SETTINGS):
        before = pytest_settings(path, read_file(start, path, _MAX_SETTINGS_BYTES))
        if pytest_settings(path, read_file(workspace, path, _MAX_SETTINGS_BYTES)) != before:
            return "settings"
    return None


def pytest_settings(path: str, content: bytes | None) -> object:
    """Return what a file of settings says about pytest; None when nothing. What cannot be read equals nothing else."""
    if content is None:
        return None
    try:
        text = content[:_MAX_SETTINGS_BYTES].decode()
        if path.endswith(".toml"):
            return tomllib.loads(text).get("tool", {}).get("pytest")
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
    except (ValueError, configparser.Error, AttributeError, RecursionError):
        return object()
    sections = [name for name in parser.sections() if name in ("pytest", "tool:pytest")]
    return {name: dict(parser[name]) for name in sections} or None
