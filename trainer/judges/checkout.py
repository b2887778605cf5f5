"""The checkout that one judge works in: a workspace, a box, and a folder for what it writes. The
box has no network, unless the judge names hosts that it may reach."""

import asyncio
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
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
from rolltap.trainer.judges.folders import (
    TooMuchError,
    opened,
    read_chunks,
    remove,
    scan,
    write_file,
)
from rolltap.trainer.judges.planted import select
from rolltap.trainer.judges.protected import OneJudge, Stamp, own_files, read_only, stamp
from rolltap.trainer.judges.verdict import UnjudgedError
from rolltap.trainer.tasks.content import TEST_FILES, Start, matches
from rolltap.trainer.tasks.git import git
from rolltap.trainer.tasks.task import CommandJudge, PytestJudge, PythonJudge, Task

LAUNCH, REPORT = (Path(inside.__path__[0], name) for name in ("launch.py", "report.py"))
_TOOLS, _PIPE = "/rolltap/tools", "/rolltap/verdict"


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
        return sorted(
            path for path, before in self.guarded.items() if stamp(self.workspace, path) != before
        )

    async def run(self, command: Sequence[str], env: Mapping[str, str], timeout: float) -> int:
        """Return the exit status of the judge's program. Raises `UnjudgedError`, and `OSError`
        without a box."""
        clean = clean_environment(Path(self.box.home), isolated=self.job.runtime.isolated)
        whole = {
            **clean,
            **self.job.task.env,
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
            **self.recorded,
        }
        try:
            ended = await self.box.run(command, env=whole, timeout=timeout, log=self.job.log)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES) or error.filename != command[0]:
                raise  # a fault of this machine, or of its box
            reason = f"the judge {command[0]!r} could not be started: {error.strerror or error}"
            lacks = "" if self._is_in_workspace(command[0]) else command[0]
            raise UnjudgedError(reason + self._not_shown(Path(command[0])), lacks=lacks) from error
        output = f"its output is in {self.job.log.name}"
        if ended.stopped == "timeout":
            raise UnjudgedError(f"the judge took more than {timeout:g} s; {output}")
        if ended.status is None:
            raise UnjudgedError(f"the judge was stopped at its limit of {ended.stopped}; {output}")
        if ended.status < 0:
            raise UnjudgedError(f"the judge was ended by signal {-ended.status}; {output}")
        return ended.status

    def _is_in_workspace(self, program: str) -> bool:
        """Return True for the path of a program that the agent may make."""
        place = Path(self.box.workdir)
        return "/" in program and (place / program).is_relative_to(place)

    def _not_shown(self, program: Path) -> str:
        """Return which folder of a program the box does not show, as a sentence, or an empty text.

        A client of a service may have named the program: no path of this machine is looked at
        unless the box shows it.
        """
        runtime = self.job.runtime
        of_box = any(program.is_relative_to(top) for top in (*SYSTEM, Path(self.box.workdir)))
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
        shown = "name it with --tools DIR (tools in a recipe)"
        return f". A box does not show this machine's {folder}: {shown}"


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
        return None if self._laid.cancelled() or self._laid.exception() else self._laid.result()

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
async def open_checkout(job: JudgeJob, spec: OneJudge) -> AsyncIterator[Checkout]:
    """Yield a judge's checkout. Raises `UnjudgedError`, and `InputError` and `OSError` when it
    cannot be made."""
    laid = await job.ahead.take(spec) if job.ahead is not None and job.result is not None else None
    folder, tests = laid or await _lay_out(job, spec)
    try:
        async with _fresh_checkout(job, spec, folder, tests) as checkout:
            yield checkout
    finally:
        await run_to_end(remove_folder, folder)


@asynccontextmanager
async def after_run(job: JudgeJob, spec: OneJudge) -> AsyncIterator[JudgeJob]:
    """Yield the job of what is left when the judge's `run` has ended, in a box without the judge's
    files and hosts.

    Raises as `open_checkout`.
    """
    if isinstance(spec, PytestJudge) or not spec.run:
        yield job
        return
    without: dict[str, object] = {"tests": None, "mounts": {}, "writable": []}
    without |= {"reward_files": [], "allow": []}
    alone = spec.model_copy(update=without)
    async with open_checkout(replace(job, name=f"{job.name}.run"), alone) as checkout:
        await checkout.run(
            spec.run, {} if isinstance(spec, PythonJudge) else spec.env, spec.timeout
        )
        await checkout.box.settle()
        result = AgentResult(checkout.workspace, checkout.workspace.parent / "home")
        try:
            changes = await in_folder_thread(
                find_changes, job.start.folder, result.workspace, digest=job.start.digest
            )
        except TooMuchError as error:
            raise UnjudgedError(f"what {spec.run[0]!r} left cannot be judged: {error}") from error
        refused = {**checkout.changes.refused, **changes.refused}
        yield replace(job, result=result, changes=replace(changes, refused=refused))


async def _lay_out(job: JudgeJob, spec: OneJudge) -> tuple[Path, set[str]]:
    """Make the folder of a checkout, with a copy of the start and the task's tests over it.

    Returns it, and the paths of the tests. They come before the agent's changes, so that nothing of
    these is there yet when they are written.
    """
    beside = job.result.workspace.parent if job.result is not None else None
    folder = Path(tempfile.mkdtemp(prefix="judge-", dir=beside))
    try:
        await in_folder_thread(job.start.copy_to, folder / "workspace")
        await in_folder_thread(_make_folders, spec, folder)
        return folder, await in_folder_thread(_lay_tests, job, spec, folder / "workspace")
    except BaseException:
        await run_to_end(remove_folder, folder)
        raise


def _make_folders(spec: OneJudge, folder: Path) -> None:
    """Make the folders of a checkout beside its workspace."""
    for name in ("home", "out", "tools"):
        (folder / name).mkdir()
    for file in (LAUNCH, REPORT):
        shutil.copy(file, folder / "tools" / f"rolltap_{file.name}")
    if isinstance(spec, CommandJudge):
        for number in range(len(spec.writable)):
            (folder / f"writable-{number}").mkdir()


@asynccontextmanager
async def _fresh_checkout(
    job: JudgeJob, spec: OneJudge, folder: Path, tests: set[str]
) -> AsyncIterator[Checkout]:
    workspace, home, out, tools = (folder / part for part in ("workspace", "home", "out", "tools"))
    changes = await in_folder_thread(_apply, job, spec, workspace, tests)
    own = await in_folder_thread(_own_there, job, spec, workspace, tests)
    isolated = job.runtime.isolated
    pipe = folder / "verdict"
    tools_inside, pipe_inside = (_TOOLS, _PIPE) if isolated else (str(tools), str(pipe))
    mounts = [Mount(tools, tools_inside)]
    if isinstance(spec, CommandJudge):
        mounts += [Mount(source.absolute(), target) for target, source in spec.mounts.items()]
        for number, target in enumerate(spec.writable):
            mounts.append(Mount(folder / f"writable-{number}", target, writable=True))
        mounts += [Mount(pipe, target) for target in spec.reward_files]
    if not (isinstance(spec, CommandJudge) and spec.reward_files):
        mounts.append(Mount(pipe, pipe_inside))
    if isolated and not (
        isinstance(spec, CommandJudge) and spec.mounts
    ):  # what it brings may replace the start's
        mounts += read_only(workspace, job.task.workdir, own)
    box_spec = BoxSpec(
        name=folder.name,
        workspace=workspace,
        workdir=job.task.workdir,
        home=home,
        mounts=mounts,
        image=job.task.image,
        limits=job.task.limits,
    )
    # a judge has no credentials of the session, and the next judge none of its own
    session_id = f"{job.name}/{folder.name}"
    async with (
        Channel(pipe) as channel,
        _way_to_hosts(job, spec, session_id, box_spec) as (with_hosts, proxy),
        job.runtime.box(with_hosts) as box,
    ):
        recorded: Mapping[str, str] = {}
        if proxy is not None:
            certificates = CERTIFICATES if isolated else None
            recorded = proxy.environment(session_id, address=box.proxy, certificates=certificates)
        yield Checkout(
            job=job,
            box=box,
            workspace=workspace,
            changes=changes,
            out=out,
            tools=tools_inside,
            channel=channel,
            pipe=pipe_inside,
            guarded={path: stamp(workspace, path) for path in own},
            recorded=recorded,
        )


@asynccontextmanager
async def _way_to_hosts(
    job: JudgeJob, spec: OneJudge, session_id: str, box: BoxSpec
) -> AsyncIterator[tuple[BoxSpec, Proxy | None]]:
    """Yield the box of a judge with the way to the hosts of its `allow`, and the recorder; without
    hosts, None.

    Raises `InputError` for a judge with hosts where no recorder runs, `OSError`, and
    `RecorderError`: a verdict without the hosts would not be the judge's.
    """
    allow = [] if isinstance(spec, PythonJudge) else spec.allow
    if not allow or (job.network is None and not job.runtime.isolated):
        yield box, None
        return
    if job.network is None:
        raise InputError(
            f"task {job.task.id!r}: its judge may reach {allow[0]} ('allow'), and only the recorder"
            " of a rollout leads there: let a rollout judge it, or use a judge without hosts"
        )
    proxy = await asyncio.to_thread(job.network.open_judge, session_id, allow)
    try:
        certificates = proxy.mounts() if job.runtime.isolated else []
        accept = partial(job.network.accept, session_id)
        mounts = [*box.mounts, *certificates]
        yield replace(box, mounts=mounts, proxy=proxy.address, accept=accept), proxy
    finally:
        await run_to_end(job.network.close_judge, session_id)


def _own_there(job: JudgeJob, spec: OneJudge, workspace: Path, laid: set[str]) -> list[str]:
    """Return the judge's own files in a prepared workspace, the task's `laid` tests and the listed
    ones first."""
    there = {*scan(workspace).files}
    own = own_files(job.start.folder, spec) | laid
    return sorted(own & there, key=lambda path: (path not in laid, matches(path, TEST_FILES), path))


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


def _lay_tests(job: JudgeJob, spec: OneJudge, workspace: Path) -> set[str]:
    """Lay the task's tests over a copy of the start, and return their paths."""
    laid: set[str] = set()
    if isinstance(spec, PytestJudge) and spec.test_patch:
        _apply_patch(spec.test_patch, workspace)
        patched = find_changes(job.start.folder, workspace, digest=job.start.digest)
        laid |= {
            *(path for path, entry in patched.changed.items() if entry.kind != "folder"),
            *patched.deleted,
        }
    if spec.tests is not None:
        laid |= _lay(spec.tests, workspace)
    return laid


def _lay(tests: Path, workspace: Path) -> set[str]:
    """Copy a file, or what is in a folder, into a workspace, and return the files' paths. Follows
    no links there."""
    files = {path: tests / path for path in scan(tests).files}
    if tests.is_file():
        files = {tests.name: tests}
    for path, source in files.items():
        if source.is_symlink():
            parent, _, name = path.rpartition("/")
            with opened(workspace, parent, create=True) as folder:
                remove(folder, name)
                os.symlink(source.readlink(), name, dir_fd=folder)
        else:
            with opened(source.parent.resolve()) as folder:
                chunks = read_chunks(folder, source.name)
                write_file(workspace, path, chunks, executable=os.access(source, os.X_OK))
    return set(files)


def _apply_patch(patch: str, folder: Path) -> None:
    try:
        git(
            "apply",
            "--whitespace=nowarn",
            "-",
            folder=folder,
            stdin=patch.removesuffix("\n") + "\n",
        )
    except InputError as error:
        raise UnjudgedError(
            f"the task's test_patch does not fit its start: {error}", broke=False
        ) from error
