"""Rollouts of tasks, and the doctor: functions for scripts, notebooks and the command line."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from rolltap.addons.errors import MissingPackageError, install_command
from rolltap.runs import Run, open_run
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.boxes.watch import end_program
from rolltap.trainer.checks.rejudge import rejudge
from rolltap.trainer.checks.trial import TaskCheck, try_tasks
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.doctor.model import diagnose as examine_model
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.serve import ending
from rolltap.trainer.engine.status import engine_status, reset_engine
from rolltap.trainer.judges.command import require_evaluator
from rolltap.trainer.nodes.cluster import nodes_status
from rolltap.trainer.nodes.worker import make_worker
from rolltap.trainer.reruns.record import Record
from rolltap.trainer.rollouts.check import check_engines
from rolltap.trainer.rollouts.config import RolloutArguments, RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.outside import end_recorded, set_provenance
from rolltap.trainer.rollouts.worker import given_tasks, roll_out
from rolltap.trainer.service.serve import serve
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts, model_places, on_loopback

if TYPE_CHECKING:
    from rolltap.trainer.doctor.diagnosis import Diagnosis

P = ParamSpec("P")
T = TypeVar("T")


__all__ = [
    "EngineAdmin",
    "Engines",
    "Facts",
    "Record",
    "RolloutConfig",
    "check_engines",
    "check_tasks",
    "end_program",
    "end_recorded",
    "ending",
    "engine_status",
    "examine",
    "examine_model",
    "fleet_status",
    "judge_again",
    "model_places",
    "on_loopback",
    "require_evaluator",
    "reset_engine",
    "rollout",
    "rollout_async",
    "serve_rollouts",
    "set_provenance",
]


async def rollout_async(
    tasks: Sequence[Task] | str | Path,
    *,
    harness: Harness | str | Path,
    engine: str,
    model: str | Path,
    out: str | Path,
    runtime: str | Runtime = "process",
    new_groups: bool = False,
    progress: bool = True,
    **settings: Unpack[RolloutArguments],
) -> Run:
    """Run every task several times with a harness, record all model calls, and return the run.

    `tasks` is a list of tasks, or a path as `load_tasks` reads it. `harness` is a harness, the name
    of a preset, or the path of a `.toml` file. `engine` is the URL of the vLLM server that serves
    `model`, or several separated by commas. `runtime` is where sessions run: `process`, `sandbox`,
    `container`, `apptainer`, `ssh`, `harbor`, or a runtime of your own. The first does not protect
    this machine from the harness. `progress` shows a progress bar on a terminal.

    `settings` are the fields of `rolltap.types.RolloutConfig`, which are the options of `rolltap
    rollout`: for instance `sessions` (of each task; they are one group), `concurrency` and
    `timeout`.

    `out` is the run folder. A rollout into the folder of an earlier one resumes it: sessions that
    have ended are used again; those that were interrupted, failed because of the engine, the
    recorder or the machine, or could not be judged are rerun. It begins new groups when something
    else decides the sessions: the task's content, the harness, its version and program, image,
    runtime, time limit, budgets, recorder options, model or weights; it says on stderr which.
    `new_groups` begins further groups, once the newest ones are complete.

    A session that fails does not end the rollout: its status says what happened, as
    `trainer/rollouts/outcomes.py` explains. One that failed because of the engine, the recorder or
    the machine is retried up to `retries` times. The rollout stops after `give_up_after`
    consecutive infrastructure failures. KeyboardInterrupt stops the harnesses and the recorder;
    sessions that ran have the status `cancelled`.

    `Run.new_session_ids` of the result are the sessions of this call's groups, all attempts:
    `run.traces().batch(run.new_session_ids)`. `rollout` works in a script and in a notebook,
    `rollout_async` in an event loop, where cancelling it stops the harnesses and the recorder.

    Raises, before the recorder is started, `InputError` for wrong tasks, settings, harness or
    runtime, and `EngineError` when an engine does not answer; `RunError` when another rollout runs
    in the folder; `MissingPackageError` without mitmproxy; `RecorderError` when the recorder does
    not start, for instance for a wrong `model` or option, dies, or when the rollout gives up;
    `OSError` when the run folder cannot be written.
    """
    own, config = _configured(settings, runtime)
    task_list = given_tasks(tasks, config.repositories)
    worker = make_worker(
        config,
        harness=harness,
        engine=engine,
        model=model,
        out=out,
        runtime=own,
    )
    session_ids = await roll_out(worker, task_list, new_groups=new_groups, progress=progress)
    run = open_run(out)
    run.new_session_ids = session_ids
    return run


def serve_rollouts(
    tasks: str | Path,
    *,
    harness: Harness | str | Path,
    engine: str,
    model: str | Path,
    out: str | Path,
    config: RolloutConfig,
    **how: Any,
) -> None:
    """Serve rollouts by HTTP until a signal, as `rolltap service` does.

    `how` are the keywords of `trainer.service.serve.serve`. Raises as that does.
    """
    worker = make_worker(
        config,
        harness=harness,
        engine=engine,
        model=model,
        out=out,
    )
    run_blocking(serve(worker, Path(tasks), **how))


def fleet_status(address: str) -> list[dict[str, Any]]:
    """Return the state of the nodes of all runs on a Ray cluster, for `rolltap fleet status`.

    Raises `MissingPackageError` without the extra `ray`, and `InputError` when no cluster answers.
    """
    return run_blocking(nodes_status(address))


def _blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(function(*args, **kwargs))

    return run


rollout = _blocking(rollout_async)
rollout.__name__ = rollout.__qualname__ = "rollout"


def check_tasks(
    tasks: Sequence[Task] | str | Path,
    *,
    runtime: str | Runtime = "process",
    progress: bool = True,
    **settings: Unpack[RolloutArguments],
) -> list[TaskCheck]:
    """Try tasks before a rollout, and return what became of each.

    Each is judged several times: its untouched start, which must earn less than the best reward;
    its own solution, if it has one, which must earn the best; and the standard cheats, which must
    earn no more than the untouched start. A task that cannot be tried says why. The results are
    kept in the user's cache folder, for `rollout` to warn.

    Arguments and `settings` are as of `rollout`; `concurrency` is how many judgements run at the
    same time. Raises `InputError` for a source without tasks, wrong settings, and a runtime that
    does not work here.
    """
    own, config = _configured({"concurrency": 4, **settings}, runtime)
    refused: list[str] = []
    given = given_tasks(tasks, config.repositories, refused)
    trials = try_tasks(
        given,
        own or config.make_runtime(),
        concurrency=config.concurrency,
        progress=progress,
    )
    checks = run_blocking(trials)
    checks += [TaskCheck("", wrong=(reason,)) for reason in refused]
    return checks


def _configured(
    settings: Mapping[str, Any],
    runtime: str | Runtime,
) -> tuple[Runtime | None, RolloutConfig]:
    """Return a runtime of the caller's own, if it is one, and the settings."""
    if isinstance(runtime, str):
        return None, RolloutConfig.of({**settings, "runtime": runtime})
    return runtime, RolloutConfig.of({**settings})


def judge_again(
    run: str | Path,
    tasks: str | Path,
    *,
    only: Sequence[str] = (),
    progress: bool = True,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Judge recorded sessions by the tasks with the ids of theirs, without running them.

    `tasks` and `settings` are as of `check_tasks`; `only` are sessions, by ids or unique prefixes.
    Returns for each its id, its task's, the reward `before` and the `reward` and `status` now.
    `result` is `judged` or `unjudged`; `left`, when its reward is no judge's, or one of this task
    already; or `refused`, when it cannot be judged again. `why` says why. Raises `InputError` for
    an unknown session, and a runtime or judge that does not work here; and `RunError`.
    """
    config = RolloutConfig.of({"concurrency": 4, **settings})
    again = rejudge(
        Path(run),
        given_tasks(tasks, config.repositories),
        config.make_runtime(),
        only=only,
        concurrency=config.concurrency,
        progress=progress,
    )
    return run_blocking(again)


def examine(command: Sequence[str] = (), **how: Any) -> "Diagnosis":
    """Run a program once, led by scripted replies: see `trainer/doctor/examine.py`.

    Raises `MissingPackageError` without the packages of the extra `record`, and what `examine`
    there raises.
    """
    try:
        from rolltap.trainer.doctor import examine as module
    except ImportError as error:
        needs = f"packages that are not installed ({error}): {install_command('record')}"
        raise MissingPackageError(f"rolltap doctor needs {needs}") from error
    return module.examine(command, **how)
