"""The evaluations of a training: held-out tasks, rolled out with the weights of a step.

Their sessions are recorded in `evaluation`, a run folder of its own in that of the training, which no training reads.
Its recorder samples as the recipe's table [evaluation] says, by the `policy.json` of when the evaluation begins.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.store.records import Session
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.names import Version, counted, file_name, some
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.schedule import Evaluation
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.evaluation import pass_rows, rewards_of
from rolltap.trainer.runs.views.training import EVALUATION, METRICS, read_metrics
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.traces.sessions import session_reward
from rolltap.trainer.training.arguments import sampling
from rolltap.trainer.training.recipe import HeldOut, Recipe
from rolltap.trainer.training.report import append_metrics
from rolltap.trainer.training.step.metrics import MOST_TASKS
from rolltap.trainer.training.steps import FinishedSessions, step_group


class Evaluations:
    """The evaluations of a training into the folder `run`, on the main process; none for a recipe without the table."""

    def __init__(self, recipe: Recipe, run: Path) -> None:
        self.worker: Worker
        """It runs the sessions. `check` makes it, and the caller enters and leaves it."""
        self._recipe, self._run = recipe, run
        self._table = recipe.evaluation or HeldOut(tasks=Path())
        self.tasks: Sequence[Task] = ()
        """Held-out tasks, as they will be run; none without the table."""
        self._begun: set[int] = set()
        """Steps whose evaluation this start has begun."""

    def check(self, training: Worker, tasks: Sequence[Task], say: Callable[[str], object]) -> None:
        """Check the table and its tasks, and build their images. `training` has these `tasks`, as they will be run.

        Harness, runtime and engines are the training's: boxes of both hide what sessions of both must not see. Says
        which tasks are trained too. Raises `InputError`.
        """
        if self._recipe.evaluation is None:
            return
        options = json.dumps(sampling(self._recipe) | self._table.sampling)
        recorder = self._recipe.recorder | {"rolltap_sampling": options}
        recipe, engine = self._recipe.model_copy(update={"recorder": recorder}), training.recorder.engine
        out = self._run / EVALUATION
        self.worker = Worker(recipe, harness=training.harness, engine=engine, model=recipe.model, out=out)
        self.worker.runtime = training.runtime
        # those that are refused were named when the recipe was read
        held_out = self.worker.fit(load_tasks(self._table.tasks, repositories=self._recipe.repositories, refused=[]))
        contents = {task.id: task.model_copy(update={"id": ""}).digest() for task in [*held_out, *tasks]}
        known = {name for task in tasks for name in (task.id, contents[task.id])}
        if same := [task.id for task in held_out if not known.isdisjoint((task.id, contents[task.id]))]:
            say(f"warning: {counted(len(same), 'task')} of evaluation.tasks, which the training has too: {some(same)}")
        self.tasks = run_blocking(self.worker.build(held_out))

    def begin(self, version: Version, *, last: bool = False) -> Evaluation | None:
        """Return the groups to run with the published weights `version`, without the sessions that have ended.

        None when no evaluation is due, and when they were returned before.
        """
        if version.step in self._begun or not (missing := self.missing(version, last=last)):
            return None
        self._begun.add(version.step)
        write_atomically(self._run / EVALUATION / POLICY_FILE, (self._run / POLICY_FILE).read_text())
        return Evaluation(missing, self.worker.stage, self._table.share)

    def missing(self, version: Version, *, last: bool = False) -> list[Group]:
        """Return the groups of an evaluation that is due, with the sessions that have not ended."""
        due = last or version.step % (self._table.every * self._recipe.iterations) == 0
        if not due or not self.tasks:
            return []
        ended = self._ended(version)
        missing = [(group, [name for name in group.session_ids if name not in ended]) for group in self._all(version)]
        return [replace(group, session_ids=names) for group, names in missing if names]

    def metrics(self, version: Version, say: Callable[[str], object]) -> dict[str, float]:
        """Return the metrics of the weights `version` by name, and say the first ones; none without an evaluation.

        They are of the sessions that the run folder has, of whatever start of the training. Sessions without a reward
        do not count. Each task has the same weight.

        - `eval/step`: number of optimizer steps that made the weights; `eval/sessions`: number of sessions.
        - `eval/reward`, `eval/reward/task/ID` (of at most `MOST_TASKS` tasks), `eval/reward/harness/NAME`.
        - `eval/pass@K`, `eval/pass^K`: see `PassRow`; with `_low` and `_high` the ends of the interval of 95 %.
        """
        if not self.tasks:
            return {}
        sessions = [each for each in self._ended(version).values() if session_reward(each) is not None]
        if not sessions:
            if version.step in self._begun:
                number = len(self.tasks) * self._table.sessions
                say(f"warning: none of the {number} sessions of the evaluation of {version} has a reward")
            return {}
        rewards = rewards_of(sessions)
        means = {name: fmean(given) for name, given in rewards.items()}
        metrics = {"eval/step": float(version.step), "eval/sessions": float(len(sessions))}
        metrics["eval/reward"] = fmean(means.values())
        if harness := sessions[0].harness:
            metrics[f"eval/reward/harness/{file_name(harness)}"] = metrics["eval/reward"]
        if len(self.tasks) <= MOST_TASKS:
            metrics |= {f"eval/reward/task/{file_name(name)}": mean for name, mean in means.items()}
        rows = pass_rows(rewards)
        for row in rows:
            for name, chance in ((f"eval/pass@{row.k}", row.pass_at), (f"eval/pass^{row.k}", row.pass_all)):
                metrics |= {name: chance.value, f"{name}_low": chance.low, f"{name}_high": chance.high}
        what = f"{counted(len(sessions), 'session')} of {counted(len(rewards), 'held-out task')}"
        say(f"evaluated {version}: reward {metrics['eval/reward']:.3f}, pass@1 {rows[0].pass_at}, {what}")
        return metrics

    def append(self, version: Version, step: int, say: Callable[[str], object]) -> None:
        """Append the metrics of weights to the file after a step, unless it has them. Raises `RunError`, `OSError`."""
        path = self._run / METRICS
        if any(line.get("eval/step") == version.step for line in read_metrics(path)):
            return
        if metrics := self.metrics(version, say):
            append_metrics(path, step, metrics)

    def _all(self, version: Version) -> list[Group]:
        """Return a group of each task. Its id is of no training group, not even of one of the same task."""
        return [step_group(version, 0, task, self._table.sessions, EVALUATION) for task in self.tasks]

    def _ended(self, version: Version) -> Mapping[str, Session]:
        """Return the sessions that need not be tried again, by the ids that they have in the version's attempt."""
        finished = FinishedSessions(load_sessions(self._run / EVALUATION).values())
        return {name: session for group in self._all(version) for name, session in finished.of(group).items()}
