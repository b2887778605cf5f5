"""The worker, by which `rolltap rollout` and the training loop run groups of sessions into one run
folder."""

import asyncio
import gc
import reprlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import InputError, RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.hiding import HidingRuntime, private_paths
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.concurrency import Once, run_to_end, wait_for_end
from rolltap.trainer.console import Advance, plain_console, watched
from rolltap.trainer.descriptors import make_room
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.locks import rollout_lock, workplace
from rolltap.trainer.rollouts.check import build_images, check_engines, fit_tasks, warn_of_unchecked
from rolltap.trainer.rollouts.config import FREE_OPTIONS, RUNTIME_SETTINGS, RolloutConfig
from rolltap.trainer.rollouts.harness import Harness, Provenance
from rolltap.trainer.rollouts.preparation import SessionContext
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import (
    Group,
    Recorded,
    interrupted_sessions,
    key_parts,
    resume_lines,
)
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.rollouts.session import LocalNode, end_session
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionTable, load_sessions

_SWITCH_SECONDS = 0.0005
"""Time after which a thread gives way while sessions run. The event loop waits so long after each
system call while other threads copy folders and look at boxes; Python's own is 5 ms."""


class Worker:
    """Runs groups of sessions into the run folder `out`. A context manager, sync or async.

    It may be entered again when it has been left: a service does so when a recorder died.

    Entering takes the folder's lock, starts the recorder, and gives a row to the sessions that a
    killed rollout left without one. `harness` is a harness, the name of a preset, or the path of a
    `.toml` file; `runtime` a runtime of the caller's instead of the configuration's.

    Raises `InputError` for a wrong harness, runtime or option of the recorder. Entering raises
    `RunError` when another process runs sessions in the folder, what `Recorder` raises, and
    `OSError`.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        harness: Harness | str | Path,
        engine: str,
        model: str | Path,
        out: str | Path,
        runtime: Runtime | None = None,
    ) -> None:
        unused = config.model_fields_set & set(RUNTIME_SETTINGS)
        if runtime is not None and unused:
            fix = "give it to the constructor of your runtime"
            raise InputError(f"{min(unused)} is for runtimes that are chosen by name: {fix}")
        self.config = config
        self.runtime = runtime or config.make_runtime()
        self.harness = harness if isinstance(harness, Harness) else Harness.load(str(harness))
        self.recorder = Recorder(
            out,
            engine=engine,
            model=model,
            options=config.options(),
            processes=config.recorders,
        )
        self.context: SessionContext
        """Things that the sessions share. Only inside of the block."""

    def fit(self, tasks: Sequence[Task], private: Sequence[Path] = ()) -> list[Task]:
        """Return the tasks as the runtime runs them. Checks runtime, tasks, program and judges, and
        starts nothing.

        From here on the runtime's boxes hide what sessions must not see, `private` files too.
        Raises as `fit_tasks`, `check_judges` and `HidingRuntime.layers`, and `InputError` for what
        this machine lacks.
        """
        self.runtime.check()
        self.runtime.show(self.harness.program, self.harness.files)
        if isinstance(self.runtime, HidingRuntime):
            tools = self.runtime.tools
            private = [*private, *self.recorder.private_files()]
            self.runtime.hide(private_paths(self.recorder.path, tasks, private, tools))
            self.runtime.layers()
        fitting = fit_tasks(tasks, self.runtime, self.harness)
        if self.runtime.programs_here and not all(task.image for task in fitting):
            self.harness.require_program()
        check_judges(fitting, self.recorder.engine)
        return fitting

    async def build(self, tasks: Sequence[Task]) -> list[Task]:
        """Build the images of fitting tasks. Return the tasks that have theirs: see
        `build_images`."""
        logs = self.recorder.path / "logs"
        return await build_images(tasks, self.runtime, logs, at_once=self.config.concurrency)

    def weights(self, say: Callable[[str], None]) -> str:
        """Tell `say` what the engines serve, and return the version of their weights: see
        `check_engines`."""
        return check_engines(self.recorder, say)

    async def keys(self, tasks: Sequence[Task], weights: str) -> list[dict[str, str]]:
        """Return the parts of each task's key: see `keys_of`. Only inside of the block."""
        return await keys_of(tasks, self.context, weights)

    @property
    def digests(self) -> dict[str, str]:
        """Task id -> its digest, of those that were read. Only inside of the block."""
        return self.context.digests

    def silent(self) -> Collection[str]:
        """Return the URLs of the engines that do not answer."""
        return Engines(self.recorder.engine).silent()

    def __enter__(self) -> Self:
        self._evaluation = Once[str, SessionContext]()
        make_room(self.config.concurrency)
        with ExitStack() as stack:
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_SECONDS)
            stack.callback(gc.unfreeze)
            gc.freeze()  # a search of all that is loaded would stop the event loop for 0.2 to 0.3 s
            lock = rollout_lock(self.recorder.path, lambda: self.recorder.aborted)
            self.recorder.lock = stack.enter_context(lock)
            work = stack.enter_context(workplace())
            stack.enter_context(self.recorder)
            for session in interrupted_sessions(self.recorder.path):
                end_session(self.recorder, session, None)
            self.context = SessionContext(
                self.config, self.harness, self.runtime, self.recorder, work
            )
            judged = set()
            for session in load_sessions(self.recorder.path).values():
                if session.reward is not None and session.runtime == self.runtime.name:
                    judged.add(session.task_digest)
            self.context.judged = judged
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cleanup.__exit__(kind, value, traceback)

    async def __aenter__(self) -> Self:
        """Enter without blocking the event loop. Cancelling it leaves no process behind."""
        starting = asyncio.create_task(asyncio.to_thread(self.__enter__))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.recorder.abort_start()
            await wait_for_end(starting)
            if starting.exception() is None:
                await run_to_end(self.__exit__, *sys.exc_info())
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_to_end(self.__exit__, kind, value, traceback)

    def node(self, share: float = 0.0) -> LocalNode:
        """Return this process as a node. Only inside of the block.

        Groups that evaluate have the first `share` of the slots, one at least. They are recorded in
        the folder `EVALUATION` of the run, by a recorder of its own, which starts with the first of
        them and ends with the block. Such a group raises what entering raises.
        """

        async def evaluation() -> SessionContext:
            return await self._evaluation.get(EVALUATION, self._begin_evaluation)

        return LocalNode(self.config.slots(share), self.context, evaluation)

    async def _begin_evaluation(self) -> SessionContext:
        worker = Worker(
            self.config,
            harness=self.harness,
            engine=self.recorder.engine,
            model=self.recorder.model,
            out=self.recorder.path / EVALUATION,
        )
        worker.runtime = self.runtime
        await worker.__aenter__()
        self._cleanup.push(worker.__exit__)
        return worker.context

    @asynccontextmanager
    async def runner(self, advance: Advance, *, share: float = 0.0) -> AsyncIterator[GroupRunner]:
        """Open a runner for groups that come one after the other: see `GroupRunner`. Only inside of
        the block.

        Groups that evaluate have the first `share` of the slots, one at least, and those that the
        others leave. Leaving raises as `GroupRunner` and `attach`.
        """
        runner = GroupRunner(
            [],
            advance,
            retries=self.config.retries,
            give_up_after=self.config.give_up_after,
            silent=self.silent,
        )
        # sessions need their nodes until they have ended
        async with self.attach(runner, share=share), runner:
            yield runner

    @asynccontextmanager
    async def attach(self, runner: GroupRunner, *, share: float = 0.0) -> AsyncIterator[None]:
        """Run sessions of a runner here, which may be older than the worker's block. Only inside of
        that block.

        At its end the sessions that run here are stopped, and retried on other nodes. `share` is
        that of `runner`.
        """
        node = self.node(share)
        runner.add_node(node)
        try:
            yield
        finally:
            runner.remove_node(node, RecorderError("the recorder has ended"))
            await node.idle.wait()

    async def run(
        self,
        groups: Sequence[Group],
        *,
        policy_version: str | None = None,
        advance: Advance = lambda *_: None,
    ) -> list[Session]:
        """Run the sessions of groups. Return them group by group, all attempts, in the order in
        which they ended.

        `policy_version` is the version of sessions without a sampled token. Raises as
        `GroupRunner`. It may be called again, in another event loop too.
        """
        sessions: list[Session] = []
        async with self.runner(advance) as runner:
            results = [await runner.submit(group, policy_version) for group in groups]
            for result in results:
                sessions += await result
        return sessions


async def roll_out(
    worker: Worker,
    tasks: Sequence[Task],
    *,
    new_groups: bool = False,
    progress: bool = True,
) -> tuple[str, ...]:
    """Run the missing sessions of each task's newest group, or of a further one with `new_groups`.

    `worker` is not started yet. Returns the ids of the sessions in these groups, all attempts. Says
    on stderr what is resumed; `progress` shows this and a progress bar. Raises as
    `rolltap.rollout`.
    """
    run = worker.recorder.path
    fitting = await asyncio.to_thread(worker.fit, tasks)
    console = plain_console(quiet=not progress)
    weights = await asyncio.to_thread(worker.weights, console.print)
    async with worker:
        weights = f"{weights},{PolicyFile(run).read().version}"
        if any(task.build for task in fitting):
            console.print(f"building the images of tasks; {run / 'logs'} has the output")
        fitting = await worker.build(fitting)
        sessions = SessionTable(run)
        recorded = Recorded(sessions.refresh().values())
        keys = await worker.keys(fitting, weights)
        await asyncio.to_thread(warn_of_unchecked, fitting, worker.digests, worker.runtime)
        groups = []
        for task, key in zip(fitting, keys, strict=True):
            groups.append(recorded.group(task, key, worker.config.sessions, further=new_groups))
        missing = [recorded.missing(group) for group in groups]
        for line in resume_lines(run, recorded, groups, missing, further=new_groups):
            console.print(line)
        with watched(worker.silent, console) as advance:
            await worker.run(missing, advance=advance)
    ended = Recorded(sessions.refresh().values())
    ids: list[str] = []
    for group in groups:
        ids += [session.session_id for session in ended.attempts(group)]
    return tuple(ids)


def given_tasks(
    tasks: Sequence[Task] | str | Path, repositories: Path | None, refused: list[str] | None = None
) -> list[Task]:
    """Return the tasks of a list, or of a path as `load_tasks`. Raises `InputError`, also when two
    have the same id."""
    if isinstance(tasks, str | Path):
        return load_tasks(Path(tasks), repositories=repositories, refused=refused)
    if isinstance(tasks, Task):
        raise InputError("tasks is one task: give a list")
    if not tasks:
        raise InputError("the list of tasks is empty: give at least one")
    for task in tasks:
        if not isinstance(task, Task):
            fix = "give rolltap.Task objects, or the path of a task file"
            raise InputError(f"a task is {reprlib.repr(task)}: {fix}")
    for name, number in Counter(task.id for task in tasks).items():
        if number > 1:
            fix = "give each task an id of its own"
            raise InputError(f"{number} tasks have the id {name!r}: {fix}")
    return list(tasks)


async def keys_of(
    tasks: Sequence[Task], context: SessionContext, weights: str
) -> list[dict[str, str]]:
    """Return the parts of each task's key. `weights` names those of the engines and the published
    version.

    Asks for as many versions of programs at once as sessions run. Raises `InputError` of a task's
    path, and `OSError`.
    """
    places = asyncio.Semaphore(context.config.concurrency)

    async def key(task: Task) -> dict[str, str]:
        async with places:
            return key_parts(await key_values(task, context, weights))

    # none of them runs on after an error
    found = await asyncio.gather(*map(key, tasks), return_exceptions=True)
    keys = []
    for each in found:
        if isinstance(each, BaseException):
            raise each
        keys.append(each)
    return keys


async def key_values(task: Task, context: SessionContext, weights: str) -> dict[str, object]:
    """Return name -> JSON value of what decides the sessions of a task.

    Of an image that cannot be had nothing is known: its sessions cannot be run, and say why. Raises
    `OSError`.
    """
    digest = await context.digest(task)
    try:
        known = await context.provenances.of(task.image)
    except InputError:
        known = Provenance(preset_digest=context.harness.digest())
    model = Path(context.recorder.model)
    if model.exists():
        model = model.resolve()
    values: dict[str, object] = {
        "task": digest,
        "harness": known.preset_digest,
        "harness_version": known.harness_version,
        "program": known.program_digest,
        "image": known.image_digest,
        "runtime": context.runtime.name,
        "timeout": task.timeout or context.config.timeout,
        "model": str(model),
        "weights": weights,
    }
    for name, value in context.config.options().items():
        if name not in FREE_OPTIONS:
            values[name] = value
    return values
