"""The job of judging a session, and the folder of a judge's checkout: a copy of the start with the
task's tests over it, before the agent's changes come."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes import inside
from rolltap.trainer.boxes.environment import Proxy
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.concurrency import in_folder_thread, run_to_end, wait_for_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.changes import AgentFolders, Changes, apply_changes, find_changes
from rolltap.trainer.judges.folders import Entry, scan
from rolltap.trainer.judges.protected import OneJudge
from rolltap.trainer.judges.verdict import UnjudgedError
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.git import git
from rolltap.trainer.tasks.task import CommandJudge, PytestJudge, Task

LAUNCH = Path(inside.__path__[0], "launch.py")
_REPORT = Path(inside.__path__[0], "report.py")


class JudgeNetwork(Protocol):
    """A recorder, as the programs of judges reach hosts through it: as a session of their own."""

    def open_judge(self, session_id: str, allow: Sequence[str]) -> Proxy:
        """Let a session reach hosts, and nothing else. Each id is used once.

        Raises `RecorderError`, and `OSError` when the run folder cannot be written.
        """

    def accept(self, session_id: str, listener: socket.socket) -> AbstractContextManager[None]:
        """See `BoxSpec.accept`."""

    def close_judge(self, session_id: str) -> None:
        """End it: its credentials reach nothing any more. Raises as `open_judge`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeJob:
    """All that judging a session needs.

    Attributes:
        name: Of the session, or one derived from it.
        logs: Folder for the judge's output.
        folders: What the agent left; None when the untouched start is judged.
        changes: The agent's changes against the start: `judge` finds them.
        engine_urls: The policy's engines.
        ahead: The workspace of the first checkout for the session.
        network: The recorder, for a judge with `allow`; None where no rollout runs.
    """

    task: Task
    start: Start
    runtime: Runtime
    name: str
    logs: Path
    folders: AgentFolders | None = None
    changes: Changes = field(default_factory=Changes)
    engine_urls: Sequence[str] = ()
    ahead: "Ahead | None" = None
    network: JudgeNetwork | None = None

    @property
    def log(self) -> Path:
        """File for the judge's output."""
        return self.logs / f"{self.name}.judge.log"

    async def find_changes(self, workspace: Path) -> Changes:
        """Compare a workspace with the start. Raises as `find_changes`."""
        start = self.start
        return await in_folder_thread(find_changes, start.folder, workspace, digest=start.digest)


class Ahead:
    """The workspace of a judge's checkout, laid out while the session runs, where no program of it
    can reach it."""

    def __init__(self, job: JudgeJob, spec: OneJudge) -> None:
        self._spec: OneJudge | None = spec
        self._laid = asyncio.create_task(lay_out(job, spec))

    async def take(self, spec: OneJudge) -> tuple[Path, set[str]] | None:
        """Return what `lay_out` returned to the first who asks, if it is for this judge and did
        not fail."""
        if spec != self._spec:
            return None
        self._spec = None
        await asyncio.wait([self._laid])
        if self._laid.cancelled() or self._laid.exception():
            return None
        return self._laid.result()

    async def close(self) -> None:
        """End the copying. The session's folder, which has it, can be removed then."""
        self._laid.cancel()
        cancelled = await wait_for_end(self._laid)
        if not self._laid.cancelled():
            # asyncio logs one that nobody has seen; the judge meets it again
            self._laid.exception()
        if cancelled:
            raise asyncio.CancelledError


async def lay_out(job: JudgeJob, spec: OneJudge) -> tuple[Path, set[str]]:
    """Make the folder of a checkout, with a copy of the start and the task's tests over it.

    Returns it, and the paths of the tests. They come before the agent's changes, so that nothing of
    these is there yet when they are written.
    """
    beside = job.folders.workspace.parent if job.folders is not None else None
    folder = Path(tempfile.mkdtemp(prefix="judge-", dir=beside))
    try:
        return folder, await in_folder_thread(_lay_in, job, spec, folder)
    except BaseException:
        await run_to_end(remove_folder, folder)
        raise


def _lay_in(job: JudgeJob, spec: OneJudge, folder: Path) -> set[str]:
    """Fill the folder of a checkout, and return the paths of the task's tests."""
    for name in ("home", "tools"):
        (folder / name).mkdir()
    for file in (LAUNCH, _REPORT):
        shutil.copy(file, folder / "tools" / f"rolltap_{file.name}")
    for place, _ in writable_folders(spec, folder):
        place.mkdir()
    start = job.start
    workspace = folder / "workspace"
    start.copy_to(workspace)
    laid: set[str] = set()
    if isinstance(spec, PytestJudge) and spec.test_patch:
        try:
            apply_patch(spec.test_patch, workspace)
        except InputError as error:
            why = f"the task's test_patch does not fit its start: {error}"
            raise UnjudgedError(why, broke=False) from error
        patched = find_changes(start.folder, workspace, digest=start.digest)
        laid.update(patched.deleted)
        laid.update(_no_folders(patched.changed))
    if spec.tests is None:
        return laid
    tests = spec.tests
    changes = Changes(scan(tests).entries)
    source: Path | Mapping[str, bytes] = tests
    if tests.is_file():
        changes = Changes({tests.name: Entry("file", os.access(tests, os.X_OK))})
        source = {tests.name: tests.read_bytes()}
    apply_changes(changes, source, workspace)
    return laid.union(_no_folders(changes.changed))


def _no_folders(entries: Mapping[str, Entry]) -> Iterator[str]:
    for path, entry in entries.items():
        if entry.kind != "folder":
            yield path


def apply_patch(patch: str, folder: Path) -> None:
    """Apply a patch to a folder. Raises `InputError` when it does not fit."""
    text = patch.removesuffix("\n") + "\n"
    git(
        "apply",
        "--whitespace=nowarn",
        "-",
        folder=folder,
        stdin=text,
    )


def writable_folders(spec: OneJudge, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders that a command may write to, and their paths in the box."""
    if isinstance(spec, CommandJudge):
        for number, target in enumerate(spec.writable):
            yield folder / f"writable-{number}", target
