"""The folders that sessions start from: pristine, without later git history, made once per task as
long as there is room for them."""

import asyncio
import shutil
import tempfile
import weakref
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.runtime import ImageRuntime, Runtime
from rolltap.trainer.boxes.watch import disk_bytes
from rolltap.trainer.concurrency import Once, in_folder_thread, run_to_end, submit_folder_work
from rolltap.trainer.folders import remove_folder
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
                        f"the runtime {self._runtime.name} has no images, and it starts in"
                        f" {task.image}"
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
