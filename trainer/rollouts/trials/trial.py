"""Trying a task: its untouched start, its own solution, and the standard cheats, each judged as a session would be."""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rolltap.addons.errors import InputError, RolltapError
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.console import progress_bar
from rolltap.trainer.rollouts.check import fit_tasks, kept_check
from rolltap.trainer.rollouts.judges.changes import AgentResult, find_changes
from rolltap.trainer.rollouts.judges.check import check_judges
from rolltap.trainer.rollouts.judges.checkout import JudgeJob
from rolltap.trainer.rollouts.judges.command import read_end
from rolltap.trainer.rollouts.judges.judge import judge
from rolltap.trainer.rollouts.judges.protected import own_files
from rolltap.trainer.rollouts.judges.verdict import Judged
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.rollouts.runtimes.runtime import Box, BoxSpec, Mount, Runtime, remove_folder, scratch_folder
from rolltap.trainer.rollouts.trials.cheats import CHEATS, Changes, Cheat, Ground
from rolltap.trainer.rollouts.workspace import Starts
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.git import git
from rolltap.trainer.tasks.task import Judge, LLMJudge, SeveralJudges, Task

logger = logging.getLogger(__name__)

_CODE = (".py", ".sh")
_SOLVE = "solve.sh"
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
    """What became of trying a task.

    Attributes:
        task: Id of the task; empty for one that could not be loaded.
        digest: The task's digest, as the runtime runs it; empty when it could not be tried.
        start: Reward of the untouched start; None without one.
        solution: Reward of the task's own solution; None without one.
        has_solution: Whether the task has a solution.
        tried: Names of the cheats that were tried.
        weaknesses: Cheats that earn more than the start.
        wrong: What is wrong with the start or the solution, or why the task could not be tried.
    """

    task: str
    digest: str = ""
    start: float | None = None
    solution: float | None = None
    has_solution: bool = False
    tried: tuple[str, ...] = ()
    weaknesses: tuple[Weakness, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.weaknesses and not self.wrong

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"passed": self.passed, **asdict(self)}


def best_reward(judge: Judge) -> float:
    """Return the reward of a solved task."""
    return 1.0


async def try_tasks(tasks: Sequence[Task], runtime: Runtime, *, concurrency: int, progress: bool) -> list[TaskCheck]:
    """Try tasks, and keep what became of each. A task that cannot be tried says why; it ends nothing.

    `concurrency` is how many judgements run at the same time. Raises `InputError` for a runtime that does not work.
    """
    runtime.check()
    places, rooms = asyncio.Semaphore(concurrency), asyncio.Semaphore(concurrency)
    done = 0

    async def attempt(task: Task, work: Path) -> TaskCheck:
        nonlocal done
        async with rooms:
            found = await _try(task, runtime, work / task.id, places)
        done += 1
        advance(f"tasks: {task.id}", done, len(tasks))
        return found

    with scratch_folder() as work, progress_bar(show=progress) as advance:
        advance("tasks", 0, len(tasks))
        return list(await asyncio.gather(*(attempt(task, work) for task in tasks)))


async def _try(task: Task, runtime: Runtime, work: Path, places: asyncio.Semaphore) -> TaskCheck:
    try:
        (task,) = fit_tasks([task], runtime)
        task = task.model_copy(update={"judge": _without_models(task.effective_judge), "evaluate": []})
        check_judges([task], "")
        found = TaskCheck(task.id, await asyncio.to_thread(task.digest))
        start = await Starts(work / "starts", runtime).of(task)
        found = await _Trial(task, runtime, start, work, places).run(found)
        _keep(found, runtime)
        return found
    except (RolltapError, OSError) as error:
        return TaskCheck(task.id, wrong=(f"it could not be tried: {error}",))
    finally:
        await run_to_end(remove_folder, work)


def _keep(found: TaskCheck, runtime: Runtime) -> None:
    file = kept_check(found.digest)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"runtime": runtime.name, **found.to_json()}))
    except OSError as error:
        logger.warning("what became of trying task %s is not kept: %s", found.task, error)


def _without_models(spec: Judge) -> Judge:
    """Return a judge without the models among several. Raises `InputError` for a model alone."""
    if isinstance(spec, LLMJudge):
        raise InputError("a model judges it, and the cheats are for programs: read what it says of a few sessions")
    if isinstance(spec, SeveralJudges):
        programs = [one for one in spec.judges if not isinstance(one.judge, LLMJudge)]
        programs = [one.model_copy(update={"judge": _without_models(one.judge)}) for one in programs]
        return spec.model_copy(update={"judges": programs}) if programs else _without_models(spec.judges[0].judge)
    return spec


def _hurried(spec: Judge, seconds: float) -> Judge:
    """Return a judge that has at most so many seconds."""
    if isinstance(spec, SeveralJudges):
        judges = [one.model_copy(update={"judge": _hurried(one.judge, seconds)}) for one in spec.judges]
        return spec.model_copy(update={"judges": judges})
    return spec.model_copy(update={"timeout": min(seconds, spec.timeout)})


def _own(start: Path, task: Task, spec: Judge) -> set[str]:
    if isinstance(spec, SeveralJudges):
        return set().union(*(_own(start, task, one.judge) for one in spec.judges))
    return set() if isinstance(spec, LLMJudge) else own_files(start, task, spec)


@dataclass(slots=True)
class _Trial:
    task: Task
    runtime: Runtime
    start: Start
    work: Path
    places: asyncio.Semaphore
    solved: list[str] = field(default_factory=list)
    """Files that the solution changed."""
    said: str = ""
    """How the solution's program ended."""

    async def run(self, found: TaskCheck) -> TaskCheck:
        spec, best = self.task.effective_judge, best_reward(self.task.effective_judge)
        began = time.monotonic()
        start = await self.judge("start")
        seconds = max(10.0, 3 * (time.monotonic() - began))
        wrong = []
        if start.reward is None:
            return replace(found, wrong=(f"the untouched start could not be judged: {start.unjudged}",))
        if start.reward >= best:
            wrong.append(f"the untouched start earns {start.reward:g}, and the best is {best:g}: mend the judge")
        has_solution = self.task.solution is not None or bool(self.task.gold_patch)
        solution = None
        if has_solution:
            try:
                judged = await self.judge("solution", solve=True)
                solution = judged.reward
                if solution is None or solution < best:
                    why = judged.unjudged or f"it earns {solution:g}, and the best is {best:g}"
                    wrong.append(f"the task's own solution does not solve it: {why}{self.said}")
            except InputError as error:
                wrong.append(f"the task's own solution cannot be applied: {error}")
        ground = await in_folder_thread(self.ground)
        hurried = self.task.model_copy(update={"judge": _hurried(spec, seconds)})
        planned = [(cheat, changes) for cheat in CHEATS if (changes := cheat.change(ground))]
        tried = await asyncio.gather(
            *(
                self.judge(f"cheat-{number}", changes, hurried if cheat.hangs else None)
                for number, (cheat, changes) in enumerate(planned)
            )
        )
        weak = (
            self.weakness(number, cheat, judged.reward)
            for number, ((cheat, _), judged) in enumerate(zip(planned, tried, strict=True))
            if judged.reward is not None and judged.reward > start.reward
        )
        return replace(
            found,
            start=start.reward,
            solution=solution,
            has_solution=has_solution,
            tried=tuple(cheat.name for cheat, _ in planned),
            weaknesses=tuple(weak),
            wrong=tuple(wrong),
        )

    def weakness(self, number: int, cheat: Cheat, reward: float) -> Weakness:
        diff = (self.work / "logs" / f"cheat-{number}.diff").read_text(encoding="utf-8")
        return Weakness(cheat.name, reward, diff, cheat.advice)

    def ground(self) -> Ground:
        """Return the start as cheats see it. The agent's code is what the solution changes, or all but the judge's."""
        folder = self.start.folder
        paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        files = sorted(name for path in paths if ".git/" not in (name := path.relative_to(folder).as_posix()))
        own = _own(folder, self.task, self.task.effective_judge)
        code = [path for path in self.solved or files if path.endswith(_CODE) and path not in own]
        return Ground(folder, files, sorted(own), code)

    async def judge(
        self, name: str, changes: Changes = MappingProxyType({}), task: Task | None = None, *, solve: bool = False
    ) -> Judged:
        """Return the judgement of a session that left these changes of the start, or the solution's."""
        folder = self.work / name
        made = AgentResult(folder / "workspace", folder / "home")
        logs = self.work / "logs"
        async with self.places:
            try:
                made.home.mkdir(parents=True)
                logs.mkdir(exist_ok=True)
                await in_folder_thread(self.start.copy_to, made.workspace)
                _write(made.workspace, changes)
                async with self.runtime.box(self.spec(name, made)) as box:
                    if solve:
                        await self.solve(box, made.workspace)
                    await box.settle()
                    job = JudgeJob(
                        task=task or self.task,
                        start=self.start,
                        runtime=self.runtime,
                        result=made,
                        name=name,
                        logs=logs,
                        session_box=box,
                    )
                    return await judge(job)
            finally:
                await run_to_end(remove_folder, folder)

    def spec(self, name: str, made: AgentResult) -> BoxSpec:
        solution = self.task.solution
        return BoxSpec(
            name=f"{self.work.parent.name}-{self.task.id}-{name}",
            workspace=made.workspace,
            workdir=self.task.workdir,
            home=made.home,
            mounts=[Mount(solution, "/solution")] if solution and name == "solution" else [],
            image=self.task.image,
            limits=self.task.limits,
        )

    async def solve(self, box: Box, workspace: Path) -> None:
        """Apply the solution. Raises `InputError` for a patch that does not fit."""
        solution = self.task.solution
        if solution is None or solution.is_file():
            patch = self.task.gold_patch if solution is None else solution.read_text(encoding="utf-8")
            await in_folder_thread(git, "apply", "--whitespace=nowarn", "-", folder=workspace, stdin=patch + "\n")
        elif (solution / _SOLVE).is_file():
            script = f"/solution/{_SOLVE}" if self.runtime.isolated else str(solution.absolute() / _SOLVE)
            env = {**clean_environment(Path(box.home), isolated=self.runtime.isolated), **self.task.env}
            log = self.work / "logs" / "solve.log"
            seconds = self.task.timeout or _SOLVE_SECONDS
            ended = await box.run(["bash", script], env=env, timeout=seconds, log=log)
            last = " ".join(read_end(log, 4096).split("\n")[-3:]).strip()
            how = ended.stopped or f"status {ended.status}"
            self.said = f"; {_SOLVE} ended with {how}" + (f", and says: {last[-300:]}" if last else "")
        else:
            await in_folder_thread(shutil.copytree, solution, workspace, symlinks=True, dirs_exist_ok=True)
        self.solved = (await in_folder_thread(find_changes, self.start.folder, workspace)).files


def _write(workspace: Path, changes: Mapping[str, str]) -> None:
    for path, text in changes.items():
        place = workspace / path
        if place.is_symlink():
            place.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
