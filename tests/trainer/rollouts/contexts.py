"""The context of sessions of a shell script, and their groups run by a runner on this machine."""

import asyncio
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.preparation import SessionContext
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.rollouts.session import LocalNode
from tests.trainer.cli.program import ASK

ONE_CALL_TEXT = ASK.replace("sys.exit(3)", "")
ONE_CALL = shlex.join([sys.executable, "-c", ONE_CALL_TEXT])
"""A command that makes one model call and exits with 0."""


async def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float, file: Path) -> None:
    """Let so many seconds pass for the event loop, once a program has made the file.

    The program has the time that it needs before, and nobody waits for its time limit.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    while not file.exists():  # noqa: ASYNC110 - it is another process that makes it
        await asyncio.sleep(0.01)
    monkeypatch.setattr(loop, "time", lambda: now() + seconds)


def context_of(
    recorder: Recorder,
    work: Path,
    harness: str | Harness,
    runtime: Runtime | None = None,
    **settings,
) -> SessionContext:
    """Return a context of two sessions at a time without retries. `harness` is one, or the script
    of an `sh`."""
    if isinstance(harness, str):
        harness = Harness(name="sh", version="1", program="sh", headless=["-c", harness])
    config = RolloutConfig.of({"concurrency": 2, "timeout": 3600, "retries": 0, **settings})
    return SessionContext(config, harness, runtime or ProcessRuntime(), recorder, work)


def runner_of(
    context: SessionContext,
    advance=lambda *_: None,
    *,
    evaluation: SessionContext | None = None,
    share: float = 0.0,
    silent: Collection[str] = (),
) -> GroupRunner:
    """Return a runner on this machine. `evaluation` is the context of groups that evaluate."""
    config = context.config

    async def of_evaluations() -> SessionContext:
        return evaluation or context

    return GroupRunner(
        [LocalNode(config.slots(share), context, of_evaluations)],
        advance,
        retries=config.retries,
        give_up_after=config.give_up_after,
        silent=lambda: silent,
    )


async def run_groups(
    groups: Sequence[Group],
    context: SessionContext,
    advance=lambda *_: None,
    policy_version: str | None = None,
) -> list[Session]:
    """Run groups to their end. Return their sessions, all attempts."""
    async with runner_of(context, advance) as runner:
        results = [await runner.submit(group, policy_version) for group in groups]
        return [session for result in results for session in await result]
