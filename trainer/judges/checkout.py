"""The checkout that one judge works in: a workspace, a box, and a folder for what it writes. The
box has no network, unless the judge names hosts that it may reach."""

import asyncio
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes import inside
from rolltap.trainer.boxes.environment import CERTIFICATES, Proxy, clean_environment
from rolltap.trainer.boxes.hiding import HidingRuntime, nearest
from rolltap.trainer.boxes.programs import SYSTEM
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Mount, Runtime
from rolltap.trainer.concurrency import in_folder_thread, run_to_end, wait_for_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.changes import (
    AgentResult,
    Changes,
    apply_changes,
    find_changes,
    is_of_the_machine,
)
from rolltap.trainer.judges.channel import MAX_BYTES, Channel
from rolltap.trainer.judges.folders import Entry, TooMuchError, scan
from rolltap.trainer.judges.planted import select
from rolltap.trainer.judges.protected import OneJudge, Stamp, own_files, read_only, stamp
from rolltap.trainer.judges.verdict import UnjudgedError
from rolltap.trainer.tasks.content import TEST_FILES, Start, matches
from rolltap.trainer.tasks.git import git
from rolltap.trainer.tasks.task import CommandJudge, PytestJudge, PythonJudge, Task

LAUNCH = Path(inside.__path__[0], "launch.py")
_REPORT = Path(inside.__path__[0], "report.py")
_TOOLS = "/rolltap/tools"
_PIPE = "/rolltap/verdict"


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
        result: What the agent left; None for the baseline, the untouched start.
        name: Of the session, or one derived from it.
        logs: Folder for the judge's output.
        changes: The agent's changes against the start: `judge` finds them.
        engine_urls: The policy's engines.
        ahead: The workspace of the first checkout for the result.
        network: The recorder, for a judge with `allow`; None where no rollout runs.
    """

    task: Task
    start: Start
    runtime: Runtime
    result: AgentResult | None
    name: str
    logs: Path
    changes: Changes = field(default_factory=Changes)
    engine_urls: Sequence[str] = ()
    ahead: "Ahead | None" = None
    network: JudgeNetwork | None = None

    @property
    def log(self) -> Path:
        """File for the judge's output."""
        return self.logs / f"{self.name}.judge.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A prepared checkout.

    Attributes:
        workspace: Folder of this machine with the changes and the tests.
        changes: The changes as they are there, with what was refused.
        out: Folder of this machine for a judge that runs outside of the box.
        tools: Folder in the box with the programs of `boxes/inside` as `rolltap_NAME.py`, for the
            judge to read.
        guarded: Path in the workspace -> stamp: the judge's own files, which no program may change.
        channel: For the verdict. `pipe` is its path in the box, at which our launchers open it.
        recorded: Variables with which programs reach the hosts of the judge.
    """

    job: JudgeJob
    box: Box
    workspace: Path
    changes: Changes
    out: Path
    tools: str
    channel: Channel
    pipe: str
    guarded: Mapping[str, Stamp | None] = field(default_factory=dict)
    recorded: Mapping[str, str] = field(default_factory=dict)

    def verdict(self, ended: str, limit: int = MAX_BYTES) -> bytes:
        """Return what was written to the channel. Raises `UnjudgedError`, which begins with
        `ended`, for no verdict."""
        self.channel.read()
        if self.channel.opened > 1:
            twice = f"its verdict was written {self.channel.opened} times"
            raise UnjudgedError(f"{ended}, and {twice}: write it once", forged_report=twice)
        if len(self.channel.content) > limit:
            raise UnjudgedError(f"{ended}, and its verdict has more than {limit >> 10} KiB")
        return bytes(self.channel.content)

    def rewritten(self) -> list[str]:
        """Return the judge's files in the workspace that were changed since it was made."""
        found: list[str] = []
        for path, before in self.guarded.items():
            if stamp(self.workspace, path) != before:
                found.append(path)
        return sorted(found)

    async def run(self, command: Sequence[str], env: Mapping[str, str], timeout: float) -> int:
        """Return the exit status of the judge's program. Raises `UnjudgedError`, and `OSError`
        without a box."""
        whole = {
            **clean_environment(Path(self.box.home), isolated=self.job.runtime.isolated),
            **self.job.task.env,
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
            **self.recorded,
        }
        program = command[0]
        try:
            ended = await self.box.run(command, env=whole, timeout=timeout, log=self.job.log)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES) or error.filename != program:
                raise  # a fault of this machine, or of its box
            why = f"the judge {program!r} could not be started: {error.strerror or error}"
            place = Path(self.box.workdir)
            is_for_the_agent = "/" in program and (place / program).is_relative_to(place)
            lacks = "" if is_for_the_agent else program
            raise UnjudgedError(why + self._not_shown(Path(program)), lacks=lacks) from error
        output = f"its output is in {self.job.log.name}"
        if ended.stopped == "timeout":
            raise UnjudgedError(f"the judge took more than {timeout:g} s; {output}")
        if ended.status is None:
            raise UnjudgedError(f"the judge was stopped at its limit of {ended.stopped}; {output}")
        if ended.status < 0:
            raise UnjudgedError(f"the judge was ended by signal {-ended.status}; {output}")
        return ended.status

    def _not_shown(self, program: Path) -> str:
        """Return which folder of a program the box does not show, as a sentence, or an empty text.

        A client of a service may have named the program: no path of this machine is looked at
        unless the box shows it.
        """
        runtime = self.job.runtime
        shown = (*SYSTEM, Path(self.box.workdir))
        of_box = any(program.is_relative_to(top) for top in shown)
        if not isinstance(runtime, HidingRuntime) or not program.is_absolute() or of_box:
            return ""
        layers = runtime.layers()
        if nearest(program, layers)[1]:
            program = program.resolve()
        if nearest(program, layers)[1]:
            return ""
        folder = program.parent
        if folder.name == "bin":
            folder = folder.parent
        advice = "name it with --tools DIR (tools in a recipe)"
        return f". A box does not show this machine's {folder}: {advice}"


class Ahead:
    """The workspace of a judge's checkout, laid out while the session runs, where no program of it
    can reach it."""

    def __init__(self, job: JudgeJob, spec: OneJudge) -> None:
        self._spec: OneJudge | None = spec
        self._laid = asyncio.create_task(_lay_out(job, spec))

    async def take(self, spec: OneJudge) -> tuple[Path, set[str]] | None:
        """Return what `_lay_out` returned to the first who asks, if it is for this judge and did
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


@asynccontextmanager
async def after_run(job: JudgeJob, spec: OneJudge) -> AsyncIterator[JudgeJob]:
    """Yield the job of what is left when the judge's `run` has ended, in a box without the judge's
    files and hosts.

    Raises as `open_checkout`.
    """
    if isinstance(spec, PytestJudge) or not spec.run:
        yield job
        return
    own: dict[str, object] = {
        "tests": None,
        "mounts": {},
        "writable": [],
        "reward_files": [],
        "allow": [],
    }
    alone = spec.model_copy(update=own)
    env = spec.env if isinstance(spec, CommandJudge) else {}
    async with open_checkout(replace(job, name=f"{job.name}.run"), alone) as checkout:
        await checkout.run(spec.run, env, spec.timeout)
        await checkout.box.settle()
        try:
            changes = await in_folder_thread(
                find_changes, job.start.folder, checkout.workspace, digest=job.start.digest
            )
        except TooMuchError as error:
            raise UnjudgedError(f"what {spec.run[0]!r} left cannot be judged: {error}") from error
        refused = {**checkout.changes.refused, **changes.refused}
        result = AgentResult(checkout.workspace, checkout.workspace.parent / "home")
        yield replace(job, result=result, changes=replace(changes, refused=refused))


@asynccontextmanager
async def open_checkout(job: JudgeJob, spec: OneJudge) -> AsyncIterator[Checkout]:
    """Yield a judge's checkout. Raises `UnjudgedError`, and `InputError` and `OSError` when it
    cannot be made."""
    laid = None
    if job.ahead is not None and job.result is not None:
        laid = await job.ahead.take(spec)
    folder, tests = laid or await _lay_out(job, spec)
    workspace = folder / "workspace"
    try:
        changes = await in_folder_thread(_apply, job, spec, workspace, tests)
        own = await in_folder_thread(_own_there, job, spec, workspace, tests)
        isolated = job.runtime.isolated
        async with (
            Channel(folder / "verdict") as channel,
            _open_box(job, spec, folder, own) as (box, recorded),
        ):
            yield Checkout(
                job=job,
                box=box,
                workspace=workspace,
                changes=changes,
                out=folder / "out",
                tools=_TOOLS if isolated else str(folder / "tools"),
                channel=channel,
                pipe=_PIPE if isolated else str(channel.path),
                guarded={path: stamp(workspace, path) for path in own},
                recorded=recorded,
            )
    finally:
        await run_to_end(remove_folder, folder)


async def _lay_out(job: JudgeJob, spec: OneJudge) -> tuple[Path, set[str]]:
    """Make the folder of a checkout, with a copy of the start and the task's tests over it.

    Returns it, and the paths of the tests. They come before the agent's changes, so that nothing of
    these is there yet when they are written.
    """
    beside = job.result.workspace.parent if job.result is not None else None
    folder = Path(tempfile.mkdtemp(prefix="judge-", dir=beside))
    try:
        return folder, await in_folder_thread(_lay_in, job, spec, folder)
    except BaseException:
        await run_to_end(remove_folder, folder)
        raise


def _lay_in(job: JudgeJob, spec: OneJudge, folder: Path) -> set[str]:
    """Fill the folder of a checkout, and return the paths of the task's tests."""
    for name in ("home", "out", "tools"):
        (folder / name).mkdir()
    for file in (LAUNCH, _REPORT):
        shutil.copy(file, folder / "tools" / f"rolltap_{file.name}")
    for place, _ in _writable(spec, folder):
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
    root = spec.tests
    entries = scan(root).entries
    if root.is_file():
        executable = os.access(root, os.X_OK)
        entries = {root.name: Entry("file", executable)}
        root = root.parent
    apply_changes(Changes(entries), root, workspace)
    return laid.union(_no_folders(entries))


def _no_folders(entries: Mapping[str, Entry]) -> Iterator[str]:
    for path, entry in entries.items():
        if entry.kind != "folder":
            yield path


def apply_patch(patch: str, folder: Path) -> None:
    """Apply a patch to a folder. Raises `InputError` when it does not fit."""
    text = patch.removesuffix("\n") + "\n"
    git("apply", "--whitespace=nowarn", "-", folder=folder, stdin=text)


def _apply(job: JudgeJob, spec: OneJudge, workspace: Path, tests: set[str]) -> Changes:
    """Apply the agent's changes to a workspace, and return those that were applied."""
    if job.result is None:
        return job.changes
    changes = select(job.changes, job.task, spec, tests, job.start.folder, job.result.workspace)
    try:
        apply_changes(changes, job.result.workspace, workspace)
    except OSError as error:
        if is_of_the_machine(error):
            raise
        raise UnjudgedError(f"what the agent left cannot be laid out: {error}") from error
    return changes


def _own_there(job: JudgeJob, spec: OneJudge, workspace: Path, laid: set[str]) -> list[str]:
    """Return the judge's own files in a prepared workspace, the task's `laid` tests and the listed
    ones first."""
    own = own_files(job.start.folder, spec) | laid
    own.intersection_update(scan(workspace).files)
    return sorted(own, key=lambda path: (path not in laid, matches(path, TEST_FILES), path))


def _writable(spec: OneJudge, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders that a command may write to, and their paths in the box."""
    if isinstance(spec, CommandJudge):
        for number, target in enumerate(spec.writable):
            yield folder / f"writable-{number}", target


def _mounts(job: JudgeJob, spec: OneJudge, folder: Path, own: Sequence[str]) -> list[Mount]:
    isolated = job.runtime.isolated
    pipe = folder / "verdict"
    tools = folder / "tools"
    mounts = [Mount(tools, _TOOLS if isolated else str(tools))]
    pipes = [_PIPE if isolated else str(pipe)]
    brought: Mapping[str, Path] = {}
    if isinstance(spec, CommandJudge):
        brought = spec.mounts
        pipes = spec.reward_files or pipes
    for target, source in brought.items():
        mounts.append(Mount(source.absolute(), target))
    for place, target in _writable(spec, folder):
        mounts.append(Mount(place, target, writable=True))
    for target in pipes:
        mounts.append(Mount(pipe, target))
    if isolated and not brought:  # what it brings may replace the start's
        mounts += read_only(folder / "workspace", job.task.workdir, own)
    return mounts


@asynccontextmanager
async def _open_box(
    job: JudgeJob, spec: OneJudge, folder: Path, own: Sequence[str]
) -> AsyncIterator[tuple[Box, Mapping[str, str]]]:
    """Yield the box of a judge, and the variables with which programs reach the hosts of its
    `allow`.

    Raises `InputError` for a judge with hosts where no recorder runs, `OSError`, and
    `RecorderError`: a verdict without the hosts would not be the judge's.
    """
    task = job.task
    isolated = job.runtime.isolated
    network = job.network
    box_spec = BoxSpec(
        name=folder.name,
        workspace=folder / "workspace",
        workdir=task.workdir,
        home=folder / "home",
        mounts=_mounts(job, spec, folder, own),
        image=task.image,
        limits=task.limits,
    )
    allow = [] if isinstance(spec, PythonJudge) else spec.allow
    if allow and isolated and network is None:
        raise InputError(
            f"task {task.id!r}: its judge may reach {allow[0]} ('allow'), and only the recorder"
            " of a rollout leads there: let a rollout judge it, or use a judge without hosts"
        )
    if not allow or network is None:
        async with job.runtime.box(box_spec) as box:
            yield box, {}
        return
    # a judge has no credentials of the session, and the next judge none of its own
    session_id = f"{job.name}/{folder.name}"
    proxy = await asyncio.to_thread(network.open_judge, session_id, allow)
    try:
        accept = partial(network.accept, session_id)
        certificates = CERTIFICATES if isolated else None
        mounts = box_spec.mounts
        if isolated:
            mounts = [*mounts, *proxy.mounts()]
        box_spec = replace(box_spec, mounts=mounts, proxy=proxy.address, accept=accept)
        async with job.runtime.box(box_spec) as box:
            yield box, proxy.environment(session_id, address=box.proxy, certificates=certificates)
    finally:
        await run_to_end(network.close_judge, session_id)
