"""Programs as the judge: a command, by its exit status, a value or its log, and a Python function
of the user's.

A command that runs the agent's code in its own process can be told anything by it: it can write the
reward, and end with status 0. Such a command has to run the agent's code as a child, and decide
outside of it. In the runtime `process` that is no protection: the child has all rights of its
parent's user there.

A log is read by a parser of the `swebench` package, which needs no Docker for this: for test
programs that write no JUnit report. The agent's code runs in the test program and can print lines
that the parser takes for results; a report is harder to forge, by its canary.

`judge_here` judges by a command in the current directory: for a session that rolltap did not give a
workspace.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError, MissingPackageError, install_command
from rolltap.addons.store.rows import printable
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.supervised import run_supervised
from rolltap.trainer.concurrency import in_folder_thread
from rolltap.trainer.judges.checkout import Checkout
from rolltap.trainer.judges.layout import LAUNCH
from rolltap.trainer.judges.tests import Name, Outcome, compare, junit_name, tell_tests
from rolltap.trainer.judges.verdict import (
    Judged,
    UnjudgedError,
    best_reward,
    parse_text,
    worst_reward,
)
from rolltap.trainer.tasks.task import CommandJudge, PytestJudge, PythonJudge

_MAX_LOG_BYTES = 64 << 20
_OUTCOMES: dict[str, Outcome] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "SKIPPED": "skipped",
    "ERROR": "error",
    "XFAIL": "xfailed",
}
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_PYTHON_OPTION = re.compile(r"-[bBdEIOPqsSuv]+")
_MAX_REWARD_BYTES = 64 << 10
_FIRST_WORD = re.compile(r"\s*([\w.+-]+)(?=[\s;|&]|$)")
_NOT_FOUND = re.compile(r"(?:^|\s)([\w.+-]+): (?:command )?not found\s*$")
_NO_MODULE = re.compile(r"No module named ['\"]?([\w.]+)[^\n]*\s*$")


async def judge_by_command(spec: CommandJudge, checkout: Checkout) -> Judged:
    """Return the judgement. Raises `UnjudgedError`."""
    command = spec.command
    env = spec.env
    if not spec.by_status and not spec.reward_files:
        command = _with_launcher(command, checkout)
        env = {**env, "ROLLTAP_REWARD_FILE": checkout.pipe}
    status = await checkout.run(command, env, spec.timeout)
    if not spec.reward_files:
        judged = read_status(spec, status, checkout.job.log, checkout.job.task.instruction)
        if spec.by_status:
            return judged
    ended = f"the judge ended with status {status}"
    written = checkout.verdict(ended, _MAX_REWARD_BYTES)
    if not written:
        places = " or ".join(spec.reward_files) or "ROLLTAP_REWARD_FILE"
        raise UnjudgedError(f"{ended} and wrote no reward to {places}")
    reward, _, limits = written.decode(errors="replace").partition("\0")
    judged = _read_reward(reward, spec).and_evidence(exit_status=status)
    if limits:
        lowered = [f"limits of the judge: {name}" for name in limits.split()]
        judged = judged.and_evidence(rewritten=lowered)
    return judged


def _read_reward(text: str, spec: CommandJudge | PythonJudge) -> Judged:
    """Return the judgement with the reward that a text is, within the judge's range."""
    found = parse_text(text)
    least, most = spec.range
    if not least <= found.reward <= most:
        raise UnjudgedError(
            f"the reward {found.reward:g} is not in the judge's range {[least, most]}:"
            " set its 'range'"
        )
    return found.judged()


def _with_launcher(command: Sequence[str], checkout: Checkout) -> list[str]:
    """Return a command with the launcher, if it is a Python script, which has the channel to itself
    then."""
    options = list(takewhile(_PYTHON_OPTION.fullmatch, command[1:]))
    script = command[1 + len(options) :]
    is_script = script and (script[0] == "-m" or not script[0].startswith("-"))
    if not is_script or not _PYTHON.fullmatch(command[0]):
        return [*command]
    return [command[0], *options, f"{checkout.tools}/rolltap_launch.py", checkout.pipe, *script]


def read_status(
    spec: CommandJudge,
    status: int,
    log: Path,
    asked: str = "",
) -> Judged:
    """Return the judgement by the exit status of a program whose output is in `log`. Raises
    `UnjudgedError`.

    A status of 1 is no verdict when the last line says that a module is missing, unless the task,
    `asked`, names it.
    """
    ended = f"the judge ended with status {status}"
    if status not in (0, 1):
        why = f"{ended}, and only 0 and 1 are a verdict"
        if status == 127:
            why += f": {spec.command[0]!r}, or a program in it, is not there"
        why += f"; its output is in {log.name}"
        raise UnjudgedError(why, exit_status=status)
    if status == 1 and (module := missing_module(read_end(log), asked)):
        why = f"{ended} and without the module {module}: install it for the judge"
        raise UnjudgedError(why, exit_status=status)
    reward = best_reward(spec) if status == 0 else worst_reward(spec)
    return Judged(reward=reward, evidence={"exit_status": status})


def missing_module(output: str, asked: str) -> str:
    """Return the Python module that the last line of an output misses, unless the task, `asked`,
    names it."""
    return _missing(_NO_MODULE, output, asked)


def missing_program(output: str, asked: str) -> str:
    """Return the program that a shell did not find on its PATH, by the last line of its output.

    A program with a slash in its name, or one that the task names, may be for the agent to make.
    """
    return _missing(_NOT_FOUND, output, asked)


def _missing(pattern: re.Pattern[str], output: str, asked: str) -> str:
    found = pattern.search(output)
    if found is None or re.search(rf"\b{re.escape(found[1])}\b", asked):
        return ""
    return found[1]


def read_end(log: Path, limit: int = _MAX_REWARD_BYTES) -> str:
    """Return the last `limit` bytes of a file as text; empty without a file."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
        return file.read().decode(errors="replace")


def last_line(log: Path) -> str:
    """Return the last line of a program's output, for a message; empty without output."""
    last = read_end(log, 4096).strip().rpartition("\n")[2]
    return printable(last.strip(), 300)


def quote_last_line(why: str, log: Path) -> str:
    """Return a reason with the last line of a judge's output, if there is any."""
    last = last_line(log)
    return f"{why}; its last line: {last}" if last else why


async def judge_by_function(spec: PythonJudge, checkout: Checkout) -> Judged:
    """Return the judgement. Raises `UnjudgedError`.

    The function runs in a supervised process outside of the box, with the user's rights and
    modules: it must not run the agent's code. Its environment has no keys of the user's.
    """
    pipe = str(checkout.channel.path)
    folder = str(checkout.workspace)
    home = checkout.workspace.parent / "home"
    command = [sys.executable, "-BP", str(LAUNCH), pipe, "--function", spec.function, folder]
    env = {
        **clean_environment(home),
        **checkout.job.task.env,
        "PYTHONPATH": modules(spec),
    }
    log = checkout.job.log
    ended = await run_supervised(
        command,
        cwd=home,
        env=env,
        timeout=spec.timeout,
        log=log,
    )
    if ended.status is None:
        raise UnjudgedError(f"the function {spec.function} took more than {spec.timeout:g} s")
    checkout.channel.read()
    if ended.status != 0 or not checkout.channel.content:
        how = f"ended by signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
        last = last_line(log) or "no output"
        raise UnjudgedError(f"the function {spec.function} gave no result ({how}): {last}")
    return _read_reward(checkout.channel.content.decode(errors="replace"), spec)


async def judge_by_log(spec: PytestJudge, parser: str, checkout: Checkout) -> Judged:
    """Return the judgement, as `judge_by_report`. Raises `UnjudgedError` and
    `MissingPackageError`."""
    status = await checkout.run(spec.command, spec.env, spec.timeout)
    log = checkout.job.log
    outcomes = await in_folder_thread(parse_log, parser, read_end(log, _MAX_LOG_BYTES))
    ended = f"the judge ended with status {status}"
    if not outcomes:
        raise UnjudgedError(f"{ended}, and {parser} found no test in {log.name}")
    if status != 0 and not {*outcomes.values()} & {"failed", "error"}:
        raise UnjudgedError(f"{ended}, and {parser} found no failure in {log.name}")
    judged = compare(outcomes, spec.fail_to_pass, spec.pass_to_pass)
    tests = tell_tests(outcomes, [*spec.fail_to_pass, *spec.pass_to_pass])
    return judged.and_evidence(
        exit_status=status,
        canary="absent",
        tests=tests,
    )


def parse_log(parser: str, log: str) -> dict[Name, Outcome]:
    """Return the outcomes in a log.

    Raises `UnjudgedError` for a parser that the package does not have, and `MissingPackageError`
    without the package.
    """
    require_parser(parser)
    parsers, test_spec = _swebench()
    empty = test_spec(
        "",
        "",
        [],
        "",
        "",
        [],
        [],
        log_parser=parser,
    )
    try:
        found = parsers[parser](log, empty)
        return {junit_name(test): _OUTCOMES[status] for test, status in found.items()}
    except Exception as error:  # the agent's code wrote the log
        raise UnjudgedError(f"{parser} failed: {error!r}") from error


def require_parser(parser: str) -> None:
    """Raise `UnjudgedError` for a parser that the package does not have, and `MissingPackageError`
    without it."""
    if parser not in _swebench()[0]:
        known = "swebench.harness.log_parsers.PARSER_REGISTRY"
        why = f"swebench has no log parser {parser!r}: name one of {known}"
        raise UnjudgedError(why, broke=False)


@lru_cache(maxsize=1)
def _swebench() -> tuple[dict[str, Any], Any]:
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.types import TestSpec
    except ImportError as error:
        message = f"the judge's 'log_parser' needs swebench ({error}): {install_command('swe')}"
        raise MissingPackageError(message) from error
    return PARSER_REGISTRY, TestSpec


def modules(spec: PythonJudge) -> str:
    """Return the folders in which a function is looked for, as PYTHONPATH."""
    entries = [*sys.path]
    if spec.folder is not None:
        entries.insert(0, str(spec.folder))
    return os.pathsep.join(map(os.path.abspath, entries))


def require_evaluator(command: str) -> None:
    """Raise `InputError` for a command that no shell reads, or whose program is not there. A path
    may be made later."""
    read = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
    fault = read.stderr.strip() or "it is empty"
    if read.returncode or not command.strip():
        raise InputError(f"the evaluator {command!r} is no command of a shell: {fault}")
    first = _FIRST_WORD.match(command)
    if first is None:
        return
    find = ["sh", "-c", 'command -v "$0"', first[1]]
    if subprocess.run(find, stdout=subprocess.DEVNULL).returncode:
        needs = f"needs {first[1]!r}, which is not on the PATH: install it"
        raise InputError(f"the evaluator {command!r} {needs}")


def judge_here(command: str, log: Path) -> Judged:
    """Run a command in a shell, in the current folder, with its output in the file `log`.

    Nothing protects it from what the agent did there. Its verdict is read as that of a
    `CommandJudge`, and it has as much time. What it started ends with it.
    """
    spec = CommandJudge(command=[command])
    shell = ["sh", "-c", command]
    log.parent.mkdir(exist_ok=True)
    try:
        run = run_supervised(
            shell,
            cwd=Path.cwd(),
            env=os.environ,
            timeout=spec.timeout,
            log=log,
        )
        ended = asyncio.run(run)
        if ended.status is None:
            raise UnjudgedError(f"the evaluator took more than {spec.timeout:g} s")
        judged = read_status(spec, ended.status, log)
    except UnjudgedError as error:
        judged = Judged.without(error)
    except OSError as error:
        judged = Judged(unjudged=str(error))
    return judged.and_evidence(judge="command", log=log.name)
