"""Trying a task: its untouched start, its solution and the standard cheats, each judged as what a
session left."""

import asyncio
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError, RolltapError
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Mount, Runtime
from rolltap.trainer.checks.cheats import CHEATS, Cheat, Ground
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.console import progress_bar
from rolltap.trainer.folders import remove_folder, scratch_folder
from rolltap.trainer.judges.changes import AgentFolders, find_changes
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.judges.command import last_line, quote_last_line
from rolltap.trainer.judges.folders import write_file
from rolltap.trainer.judges.judge import judge, on_copy
from rolltap.trainer.judges.layout import JudgeJob, apply_patch
from rolltap.trainer.judges.protected import judges_of, own_files, reachable_files
from rolltap.trainer.judges.verdict import Judged, best_reward
from rolltap.trainer.rollouts.check import build_images, fit_tasks, kept_check, why_not_tried
from rolltap.trainer.rollouts.preparation import Starts
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.task import LLMJudge, Task

_SOLVE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Weakness:
    """A cheat that earns more than the start: its reward, its changes as a diff, and what to set in
    the task."""

    cheat: str
    reward: float
    diff: str
    advice: str


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The result of trying a task.

    Attributes:
        task: Id of the task; empty for one that could not be loaded.
        start: Reward of the untouched start; None without one.
        solution: Reward of the task's own solution; None without one.
        tried: Names of the cheats that were tried.
        weaknesses: The cheats that earn more than the start.
        reachable: Files of the start that the judge's own files name and an agent could change: say
            `paths`. What the task's solution changes is left out.
        wrong: Faults of the start and the solution, and why the task could not be tried.
    """

    task: str
    start: float | None = None
    solution: float | None = None
    tried: tuple[str, ...] = ()
    weaknesses: tuple[Weakness, ...] = ()
    reachable: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.weaknesses and not self.wrong

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"passed": self.passed, **asdict(self)}


async def try_tasks(
    tasks: Sequence[Task],
    runtime: Runtime,
    *,
    concurrency: int,
    progress: bool,
) -> list[TaskCheck]:
    """Try tasks, and keep the results. A task that cannot be tried says why.

    `concurrency` is how many judgements run at the same time. Raises `InputError` for a runtime
    that does not work.
    """
    runtime.check()
    rooms = asyncio.Semaphore(concurrency)
    places = asyncio.Semaphore(concurrency)
    builds: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
    ended: list[str] = []

    async def attempt(task: Task) -> TaskCheck:
        async with rooms:
            found = await _try(task, runtime, work / task.id, places, builds)
        ended.append(task.id)
        advance("tasks", len(ended), len(tasks))
        return found

    with scratch_folder() as work, progress_bar(show=progress) as advance:
        return list(await asyncio.gather(*map(attempt, tasks)))


async def _try(
    task: Task,
    runtime: Runtime,
    work: Path,
    places: asyncio.Semaphore,
    builds: Mapping[str | None, asyncio.Lock],
) -> TaskCheck:
    """Try a task. `builds` has a lock for each image: one that several tasks have is built once."""
    try:
        (task,) = fit_tasks([task], runtime)
        why = why_not_tried(task, runtime)
        if why is not None:
            raise InputError(why)
        check_judges([task], "")
        digest = await asyncio.to_thread(task.digest)
        kept = await asyncio.to_thread(kept_check, task, digest, runtime.name)
        async with builds[task.image]:
            (task,) = await build_images([task], runtime, kept.parent, at_once=1)
        (work / "logs").mkdir(parents=True)
        start = await Starts(work / "starts", runtime).of(task)
        found = await _Trial(
            task,
            runtime,
            start,
            work,
            places,
        ).run()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found.to_json()), encoding="utf-8")
        return found
    except (RolltapError, OSError) as error:
        reason = str(error)
    except Exception as error:  # of one task; the others are tried
        reason = repr(error)
    finally:
        await run_to_end(remove_folder, work)
    return TaskCheck(task.id, wrong=(f"it could not be tried: {reason}",))


@dataclass(slots=True)
class _Trial:
    task: Task
    runtime: Runtime
    start: Start
    work: Path
    places: asyncio.Semaphore
    solved: list[str] = field(default_factory=list)
    """Files that the solution changed."""
    took: float = 0.0
    """Seconds of the last judgement."""

    async def run(self) -> TaskCheck:
        best = best_reward(self.task.effective_judge)
        start = await self.judge("start", {})
        if start.reward is None:
            why = f"the untouched start could not be judged: {start.unjudged}"
            return TaskCheck(self.task.id, wrong=(why,))
        short = max(10.0, 3 * self.took)
        wrong: list[str] = []
        if start.reward >= best:
            wrong.append(f"the untouched start earns {start.reward:g}, the best reward")
        solution = None
        if self.task.solution is not None or self.task.gold_patch:
            solution = await self.try_solution(wrong, best)
        ground = await in_folder_thread(self.ground)
        tried: list[Cheat] = []
        judgements = []
        for cheat in CHEATS:
            if changed := cheat.change(ground):
                seconds = short if cheat.hangs else None
                tried.append(cheat)
                judgements.append(self.judge(cheat.name, changed, seconds=seconds))
        weak: list[Weakness] = []
        for cheat, judged in zip(tried, await asyncio.gather(*judgements), strict=True):
            if judged.reward is not None and judged.reward > start.reward:
                diff = (self.logs / f"{cheat.name}.diff").read_text(encoding="utf-8")
                weak.append(Weakness(cheat.name, judged.reward, diff, cheat.advice))
        return TaskCheck(
            self.task.id,
            start=start.reward,
            solution=solution,
            tried=tuple(cheat.name for cheat in tried),
            weaknesses=tuple(weak),
            reachable=tuple(sorted(ground.reachable - set(self.solved))),
            wrong=tuple(wrong),
        )

    @property
    def logs(self) -> Path:
        """The folder of the judgements' logs and diffs."""
        return self.work / "logs"

    async def try_solution(self, wrong: list[str], best: float) -> float | None:
        """Return the reward of the task's solution.

        One that is not the best is added to `wrong`.
        """
        reward = None
        try:
            judged = await self.judge("solution", {})
            reward = judged.reward
            if reward is not None and reward >= best:
                return reward
            why = judged.unjudged or f"it earns {reward:g}, and the best is {best:g}"
            if last := last_line(self.logs / "solve.log"):
                why += f"; its script says: {last}"
        except InputError as error:
            why = str(error)
        wrong.append(f"the task's own solution does not solve it: {why}")
        return reward

    def ground(self) -> Ground:
        """Return the start as cheats see it.

        The agent's code is what the solution changes, or all but the judge's.
        """
        folder = self.start.folder
        files: list[str] = []
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not path.is_symlink() and ".git/" not in name:
                files.append(name)
        files.sort()
        own: set[str] = set()
        reached: set[str] = set()
        for spec in judges_of(self.task.effective_judge):
            if not isinstance(spec, LLMJudge):
                own.update(own_files(folder, spec))
                reached.update(reachable_files(folder, spec))
        code = [path for path in self.solved or files if path.endswith((".py", ".sh"))]
        code = [path for path in code if path not in own]
        return Ground(
            folder,
            files,
            own,
            code,
            reached,
        )

    async def judge(
        self,
        name: str,
        changed: Mapping[str, str],
        *,
        seconds: float | None = None,
    ) -> Judged:
        """Return the judgement of a session that left these changes, and of the task's solution if
        its name is `solution`."""
        start = JudgeJob(
            task=self.task,
            start=self.start,
            runtime=self.runtime,
            name=name,
            logs=self.logs,
        )
        async with self.places, on_copy(start, self.work) as (job, folders):
            workspace = folders.workspace
            for path, text in changed.items():
                executable = os.access(workspace / path, os.X_OK)
                write_file(workspace, path, [text.encode()], executable=executable)
            async with self.runtime.box(self.box_of(folders, name)) as box:
                if name == "solution":
                    await self.solve(box, workspace)
                await box.settle()
                began = time.monotonic()
                judged = Judged(unjudged="it hangs")
                with suppress(TimeoutError):
                    judged = await asyncio.wait_for(judge(job), seconds)
                self.took = time.monotonic() - began
            if judged.unjudged:  # the log goes with this trial
                judged = replace(judged, unjudged=quote_last_line(judged.unjudged, job.log))
            return judged

    def box_of(self, made: AgentFolders, name: str) -> BoxSpec:
        """Return the box of a judgement. Only that of the solution sees the solution."""
        mounts = []
        if name == "solution" and self.task.solution is not None:
            mounts.append(Mount(self.task.solution.absolute(), "/solution"))
        return BoxSpec(
            name=f"rolltap-{self.start.digest[:12]}-{time.monotonic_ns()}",
            workspace=made.workspace,
            workdir=self.task.workdir,
            home=made.home,
            mounts=mounts,
            image=self.task.image,
            limits=self.task.limits,
        )

    async def solve(self, box: Box, workspace: Path) -> None:
        """Apply the solution. Raises `InputError` for a patch that does not fit."""
        solution = self.task.solution
        if solution is None:
            await in_folder_thread(apply_patch, self.task.gold_patch, workspace)
        elif solution.is_file():
            await in_folder_thread(apply_patch, solution.read_text(encoding="utf-8"), workspace)
        elif (solution / "solve.sh").is_file():
            isolated = self.runtime.isolated
            folder = "/solution" if isolated else str(solution.absolute())
            await box.run(
                ["bash", f"{folder}/solve.sh"],
                env={**clean_environment(Path(box.home), isolated=isolated), **self.task.env},
                timeout=self.task.timeout or _SOLVE_SECONDS,
                log=self.logs / "solve.log",
            )
        else:
            copy = partial(shutil.copytree, symlinks=True, dirs_exist_ok=True)
            await in_folder_thread(copy, solution, workspace)
        changes = await in_folder_thread(find_changes, self.start.folder, workspace)
        self.solved = changes.files
