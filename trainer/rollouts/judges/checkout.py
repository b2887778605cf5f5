"""The checkout that one judge works in: a workspace, a box without network, and a folder for what it writes."""

import asyncio
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.trainer.concurrency import in_folder_thread, run_to_end, wait_for_end
from rolltap.trainer.rollouts.judges.changes import AgentResult, Changes, apply_changes, find_changes, is_of_the_machine
from rolltap.trainer.rollouts.judges.channel import MAX_BYTES, Channel
from rolltap.trainer.rollouts.judges.folders import opened, read_chunks, remove, scan, write_file
from rolltap.trainer.rollouts.judges.protected import OneJudge, Stamp, own_files, read_only, select, stamp
from rolltap.trainer.rollouts.judges.verdict import UnjudgedError
from rolltap.trainer.rollouts.runtimes import inside
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.rollouts.runtimes.runtime import Box, BoxSpec, Mount, Runtime, remove_folder
from rolltap.trainer.tasks.content import TEST_FILES, Start, matches
from rolltap.trainer.tasks.git import git
from rolltap.trainer.tasks.task import CommandJudge, PytestJudge, Task

logger = logging.getLogger(__name__)

LAUNCH, REPORT = (Path(inside.__path__[0], name) for name in ("launch.py", "report.py"))
_TOOLS, _PIPE = "/rolltap/tools", "/rolltap/verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeJob:
    """All that judging a session needs.

    Attributes:
        result: What the agent left; None for the baseline, the untouched start.
        name: Of the session, or one derived from it.
        logs: Folder for the judge's output.
        changes: The agent's changes against the start: `judge` finds them.
        engine_urls: The policy's engines.
        ahead: A checkout for the result, which is prepared already.
    """

    task: Task
    start: Start
    runtime: Runtime
    result: AgentResult | None
    name: str
    logs: Path
    changes: Changes = field(default_factory=Changes)
    engine_urls: Sequence[str] = ()
    ahead: "CheckoutAhead | None" = None

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
        tools: Folder in the box with the programs of `runtimes/inside` as `rolltap_NAME.py`, for the judge to read.
        guarded: Path in the workspace -> stamp: the judge's own files, which no program may change.
        channel: For the verdict. `pipe` is its path in the box, at which our launchers open it.
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

    def verdict(self, ended: str, limit: int = MAX_BYTES) -> bytes:
        """Return what was written to the channel. Raises `UnjudgedError`, which begins with `ended`, for no verdict."""
        self.channel.read()
        if self.channel.opened > 1:
            raise UnjudgedError(f"{ended}, and its verdict was written {self.channel.opened} times: write it once")
        if len(self.channel.content) > limit:
            raise UnjudgedError(f"{ended}, and its verdict has more than {limit >> 10} KiB")
        return bytes(self.channel.content)

    def rewritten(self) -> list[str]:
        """Return the judge's files in the workspace that were changed since it was made."""
        return sorted(path for path, before in self.guarded.items() if stamp(self.workspace, path) != before)

    async def run(self, command: Sequence[str], env: Mapping[str, str], timeout: float) -> int:
        """Return the exit status of the judge's program. Raises `UnjudgedError`, and `OSError` without a box."""
        clean = clean_environment(Path(self.box.home), isolated=self.job.runtime.isolated)
        whole = {**clean, **self.job.task.env, "PYTHONDONTWRITEBYTECODE": "1", **env}
        try:
            ended = await self.box.run(command, env=whole, timeout=timeout, log=self.job.log)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES) or error.filename != command[0]:
                raise  # a fault of this machine, or of its box
            reason = f"the judge {command[0]!r} could not be started: {error.strerror or error}"
            raise UnjudgedError(reason) from error
        output = f"its output is in {self.job.log.name}"
        if ended.stopped == "timeout":
            raise UnjudgedError(f"the judge took more than {timeout:g} s; {output}")
        if ended.status is None:
            raise UnjudgedError(f"the judge was stopped at its limit of {ended.stopped}; {output}")
        if ended.status < 0:
            raise UnjudgedError(f"the judge was ended by signal {-ended.status}; {output}")
        return ended.status


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A checkout without the agent's changes: `tests` are the paths of the task's tests in it, `own` the judge's."""

    spec: OneJudge
    folder: Path
    box: Box
    tools: str
    channel: Channel
    pipe: str
    tests: set[str]
    own: Sequence[str]


class CheckoutAhead:
    """A judge's checkout that is prepared while the session runs, where its programs cannot reach it."""

    def __init__(self, job: JudgeJob, spec: OneJudge) -> None:
        self._spec: OneJudge | None = spec
        self._prepared: asyncio.Future[_Prepared] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._hold(job, spec))

    async def _hold(self, job: JudgeJob, spec: OneJudge) -> None:
        async with _prepare_checkout(job, spec) as prepared:
            self._prepared.set_result(prepared)
            await self._ended.wait()

    async def take(self, spec: OneJudge) -> _Prepared | None:
        """Return the checkout to the first who asks, if it is for this judge and could be prepared."""
        if spec != self._spec:
            return None
        self._spec = None
        either: list[asyncio.Future[Any]] = [self._task, self._prepared]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._prepared.result() if self._prepared.done() else None

    async def close(self) -> None:
        """Remove it."""
        self._ended.set()
        if not self._prepared.done():
            self._task.cancel()
        cancelled = await wait_for_end(self._task)
        if not self._task.cancelled() and (error := self._task.exception()):
            logger.info("no checkout of a judge was prepared ahead: %s", error)  # the judge says it, if it fails there
        if cancelled:
            raise asyncio.CancelledError


@asynccontextmanager
async def open_checkout(job: JudgeJob, spec: OneJudge) -> AsyncIterator[Checkout]:
    """Yield a judge's checkout. Raises `UnjudgedError`, and `InputError` and `OSError` when it cannot be made."""
    async with AsyncExitStack() as stack:
        prepared = None
        if job.ahead is not None and job.result is not None:
            prepared = await job.ahead.take(spec)
        if prepared is None:
            prepared = await stack.enter_async_context(_prepare_checkout(job, spec))
        workspace, out = prepared.folder / "workspace", prepared.folder / "out"
        changes = await in_folder_thread(_apply, job, prepared, workspace)
        there = await in_folder_thread(_files, workspace)
        yield Checkout(
            job=job,
            box=prepared.box,
            workspace=workspace,
            changes=changes,
            out=out,
            tools=prepared.tools,
            channel=prepared.channel,
            pipe=prepared.pipe,
            guarded={path: stamp(workspace, path) for path in prepared.own if path in there},
        )


@asynccontextmanager
async def _prepare_checkout(job: JudgeJob, spec: OneJudge) -> AsyncIterator[_Prepared]:
    beside = job.result.workspace.parent if job.result is not None else None
    folder = Path(tempfile.mkdtemp(prefix="judge-", dir=beside))
    try:
        async with _fresh_checkout(job, spec, folder) as prepared:
            yield prepared
    finally:
        await run_to_end(remove_folder, folder)


@asynccontextmanager
async def _fresh_checkout(job: JudgeJob, spec: OneJudge, folder: Path) -> AsyncIterator[_Prepared]:
    workspace, home, out, tools = (folder / part for part in ("workspace", "home", "out", "tools"))
    for part in (home, out, tools):
        part.mkdir()
    for file in (LAUNCH, REPORT):
        shutil.copy(file, tools / f"rolltap_{file.name}")
    await in_folder_thread(job.start.copy_to, workspace)
    # before the agent's changes, so that nothing of these is there yet when they are written
    tests = await in_folder_thread(_lay_tests, job, spec, workspace)
    own = await in_folder_thread(_own_there, job, spec, workspace, tests)
    isolated = job.runtime.isolated
    pipe = folder / "verdict"
    tools_inside, pipe_inside = (_TOOLS, _PIPE) if isolated else (str(tools), str(pipe))
    mounts = [Mount(tools, tools_inside)]
    if isinstance(spec, CommandJudge):
        mounts += [Mount(source.absolute(), target) for target, source in spec.mounts.items()]
        for number, target in enumerate(spec.writable):
            (folder / f"writable-{number}").mkdir()
            mounts.append(Mount(folder / f"writable-{number}", target, writable=True))
        mounts += [Mount(pipe, target) for target in spec.reward_files]
    if not (isinstance(spec, CommandJudge) and spec.reward_files):
        mounts.append(Mount(pipe, pipe_inside))
    if isolated and not (isinstance(spec, CommandJudge) and spec.mounts):  # what it brings may replace the start's
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
    with Channel(pipe) as channel:
        async with job.runtime.box(box_spec) as box:
            yield _Prepared(
                spec=spec,
                folder=folder,
                box=box,
                tools=tools_inside,
                channel=channel,
                pipe=pipe_inside,
                tests=tests,
                own=own,
            )


def _files(workspace: Path) -> set[str]:
    return {path for path, entry in scan(workspace).entries.items() if entry.kind != "folder"}


def _own_there(job: JudgeJob, spec: OneJudge, workspace: Path, laid: set[str]) -> list[str]:
    """Return the judge's own files in a prepared workspace, the task's `laid` tests and the listed ones first."""
    own = (own_files(job.start.folder, job.task, spec) | laid) & _files(workspace)
    return sorted(own, key=lambda path: (path not in laid, matches(path, TEST_FILES), path))


def _apply(job: JudgeJob, prepared: _Prepared, workspace: Path) -> Changes:
    """Apply the agent's changes to a prepared workspace, and return those that were applied."""
    if job.result is None:
        return job.changes
    changes = select(job.changes, job.task, prepared.spec, prepared.tests, job.start.folder, job.result.workspace)
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
        patched = find_changes(job.start.folder, workspace)
        laid |= {*(path for path, entry in patched.changed.items() if entry.kind != "folder"), *patched.deleted}
    if spec.tests is not None:
        laid |= _lay(spec.tests, workspace)
    return laid


def _lay(tests: Path, workspace: Path) -> set[str]:
    """Copy a file, or what is in a folder, into a workspace, and return the files' paths. Follows no links there."""
    if tests.is_file():
        files = {tests.name: tests}
    else:
        files = {path: tests / path for path, entry in scan(tests).entries.items() if entry.kind != "folder"}
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
        git("apply", "--whitespace=nowarn", "-", folder=folder, stdin=patch.removesuffix("\n") + "\n")
    except InputError as error:
        raise UnjudgedError(f"the task's test_patch does not fit its start: {error}", broke=False) from error
