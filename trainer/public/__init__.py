"""rolltap records the model calls of agent programs off the wire, and trains on them.

Roll out tasks with an unmodified agent program, and build a batch for the trainer:

    import rolltap

    task = rolltap.Task(id="count", instruction="Count ...", evaluate=["sh", "-c", "test ..."])
    run = rolltap.rollout([task], harness="pi", engine=url, model=folder, out="runs/a", sessions=8)
    batch = run.traces(strategy="prefix_merging").batch()
    print(run.summary().steps, batch.ledger)

Record
    `rollout`            run tasks with a harness, and record every model call
    `rollout_async`      the same inside an event loop
    `Task`, `Harness`    an instruction with its evaluator; an agent program and how to start it
    `Client`, `AsyncClient`   a running rollout service: groups in, sessions out, the policy
    `AdapterPublisher`   new weights for its engines; needs the extra `train`
    `check_tasks`        try tasks with their solutions and the standard cheats
    `load_tasks`         tasks of a file or folder: JSON Lines, Harbor tasks, SWE-bench rows
    `Recorder`           record programs that you start yourself
    `Proxy`              a recorder that runs already
    `EngineServer`       a vLLM server with the endpoints that recording and publishing need

Read
    `open_run`, `Run`    a run folder: its sessions, calls, traces, ledger, exports
    `Session`, `Call`    the rows of a run
    `view_run`           the same in the browser
    `merge_runs`, `import_calls`, `verify_run`
    `read_training`      the metrics of a training, and what each of its optimizer steps trained

Train
    `Trace`, `TraceBatch`, `GroupReward`, `Ledger`
    `build_traces`       the calls of one session -> its traces and their ledger
    `TraceGRPOTrainer`, `TraceGRPOConfig`   trains on traces, on TRL; needs the extra `train`
    `train`              roll out, train, publish and repeat, by a recipe; needs the extra `train`
    `plan_training`      what a training by a recipe would take; needs the extra `train`
    `train_offline`      train on recorded runs, by a recipe; needs the extra `train`

Errors that a caller may handle derive from `RolltapError`, except `OSError` for a file that cannot
be read or written; `rolltap.errors` has their kinds. A session that fails raises no error: its
status says so. `rolltap.types` has the types of arguments and results, for annotations.

Public are the names in `__all__` of `rolltap`, `rolltap.errors` and `rolltap.types`. They follow
semantic versioning. Other modules may change in every release.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltap import errors as errors
    from rolltap import types as types
    from rolltap.addons.errors import RolltapError as RolltapError
    from rolltap.addons.store.records import Call as Call
    from rolltap.addons.store.records import Session as Session
    from rolltap.rollouts import check_tasks as check_tasks
    from rolltap.rollouts import rollout as rollout
    from rolltap.rollouts import rollout_async as rollout_async
    from rolltap.runs import Run as Run
    from rolltap.runs import import_calls as import_calls
    from rolltap.runs import merge_runs as merge_runs
    from rolltap.runs import open_run as open_run
    from rolltap.runs import read_training as read_training
    from rolltap.runs import verify_run as verify_run
    from rolltap.runs import view_run as view_run
    from rolltap.trainer.boxes.environment import Proxy as Proxy
    from rolltap.trainer.engine.serve import EngineServer as EngineServer
    from rolltap.trainer.rollouts.harness import Harness as Harness
    from rolltap.trainer.rollouts.recorder import Recorder as Recorder
    from rolltap.trainer.service.client import AsyncClient as AsyncClient
    from rolltap.trainer.service.client import Client as Client
    from rolltap.trainer.service.publisher import AdapterPublisher as AdapterPublisher
    from rolltap.trainer.tasks.sources import load_tasks as load_tasks
    from rolltap.trainer.tasks.task import Task as Task
    from rolltap.trainer.traces.build import GroupReward as GroupReward
    from rolltap.trainer.traces.build import Trace as Trace
    from rolltap.trainer.traces.build import TraceBatch as TraceBatch
    from rolltap.trainer.traces.build import build_traces as build_traces
    from rolltap.trainer.traces.ledger import Ledger as Ledger
    from rolltap.trainer.training.step.config import TraceGRPOConfig as TraceGRPOConfig
    from rolltap.trainer.training.step.trainer import TraceGRPOTrainer as TraceGRPOTrainer
    from rolltap.training import plan_training as plan_training
    from rolltap.training import train as train
    from rolltap.training import train_offline as train_offline

    __version__: str

# imported on first use: the recorder imports this package too, and needs neither the trainer nor
# torch
_MODULES = {
    "rolltap.addons.errors": ("RolltapError",),
    "rolltap.addons.store.records": ("Call", "Session"),
    "rolltap.rollouts": ("check_tasks", "rollout", "rollout_async"),
    "rolltap.runs": (
        "Run",
        "import_calls",
        "merge_runs",
        "open_run",
        "read_training",
        "verify_run",
        "view_run",
    ),
    "rolltap.trainer.engine.serve": ("EngineServer",),
    "rolltap.trainer.training.step.config": ("TraceGRPOConfig",),
    "rolltap.trainer.training.step.trainer": ("TraceGRPOTrainer",),
    "rolltap.trainer.boxes.environment": ("Proxy",),
    "rolltap.trainer.rollouts.harness": ("Harness",),
    "rolltap.trainer.rollouts.recorder": ("Recorder",),
    "rolltap.trainer.service.client": ("AsyncClient", "Client"),
    "rolltap.trainer.service.publisher": ("AdapterPublisher",),
    "rolltap.trainer.tasks.sources": ("load_tasks",),
    "rolltap.trainer.tasks.task": ("Task",),
    "rolltap.trainer.traces.build": ("GroupReward", "Trace", "TraceBatch", "build_traces"),
    "rolltap.trainer.traces.ledger": ("Ledger",),
    "rolltap.training": ("plan_training", "train", "train_offline"),
}
_TRAINER = {"AdapterPublisher", "TraceGRPOConfig", "TraceGRPOTrainer"}
_SUBMODULES = ("errors", "types")
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_PLACES)


def _load(name: str) -> Any:
    if name == "__version__":
        return version("rolltap")
    if name in _SUBMODULES:
        return import_module(f"rolltap.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'rolltap' has no attribute {name!r}")
    try:
        return getattr(import_module(_PLACES[name]), name)
    except ImportError as error:
        from rolltap.addons.errors import MissingPackageError, install_command

        extra = "train" if name in _TRAINER else "record"
        needs = f"packages that are not installed ({error}): {install_command(extra)}"
        raise MissingPackageError(f"rolltap.{name} needs {needs}") from error


if not TYPE_CHECKING:  # a type checker would believe that the module has every name
    __getattr__ = _load


def __dir__() -> list[str]:
    names = {*globals(), *__all__, *_SUBMODULES, "__version__"}
    return sorted(names if find_spec("trl") else names - _TRAINER)
