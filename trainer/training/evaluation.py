"""The evaluations of a training: held-out tasks, rolled out with the weights of a step.

Their sessions are recorded in `evaluation`, a run folder of its own in that of the training, which
no training reads. They sample as the recipe's table [evaluation] says, by the `policy.json` of when
the evaluation begins. Whatever runs the sessions of the training runs them too: their groups have
the mark `evaluates`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.store.metadata import RUN_FILE
from rolltap.addons.store.records import Session
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.names import Version, counted, file_name, some
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.evaluation import pass_rows
from rolltap.trainer.runs.views.outcomes import task_rewards
from rolltap.trainer.runs.views.training import EVALUATION, METRICS, read_metrics
from rolltap.trainer.service.node import ServiceWorker
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionTable
from rolltap.trainer.traces.sessions import session_reward
from rolltap.trainer.training.recipe import HeldOut, Recipe
from rolltap.trainer.training.report import append_metrics
from rolltap.trainer.training.step.metrics import MOST_TASKS
from rolltap.trainer.training.steps import FinishedSessions, step_group


class Evaluations:
    """The evaluations of a training into the folder `run`, on the main process; none without the
    recipe's table."""

    def __init__(self, recipe: Recipe, run: Path, say: Callable[[str], object]) -> None:
        self.tasks: Sequence[Task] = ()
        """Held-out tasks, as they will be run; none without the table."""
        self._recipe = recipe
        self._run = run
        self._say = say
        self._sessions = SessionTable(run / EVALUATION)
        self._table = recipe.evaluation or HeldOut(tasks=Path())
        self._begun: set[int] = set()
        """Steps whose evaluation this start has begun."""

    def check(self, worker: Worker | ServiceWorker, tasks: Sequence[Task]) -> None:
        """Check the held-out tasks, and build their images. `worker` runs these `tasks` of the
        training too.

        Says which tasks are trained too. Raises as `Worker.fit`.
        """
        if self._recipe.evaluation is None:
            return
        # tasks that are refused were named when the recipe was read
        path = self._table.tasks
        held_out = load_tasks(path, repositories=self._recipe.repositories, refused=[])
        held_out = worker.fit(held_out)
        known = {task.id for task in tasks} | {_content(task) for task in tasks}
        same = [task.id for task in held_out if task.id in known or _content(task) in known]
        if same:
            what = f"{counted(len(same), 'task')} of evaluation.tasks"
            self._say(f"warning: {what}, which the training has too: {some(same)}")
        self.tasks = run_blocking(worker.build(held_out))

    def begin(self, version: Version, *, last: bool = False) -> list[Group]:
        """Return the groups to run with the published weights `version`: see `missing`. None are
        returned twice."""
        missing = self.missing(version, last=last)
        if missing:
            self._begun.add(version.step)
            policy = (self._run / POLICY_FILE).read_text()
            folder = self._run / EVALUATION
            folder.mkdir(exist_ok=True)
            write_atomically(folder / POLICY_FILE, policy)
        return missing

    def missing(self, version: Version, *, last: bool = False) -> list[Group]:
        """Return the groups of an evaluation that is due and has not begun, with the sessions that
        have not ended."""
        is_due = last or version.step % (self._table.every * self._recipe.iterations) == 0
        if not is_due or not self.tasks or version.step in self._begun:
            return []
        ended = self._ended(version)
        groups = []
        for group in self._all(version):
            names = [name for name in group.session_ids if name not in ended]
            if names:
                groups.append(replace(group, session_ids=names))
        return groups

    def metrics(self, version: Version) -> dict[str, float]:
        """Return the metrics of the weights `version` by name, and say the first ones; none without
        an evaluation.

        They are of the sessions that the run folder has, of whatever start of the training.
        Sessions without a reward do not count. Each task has the same weight.

        - `eval/step`: number of optimizer steps that made the weights; `eval/sessions`: number of
          sessions.
        - `eval/reward`, `eval/reward/task/ID` (of at most `MOST_TASKS` tasks),
          `eval/reward/harness/NAME`.
        - `eval/pass@K`, `eval/pass^K`: see `PassRow`; with `_low` and `_high` the ends of the
          interval of 95 %.
        """
        if not self.tasks:
            return {}
        sessions = [
            each for each in self._ended(version).values() if session_reward(each) is not None
        ]
        if not sessions:
            if version.step in self._begun:
                number = len(self.tasks) * self._table.sessions
                what = f"none of the {number} sessions of the evaluation of {version}"
                self._say(f"warning: {what} has a reward")
            return {}
        rewards = task_rewards(sessions)
        means = {name: fmean(given) for name, given in rewards.items()}
        mean = fmean(means.values())
        metrics = {
            "eval/step": float(version.step),
            "eval/sessions": float(len(sessions)),
            "eval/reward": mean,
        }
        harness = sessions[0].harness
        if harness:
            metrics[f"eval/reward/harness/{file_name(harness)}"] = mean
        if len(self.tasks) <= MOST_TASKS:
            for name, task_mean in means.items():
                metrics[f"eval/reward/task/{file_name(name)}"] = task_mean
        rows = pass_rows(rewards)
        for row in rows:
            chances = {f"eval/pass@{row.k}": row.pass_at, f"eval/pass^{row.k}": row.pass_all}
            for name, chance in chances.items():
                metrics[name] = chance.value
                metrics[f"{name}_low"] = chance.low
                metrics[f"{name}_high"] = chance.high
        what = f"{counted(len(sessions), 'session')} of {counted(len(rewards), 'held-out task')}"
        self._say(f"evaluated {version}: reward {mean:.3f}, pass@1 {rows[0].pass_at}, {what}")
        return metrics

    def append(self, version: Version, step: int) -> None:
        """Append the metrics of weights to the file after a step, unless it has them. Raises
        `RunError`, `OSError`."""
        path = self._run / METRICS
        if any(line.get("eval/step") == version.step for line in read_metrics(path)):
            return
        metrics = self.metrics(version)
        if metrics:
            append_metrics(path, step, metrics)

    def _all(self, version: Version) -> list[Group]:
        """Return a group of each task. Its id is of no training group, not even of one of the same
        task."""
        groups = []
        for task in self.tasks:
            group = step_group(version, 0, task, self._table.sessions, EVALUATION)
            groups.append(replace(group, evaluates=True, sampling=self._table.sampling))
        return groups

    def _ended(self, version: Version) -> Mapping[str, Session]:
        """Return the sessions that need not be tried again, by the ids that they have in the
        version's attempt."""
        ended: dict[str, Session] = {}
        if not (self._run / EVALUATION / RUN_FILE).exists():  # the first one begins
            return ended
        finished = FinishedSessions(self._sessions.refresh().values())
        for group in self._all(version):
            ended |= finished.of(group, version)
        return ended


def _content(task: Task) -> str:
    return task.model_copy(update={"id": ""}).digest()
