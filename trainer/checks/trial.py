"""Trying a task: its untouched start, its solution and the standard cheats, each judged as what a session left."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError, RolltapError
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Mount, Runtime, remove_folder, scratch_folder
from rolltap.trainer.checks.cheats import CHEATS, Ground
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.console import progress_bar
from rolltap.trainer.judges.changes import AgentResult, find_changes
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.judges.checkout import JudgeJob
from rolltap.trainer.judges.command import last_line, quote_last_line
from rolltap.trainer.judges.folders import write_file
from rolltap.trainer.judges.judge import judge
from rolltap.trainer.judges.protected import judges_of, own_files, reachable_files
from rolltap.trainer.judges.verdict import Judged, best_reward
from rolltap.trainer.rollouts.check import fit_tasks, kept_check
from rolltap.trainer.rollouts.workspace import Starts
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.git import git
from rolltap.trainer.tasks.task import LLMJudge, Task

_SOLVE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Weakness:
    """A cheat that earns more than the start: its reward, its changes as a diff, and what to set in the task."""

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
        reachable: Files of the start that the judge's own files name and an agent could change: say `paths`. What the
            task's solution changes is left out.
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


async def try_tasks(tasks: Sequence[Task], runtime: Runtime, *, concurrency: int, progress: bool) -> list[TaskCheck]:
    """Try tasks, and keep the results. A task that cannot be tried says why.

    `concurrency` is how many judgements run at the same time. Raises `InputError` for a runtime that does not work.
    """
    runtime.check()
    rooms, places = asyncio.Semaphore(concurrency), asyncio.Semaphore(concurrency)
    ended: list[str] = []

    async def attempt(task: Task) -> TaskCheck:
        async with rooms:
            found = await _try(task, runtime, work / task.id, places)
        ended.append(task.id)
        advance("tasks", len(ended), len(tasks))
        return found

    with scratch_folder() as work, progress_bar(show=progress) as advance:
        return list(await asyncio.gather(*map(attempt, tasks)))


async def _try(task: Task, runtime: Runtime, work: Path, places: asyncio.Semaphore) -> TaskCheck:
    try:
        (task,) = fit_tasks([task], runtime)
        if any(isinstance(spec, LLMJudge) for spec in judges_of(task.effective_judge)):
            raise InputError("a model judges it, and these cheats are for programs: read how it judged a few sessions")
        check_judges([task], "")
        kept = await asyncio.to_thread(lambda: kept_check(task, task.digest(), runtime.name))
        (work / "logs").mkdir(parents=True)
        found = await _Trial(task, runtime, await Starts(work / "starts", runtime).of(task), work, places).run()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found.to_json()), encoding="utf-8")
        return found
    except Exception as error:  # of one task; the others are tried
        reason = str(error) if isinstance(error, RolltapError | OSError) else repr(error)
        return TaskCheck(task.id, wrong=(f"it could not be tried: {reason}",))
    finally:
        await run_to_end(remove_folder, work)


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
        found = TaskCheck(self.task.id)
        start = await self.judge("start", {})
        short = max(10.0, 3 * self.took)
        if start.reward is None:
            return replace(found, wrong=(f"the untouched start could not be judged: {start.unjudged}",))
        if start.reward >= best:
            found = replace(found, wrong=(f"the untouched start earns {start.reward:g}, the best reward",))
        found = replace(found, start=start.reward)
        if self.task.solution is not None or self.task.gold_patch:
            found = await self.try_solution(found, best)
        ground = await in_folder_thread(self.ground)
        planned = [(cheat, changed) for cheat in CHEATS if (changed := cheat.change(ground))]
        judged = await asyncio.gather(
            *(self.judge(cheat.name, changed, seconds=short if cheat.hangs else None) for cheat, changed in planned)
        )
        logs = self.work / "logs"
        weak = [
            Weakness(cheat.name, result.reward, (logs / f"{cheat.name}.diff").read_text(encoding="utf-8"), cheat.advice)
            for (cheat, _), result in zip(planned, judged, strict=True)
            if result.reward is not None and result.reward > start.reward
        ]
        reached = sorted(ground.reachable - {*self.solved})
        tried = tuple(cheat.name for cheat, _ in planned)
        return replace(found, tried=tried, weaknesses=tuple(weak), reachable=tuple(reached))

    async def try_solution(self, found: TaskCheck, best: float) -> TaskCheck:
        log = self.work / "logs" / "solve.log"
        try:
            judged = await self.judge("solution", {})
            why = judged.unjudged or f"it earns {judged.reward:g}, and the best is {best:g}"
            if last := last_line(log):
                why += f"; its script says: {last}"
            found = replace(found, solution=judged.reward)
            if judged.reward is not None and judged.reward >= best:
                return found
        except InputError as error:
            why = str(error)
        return replace(found, wrong=(*found.wrong, f"the task's own solution does not solve it: {why}"))

    def ground(self) -> Ground:
        """Return the start as cheats see it. The agent's code is what the solution changes, or all but the judge's."""
        folder = self.start.folder
        paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        files = sorted(name for path in paths if ".git/" not in (name := path.relative_to(folder).as_posix()))
        specs = [spec for spec in judges_of(self.task.effective_judge) if not isinstance(spec, LLMJudge)]
        own = set[str]().union(*(own_files(folder, self.task, spec) for spec in specs))
        reached = set[str]().union(*(reachable_files(folder, self.task, spec) for spec in specs))
        code = [path for path in self.solved or files if path.endswith((".py", ".sh")) and path not in own]
        return Ground(folder, files, own, code, reached)

    async def judge(self, name: str, changed: Mapping[str, str], *, seconds: float | None = None) -> Judged:
        """Return the judgement of a session that left these changes; of one named `solution`, the solution's."""
        folder = self.work / name.replace(" ", "-")
        made = AgentResult(folder / "workspace", folder / "home")
        solution = self.task.solution if name == "solution" else None
        spec = BoxSpec(
            name=f"rolltap-{self.start.digest[:12]}-{time.monotonic_ns()}",
            workspace=made.workspace,
            workdir=self.task.workdir,
            home=made.home,
            mounts=[Mount(solution.absolute(), "/solution")] if solution else (),
            image=self.task.image,
            limits=self.task.limits,
        )
        job = JudgeJob(
            task=self.task, start=self.start, runtime=self.runtime, result=made, name=name, logs=self.work / "logs"
        )
        async with self.places:
            try:
                made.home.mkdir(parents=True)
                await in_folder_thread(self.start.copy_to, made.workspace)
                for path, text in changed.items():
                    executable = os.access(made.workspace / path, os.X_OK)
                    write_file(made.workspace, path, iter([text.encode()]), executable=executable)
                async with self.runtime.box(spec) as box:
                    if name == "solution":
                        await self.solve(box, made.workspace)
                    await box.settle()
                    began = time.monotonic()
                    judged = Judged(unjudged="it hangs")
                    with suppress(TimeoutError):
                        judged = await asyncio.wait_for(judge(job), seconds)
                    self.took = time.monotonic() - began
                    if judged.unjudged:  # the log goes with this trial
                        why = quote_last_line(judged.unjudged, job.log)
                        judged = replace(judged, unjudged=why)
                    return judged
            finally:
                await run_to_end(remove_folder, folder)

    async def solve(self, box: Box, workspace: Path) -> None:
        """Apply the solution. Raises `InputError` for a patch that does not fit."""
        solution = self.task.solution
        if solution is None or solution.is_file():
            patch = self.task.gold_patch if solution is None else solution.read_text(encoding="utf-8")
            await in_folder_thread(git, "apply", "--whitespace=nowarn", "-", folder=workspace, stdin=patch + "\n")
        elif (solution / "solve.sh").is_file():
            folder = "/solution" if self.runtime.isolated else str(solution.absolute())
            env = {**clean_environment(Path(box.home), isolated=self.runtime.isolated), **self.task.env}
            log, seconds = self.work / "logs" / "solve.log", self.task.timeout or _SOLVE_SECONDS
            await box.run(["bash", f"{folder}/solve.sh"], env=env, timeout=seconds, log=log)
        else:
            await in_folder_thread(shutil.copytree, solution, workspace, symlinks=True, dirs_exist_ok=True)
        self.solved = (await in_folder_thread(find_changes, self.start.folder, workspace)).files
