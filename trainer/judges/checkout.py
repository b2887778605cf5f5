"""The checkout that one judge works in: a workspace, a box, and a folder for what it writes. The
box has no network, unless the judge names hosts that it may reach."""

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.environment import CERTIFICATES, clean_environment
from rolltap.trainer.boxes.hiding import HidingRuntime, nearest
from rolltap.trainer.boxes.programs import SYSTEM
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Mount
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.changes import (
    AgentFolders,
    Changes,
    apply_changes,
    is_of_the_machine,
)
from rolltap.trainer.judges.channel import MAX_BYTES, Channel
from rolltap.trainer.judges.folders import TooMuchError, scan
from rolltap.trainer.judges.layout import JudgeJob, lay_out, writable_folders
from rolltap.trainer.judges.planted import select
from rolltap.trainer.judges.protected import OneJudge, Stamp, own_files, read_only, stamp
from rolltap.trainer.judges.verdict import UnjudgedError
from rolltap.trainer.tasks.content import TEST_FILES, matches
from rolltap.trainer.tasks.task import CommandJudge, PytestJudge, PythonJudge


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A prepared checkout.

    Attributes:
        workspace: Folder of this machine with the changes and the tests.
        changes: The changes as they are there, with what was refused.
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
            ended = await self.box.run(
                command,
                env=whole,
                timeout=timeout,
                log=self.job.log,
            )
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
            limit = f"the judge was stopped at its limit of {ended.stopped}"
            raise UnjudgedError(f"{limit}: raise it in the task's 'limits'; {output}")
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
            changes = await job.find_changes(checkout.workspace)
        except TooMuchError as error:
            raise UnjudgedError(f"what {spec.run[0]!r} left cannot be judged: {error}") from error
        refused = {**checkout.changes.refused, **changes.refused}
        result = AgentFolders(checkout.workspace, checkout.workspace.parent / "home")
        yield replace(job, folders=result, changes=replace(changes, refused=refused))


@asynccontextmanager
async def open_checkout(job: JudgeJob, spec: OneJudge) -> AsyncIterator[Checkout]:
    """Yield a judge's checkout. Raises `UnjudgedError`, and `InputError` and `OSError` when it
    cannot be made."""
    laid = None
    if job.ahead is not None and job.folders is not None:
        laid = await job.ahead.take(spec)
    folder, tests = laid or await lay_out(job, spec)
    workspace = folder / "workspace"
    try:
        changes = await in_folder_thread(
            _apply,
            job,
            spec,
            workspace,
            tests,
        )
        own = await in_folder_thread(
            _own_there,
            job,
            spec,
            workspace,
            tests,
        )
        async with (
            Channel(folder / "verdict") as channel,
            _open_box(job, spec, folder, own) as (box, recorded),
        ):
            yield Checkout(
                job=job,
                box=box,
                workspace=workspace,
                changes=changes,
                tools=_inside(job, folder / "tools"),
                channel=channel,
                pipe=_inside(job, channel.path),
                guarded={path: stamp(workspace, path) for path in own},
                recorded=recorded,
            )
    finally:
        await run_to_end(remove_folder, folder)


def _apply(
    job: JudgeJob,
    spec: OneJudge,
    workspace: Path,
    tests: set[str],
) -> Changes:
    """Apply the agent's changes to a workspace, and return those that were applied."""
    if job.folders is None:
        return job.changes
    changes = select(
        job.changes,
        job.task,
        spec,
        tests,
        job.start.folder,
        job.folders.workspace,
    )
    try:
        apply_changes(changes, job.folders.workspace, workspace)
    except OSError as error:
        if is_of_the_machine(error):
            raise
        raise UnjudgedError(f"what the agent left cannot be laid out: {error}") from error
    return changes


def _own_there(
    job: JudgeJob,
    spec: OneJudge,
    workspace: Path,
    laid: set[str],
) -> list[str]:
    """Return the judge's own files in a prepared workspace, the task's `laid` tests and the listed
    ones first."""
    own = own_files(job.start.folder, spec) | laid
    own.intersection_update(scan(workspace).files)
    return sorted(own, key=lambda path: (path not in laid, matches(path, TEST_FILES), path))


def _inside(job: JudgeJob, place: Path) -> str:
    """Return the path in the box of the judge's tools or its pipe."""
    return f"/rolltap/{place.name}" if job.runtime.isolated else str(place)


def _mounts(
    job: JudgeJob,
    spec: OneJudge,
    folder: Path,
    own: Sequence[str],
) -> list[Mount]:
    pipe = folder / "verdict"
    tools = folder / "tools"
    mounts = [Mount(tools, _inside(job, tools))]
    pipes = [_inside(job, pipe)]
    brought: Mapping[str, Path] = {}
    if isinstance(spec, CommandJudge):
        brought = spec.mounts
        pipes = spec.reward_files or pipes
    for target, source in brought.items():
        mounts.append(Mount(source.absolute(), target))
    for place, target in writable_folders(spec, folder):
        mounts.append(Mount(place, target, writable=True))
    for target in pipes:
        mounts.append(Mount(pipe, target))
    if job.runtime.isolated and not brought:  # what it brings may replace the start's
        mounts += read_only(folder / "workspace", job.task.workdir, own)
    return mounts


@asynccontextmanager
async def _open_box(
    job: JudgeJob,
    spec: OneJudge,
    folder: Path,
    own: Sequence[str],
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
        box_spec = replace(
            box_spec,
            mounts=mounts,
            proxy=proxy.address,
            accept=accept,
        )
        async with job.runtime.box(box_spec) as box:
            yield box, proxy.environment(session_id, address=box.proxy, certificates=certificates)
    finally:
        await run_to_end(network.close_judge, session_id)
