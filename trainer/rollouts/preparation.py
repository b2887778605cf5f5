"""The preparation of sessions: the things that they share, their starts, and the box of each.

A start is the folder that sessions of a task start from: pristine, without later git history, made
once per task as long as there is room for it.
"""

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.runtime import Box, BoxSpec, ImageRuntime, Runtime
from rolltap.trainer.boxes.watch import disk_bytes
from rolltap.trainer.concurrency import Once, in_folder_thread, run_to_end, submit_folder_work
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.changes import AgentFolders
from rolltap.trainer.judges.judge import fault_on_start
from rolltap.trainer.judges.layout import JudgeJob
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness, Provenances
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.tasks.content import Start, content_digest, copy_content, is_bare
from rolltap.trainer.tasks.git import give_history, require_inside
from rolltap.trainer.tasks.task import Task

KEPT_BYTES = 16 << 30
"""Space on disk of the starts that are kept for later sessions of their tasks."""


class Starts:
    """The starts of a rollout's tasks, each made on first use.

    When the starts take more than `kept_bytes`, those that were used least recently are forgotten.
    Such a folder is removed when nobody holds its `Start` any more, and made again when it is
    asked for.

    Args:
        folder: For the starts: a place that no session sees.
        runtime: Copies workspaces out of images, if it has any.
        kept_bytes: Space on disk.
    """

    def __init__(self, folder: Path, runtime: Runtime, kept_bytes: float = KEPT_BYTES) -> None:
        self._folder = folder
        self._runtime = runtime
        self._kept_bytes = kept_bytes
        self._made: Once[str, Start] = Once()
        self._digests: dict[str, str] = {}
        """Task id -> digest of the start that its first sessions had."""
        self._kept: dict[str, tuple[Start, float]] = {}
        """Task id -> start and its bytes, least recently used first."""
        self._bytes = 0.0

    async def of(self, task: Task) -> Start:
        """Return the start of a task. Raises `InputError`, which names the task, and `OSError` for
        a full disk."""
        try:
            start = await self._made.get(task.id, lambda: self._make(task))
        except InputError as error:
            raise InputError(f"task {task.id!r}: {error}") from error
        if task.id in self._kept:
            self._kept[task.id] = self._kept.pop(task.id)
        self._forget_over_limit()
        return start

    def _forget_over_limit(self) -> None:
        while self._bytes > self._kept_bytes and len(self._kept) > 1:
            name = next(iter(self._kept))
            start, size = self._kept.pop(name)
            self._bytes -= size
            self._made.forget(name)
            unused = weakref.finalize(start, submit_folder_work, remove_folder, start.folder.parent)
            unused.atexit = False  # the whole folder is removed then

    async def _make(self, task: Task) -> Start:
        self._folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            start = await self._make_in(place, task)
            if self._digests.setdefault(task.id, start.digest) != start.digest:
                raise InputError(
                    "its start has changed since the first session of this rollout: leave its"
                    " folder alone while a rollout runs"
                )
            size = await in_folder_thread(disk_bytes, [place])
        except BaseException:
            await run_to_end(remove_folder, place)
            raise
        size = min(size, self._kept_bytes)  # one that cannot be counted has no size
        self._bytes += size
        self._kept[task.id] = start, size
        return start

    async def _make_in(self, place: Path, task: Task) -> Start:
        target = place / "start"
        source = place / "image"
        try:
            if task.workspace is not None:
                await in_folder_thread(make_start, task.workspace, target, task.commit)
            elif task.image is not None and not task.image_optional:
                if not isinstance(self._runtime, ImageRuntime):
                    raise InputError(
                        f"the task starts in the image {task.image}, and the runtime"
                        f" {self._runtime.name} has no images: use --runtime container"
                    )
                await in_folder_thread(self._runtime.copy_out, task.image, task.workdir, source)
                await in_folder_thread(_make_start_of_image, source, target, task.commit)
            else:
                target.mkdir(parents=True)
            await in_folder_thread(_add_files, task, target)
            return Start(target, await in_folder_thread(content_digest, target))
        finally:
            await asyncio.to_thread(remove_folder, source)


def make_start(source: Path, target: Path, commit: str | None) -> None:
    """Copy a workspace. Each git repository in it gets the history up to one commit, and nothing
    else.

    With a `commit` the files are those of the commit. Without, they are those of the folder, with
    changes that are not committed, and each history ends at what is checked out. Raises
    `InputError` for what cannot be had.
    """
    bare = is_bare(source)
    if commit is not None:
        if not bare and not (source / ".git").exists():
            raise InputError(f"{source} is not a git checkout, so it has no commit {commit}")
        give_history(source, target, commit, files=True)
        return
    if bare:
        raise InputError(f"{source} is a bare git repository: give 'commit'")
    for checkout in copy_content(source, target):
        give_history(source / checkout, target / checkout, None, files=False)


def _make_start_of_image(source: Path, target: Path, commit: str | None) -> None:
    """Do so with a workspace of an image: its files count, also those that its builder changed
    after the commit."""
    for checkout in copy_content(source, target, any_links=True):
        require_inside(source / checkout, source)
        give_history(
            source / checkout,
            target / checkout,
            commit if checkout == Path() else None,
            files=False,
        )
    if commit is not None and not (target / ".git").exists():
        raise InputError(f"the image has no git checkout, so it has no commit {commit}")


def _add_files(task: Task, target: Path) -> None:
    for name, source in task.files.items():
        place = target / name
        if source.is_dir():
            for checkout in copy_content(source, place):
                give_history(source / checkout, place / checkout, None, files=False)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


class SessionContext:
    """Things that the sessions of a worker share. They may be used in one event loop after another.

    `work` is the folder for what sessions need while they run. Raises `EngineError` when the
    harness needs the engine's context window and the engine does not tell it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        harness: Harness,
        runtime: Runtime,
        recorder: Recorder,
        work: Path,
    ) -> None:
        self.config = config
        self.harness = harness
        self.runtime = runtime
        self.recorder = recorder
        self.work = work
        self.starts = Starts(work / "starts", runtime)
        self.provenances = Provenances(harness, runtime, work)
        self.harness_env = harness.environment(recorder.engine)
        self.digests: dict[str, str] = {}
        """Task id -> the task's digest, which takes reading its folders."""
        self.judged: Collection[str] = ()
        """Digests of tasks whose judges have judged sessions of the run in this runtime."""
        self.faults = Once[str, str]()
        """Task id -> why its judge cannot judge the start; empty if it can."""
        self._reading = Once[str, str]()
        """Task id -> its digest, while it is read."""

    async def digest(self, task: Task) -> str:
        """Return the digest of a task, which is read once. Raises `InputError` for a path that
        cannot be read."""
        if task.id not in self.digests:
            read = partial(asyncio.to_thread, task.digest)
            self.digests[task.id] = await self._reading.get(task.id, read)
        return self.digests[task.id]


async def require_judge(context: SessionContext, job: JudgeJob) -> None:
    """Try the judge of a task on its start, once. Raises `InputError` if a program or module of it
    is not there.

    Raises as `judge`, too.
    """
    name = job.task.id
    if context.digests[name] in context.judged:
        return
    start = replace(job, name=name, folders=None)
    why = await context.faults.get(name, partial(fault_on_start, start))
    if why:
        raise InputError(f"task {name!r}: {why}")


@asynccontextmanager
async def prepared(
    context: SessionContext,
    session: Session,
    task: Task,
    folders: AgentFolders,
) -> AsyncIterator[tuple[JudgeJob, Box]]:
    """Yield the box of a session, with its workspace, and what its judge will need. Raises
    `OSError` and `InputError`.

    The copy and the box have a time limit of their own, which begins with the copy: to wait for a
    thread is no part of it. What sessions share has other limits: starts, versions and images.
    """
    recorder = context.recorder
    runtime = context.runtime
    seconds = context.config.preparing_timeout
    provenance = await context.provenances.of(task.image)
    provenance.set_in(session)
    start = await context.starts.of(task)
    job = JudgeJob(
        task=task,
        start=start,
        runtime=runtime,
        folders=folders,
        name=session.session_id,
        logs=recorder.path / "logs",
        engine_urls=recorder.engine.split(","),
        network=recorder,
    )
    await require_judge(context, job)
    proxy = recorder.proxy(session.session_id)
    spec = BoxSpec(
        name=f"rolltap-{folders.home.parent.name}",
        workspace=folders.workspace,
        workdir=task.workdir,
        home=folders.home,
        mounts=proxy.mounts() if runtime.isolated else (),
        image=task.image,
        limits=task.limits,
        proxy=proxy.address,
        accept=partial(recorder.accept, session.session_id),
    )
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)

    def begin() -> None:
        limit.reschedule(loop.time() + seconds)

    def copy() -> None:
        loop.call_soon_threadsafe(begin)
        folders.home.mkdir(parents=True)
        start.copy_to(folders.workspace)

    async with AsyncExitStack() as stack:
        try:
            async with limit:
                await in_folder_thread(copy)
                box = await stack.enter_async_context(runtime.box(spec))
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = f"it was not prepared within {seconds:g} s: raise --preparing-timeout"
            raise OSError(what) from error
        yield job, box
