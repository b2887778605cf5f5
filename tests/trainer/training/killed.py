"""Trainings that are killed and started again: `python -m tests.trainer.training.killed FOLDER
[short]`.

All points of `POINTS` are tried, or the `SHORT` ones.

One process imports everything and has no threads. It forks a process for each training. The loop,
the trainer, the publisher, the checkpoints and the run folder are the real ones. In place of the
engine there is a folder with the weights that were loaded last, in place of harness and recorder a
function that samples from them.

A training passes points with names, and may be killed at one. The report, JSON on stdout, is a list
with an object for each kill: see `report_of`.
"""

import gc
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, TrainerState

from rolltap.addons.store.index import SessionIndex
from rolltap.trainer.engine import engines, weights
from rolltap.trainer.rollouts import worker
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.traces.trained import TABLE, trained_steps
from rolltap.trainer.training import attempt, loop, online
from rolltap.trainer.training.recipe import FINISHED, load_recipe
from rolltap.trainer.training.report import METRICS, read_metrics
from rolltap.trainer.training.step import checkpoint
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.trainer.training.stand_ins import (
    FakeRecorder,
    FolderEngine,
    Points,
    runner_by,
    write_inputs,
)

STEPS = 5
SAVE_STEPS = 2
RECIPE = f"""
model = "../model"
tasks = "../tasks.jsonl"
harness = "../harness.toml"
steps = {STEPS}
save_steps = {SAVE_STEPS}
groups_per_step = 2
sessions = 2
replace_zero_variance = 1
publish = "{{publish}}"
adapters = 2

[grpo]
learning_rate = 1e-2
use_cpu = true
activation_checkpointing = false
gradient_accumulation_steps = 2
num_iterations = {{iterations}}
"""
LORA = """
[lora]
r = 2
target_modules = "all-linear"
"""
TASKS = ("a", "b", "flat", "c", "flat2")
"""All rewards of the tasks `flat` are equal, but for forks."""
POINTS = {
    "checkpoint": [
        ["0: after writing training.json 1"],
        ["0: after a session was recorded 1"],
        ["3: before the policy is saved 1"],
        ["3: before renaming .policy-.partial 1"],
        ["3: after renaming .policy-.partial 1"],
        ["3: paused 1"],
        ["3: after the engine has loaded the weights 1"],
        ["3: before the engine goes on 1"],
        ["3: paused 1", "0: paused 1"],
        [
            "3: after the engine has loaded the weights 1",
            "0: after the engine has loaded the weights 1",
        ],
        ["3: before the engine goes on 1", "0: before the engine goes on 1"],
        ["3: before renaming .policy.json 1"],
        ["3: after write_policy 1"],
        ["3: half of policy- was removed 1"],
        ["3: after a call was recorded 1"],
        ["3: after a session was recorded 2"],
        ["3: after a session was recorded 5"],
        ["3: after read_batch 1"],
        ["3: after a micro-batch 1"],
        ["3: before the optimizer's step 1"],
        ["3: after the optimizer's step 1"],
        ["3: before the trainer saves the weights 1"],
        ["3: after the trainer saves the weights 1"],
        ["3: half of scheduler.pt 1"],
        ["3: half of rng_state.pth 1"],
        ["3: half of trainer_state.json 1"],
        ["3: before rotate_checkpoints 1"],
        ["4: half of checkpoint-2 was removed 1"],
        ["4: before save_finished 1"],
        ["4: before renaming run 1"],
        [
            "3: after a session was recorded 1",
            "2: after read_batch 1",
            "3: after a session was recorded 2",
        ],
    ],
    "lora": [
        ["3: after the engine has loaded the adapter 1"],
        ["3: half of policy- was removed 1"],
        ["4: before save_finished 1"],
    ],
    "max_staleness": [
        ["0: after a session was recorded 3"],
        ["3: after a session was recorded 2"],
        ["3: after read_batch 1"],
        ["3: after the optimizer's step 1"],
        ["4: after write_policy 1"],
        ["3: after a call was recorded 3", "3: after a session was recorded 1"],
        ["4: after a session was recorded 3", "4: after a session was recorded 1"],
    ],
    "twice": [
        ["2: after a micro-batch 1", "6: after a session was recorded 1"],
        ["6: after the optimizer's step 2"],
    ],
}
"""Way of publishing -> lists of points at which one training is killed, one after the other.
`twice` publishes a checkpoint, and takes two optimizer steps a batch; `max_staleness` publishes
adapters, rollouts are one step ahead, and groups without signal are forked. The sessions from the
fifth on are those of a further group."""

SHORT = {
    "checkpoint": [
        [
            "0: after writing training.json 1",
            "3: after the engine has loaded the weights 1",
            "0: after the engine has loaded the weights 1",
            "3: after a session was recorded 5",
            "3: half of scheduler.pt 1",
        ],
        ["4: half of checkpoint-2 was removed 1"],
    ],
    "max_staleness": [["4: after a session was recorded 3", "4: before save_finished 1"]],
}
"""A point of each kind, in one training: at the start, while weights are published, in a rollout,
in a checkpoint, at the end; with `max_staleness`, among forks."""


def make_points(points: Points) -> None:
    """Let the loop and the libraries below it pass points."""
    points.around(attempt, "write_atomically", "writing {}")
    points.around(weights, "write_policy")
    points.around(Path, "rename", "renaming {}")
    points.around(online, "read_batch")
    points.around(TraceGRPOTrainer, "training_step", "a micro-batch")
    points.around(torch.optim.AdamW, "step", "the optimizer's step")
    points.around(checkpoint, "save_trained", "the trainer saves the weights")
    points.around(checkpoint, "rotate_checkpoints")
    points.around(loop, "save_finished")

    new_folder = weights.new_folder

    @contextmanager
    def saving(target: Path) -> Iterator[Path]:
        points.reach("before the policy is saved")
        with new_folder(target) as folder:
            yield folder
        points.reach("after the policy is saved")

    weights.new_folder = saving
    save = torch.save
    remove = shutil.rmtree
    to_json = TrainerState.save_to_json

    def save_in_two(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(what, path, *args, **kwargs)
        if not isinstance(path, str | Path):  # a tensor in the file of `save_trained`
            return points.reach("a tensor of the state was saved")
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        points.reach(f"half of {Path(path).name}")
        Path(path).write_bytes(whole)

    def state_in_two(state: TrainerState, path: str) -> None:
        points.reach("before trainer_state.json")
        to_json(state, path)
        whole = Path(path).read_text()
        Path(path).write_text(whole[: len(whole) // 2])
        points.reach("half of trainer_state.json")
        Path(path).write_text(whole)

    def remove_in_two(path: Any, *args: Any, **kwargs: Any) -> None:
        for file in list(Path(path).glob("*.*"))[:1]:
            file.unlink()
            points.reach(f"half of {Path(path).name} was removed")
        remove(path, *args, **kwargs)

    torch.save = save_in_two
    shutil.rmtree = remove_in_two
    TrainerState.save_to_json = state_in_two


def train(folder: Path, kill_at: str | None = None) -> int:
    """Train in a process of its own, and return its status. Leaves `batches` and `points` in the
    folder."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        points = Points(kill_at)
        make_points(points)
        FolderEngine.folder = folder / "engine"
        FolderEngine.model = folder.parents[1] / "model"
        FolderEngine.points = points
        engines.EngineAdmin = FolderEngine
        worker.Recorder = FakeRecorder
        worker.GroupRunner = runner_by(points)
        call = online.OnlineTraces.__call__
        before_batch = online.OnlineTraces.before_batch

        def stepped(source: online.OnlineTraces) -> None:
            points.step = source.trainer.state.global_step
            before_batch(source)

        def noted(source: online.OnlineTraces, rows: list[dict[str, Any]]) -> Any:
            batch = call(source, rows)
            rewards = []
            for label in batch.rewards.values():
                rewards.append([place_in_any_run(label.group_id), label.reward])
            traces = []
            for trace in batch.traces:
                tokens = [trace.prompt_ids, trace.completion_ids]
                traces.append([*tokens, trace.completion_mask, trace.logprobs])
            line = {
                "step": source.trainer.state.global_step,
                "rewards": rewards,
                "traces": traces,
                "ledger": str(batch.ledger),
            }
            with (folder / "batches").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return batch

        online.OnlineTraces.__call__ = noted
        online.OnlineTraces.before_batch = stepped
        recipe = load_recipe(folder.parent / "recipe.toml")
        run = folder / "run"
        with open(os.devnull, "w") as silent:
            console = Console(file=silent)
            source = online.OnlineTraces(
                recipe, run, engine="http://127.0.0.1:9", seed=3, console=console
            )
            loop.train(source, recipe, run, seed=3, console=console)
        (folder / "points").write_text("\n".join(points.passed))  # to choose from
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def read_batches(folder: Path) -> list[dict[str, Any]]:
    path = folder / "batches"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report_of(plain: Path, folder: Path, kills: Sequence[str]) -> dict[str, Any]:
    """Kill a training at points, start it again after each, and compare it with the training that
    was not killed.

    - killed, ended: True when it was killed at each point, and the last start ended.
    - unfinished: True when the kills left no model: a training with one is not started again.
    - resumed: the steps of the last start.
    - batches, weights: True when all batches, and the final weights bit for bit, are those of the
      plain training.
    - sessions: True when as many sessions were recorded as without the kill, each once.
    - trained: True when the rows of each optimizer step are those of the plain training, bit for
      bit.
    - metrics: True when each optimizer step has one line of metrics, in their order.
    - tidy: True when the folders hold nothing but the newest policy, whole checkpoints and the
      model.
    """
    killed = all(train(folder, point) == -signal.SIGKILL for point in kills)
    before = read_batches(folder)
    unfinished = not (folder / "run" / FINISHED).exists()
    ended = train(folder) == 0
    if not killed or not ended:
        return {"points": kills, "killed": killed, "ended": ended}
    expected = {batch["step"]: batch for batch in read_batches(plain)}
    after = read_batches(folder)[len(before) :]
    run = folder / "run"
    recipe = load_recipe(folder.parent / "recipe.toml")
    steps = range(1, STEPS * recipe.iterations + 1)
    return {
        "points": kills,
        "killed": killed,
        "ended": ended,
        "unfinished": unfinished,
        "resumed": [batch["step"] for batch in after],
        "batches": all(batch == expected[batch["step"]] for batch in before + after),
        "weights": weights_of(folder) == weights_of(plain),
        "sessions": names_of(run) == names_of(plain / "run"),
        "trained": trained_of(run) == trained_of(plain / "run"),
        "metrics": [line["step"] for line in read_metrics(run / METRICS)] == list(steps),
        "tidy": is_tidy(run, recipe.adapters) and names_in(run) == names_in(plain / "run"),
    }


def is_tidy(run: Path, policies: int) -> bool:
    """Return True of a run with so many published policies, whole checkpoints and no hidden
    folder."""
    published = [path.name for path in (run / "published").iterdir()]
    hidden = [path.name for path in run.iterdir() if path.is_dir()] + published
    checkpoints = (run / "checkpoints").glob("checkpoint-*")
    return (
        len(published) <= policies
        and not any(name.startswith(".") for name in hidden)
        and all((path / "rng_state.pth").exists() for path in checkpoints)
    )


def names_in(run: Path) -> set[str]:
    """Return the names of the files of the finished model."""
    return {path.name for path in (run / FINISHED).iterdir()}


def weights_of(folder: Path) -> bytes:
    (file,) = (folder / "run" / FINISHED).glob("*.safetensors")
    return file.read_bytes()


def names_of(run: Path) -> list[str]:
    """Return the recorded sessions, without the name of the run and the attempt."""
    return sorted(map(place_in_any_run, load_sessions(run)))


def place_in_any_run(session_id: str) -> str:
    """Return an id without the name of the run and without attempts."""
    return re.sub(r"[0-9a-f]{8}\.|(?<=-\d)\.\d+", "", session_id)


def trained_of(run: Path) -> list[tuple[Any, ...]]:
    """Return what each optimizer step trained of each session, and with what values."""
    with SessionIndex(run, TABLE) as index:
        rows = [row for name in index.session_ids for row in trained_steps(index, str(name))]
    trained = []
    for row in rows:
        place = place_in_any_run(row.session_id)
        values = (str(row.differences), str(row.weights), str(row.ledger))
        trained.append((row.step, place, *values, row.advantage, row.reason))
    return sorted(trained)


def recipe_of(kind: str) -> str:
    adapted = kind in ("lora", "max_staleness")
    publish = "lora" if adapted else "checkpoint"
    recipe = RECIPE.format(publish=publish, iterations=1 + (kind == "twice"))
    if kind == "max_staleness":
        recipe = recipe.replace("adapters = 2", "max_staleness = 1")
        recipe = recipe.replace("[grpo]", "[forks]\nsessions = 2\n\n[grpo]")
    if not adapted:
        recipe = recipe.replace("adapters = 2\n", "")
    return recipe + (LORA if adapted else "")


def main(folder: Path, points: dict[str, list[list[str]]]) -> None:
    """Write the recipes, train without a kill, and then once for each list of points."""
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # no threads before the forks
    write_inputs(folder, TASKS)
    AutoModelForCausalLM.from_pretrained(folder / "model")  # fills caches of transformers
    gc.freeze()
    reports = []
    for kind in points:
        place = folder / kind
        place.mkdir()
        (place / "recipe.toml").write_text(recipe_of(kind))
        (place / "plain").mkdir()
        assert train(place / "plain") == 0
        for number, kills in enumerate(points[kind]):
            (place / str(number)).mkdir()
            reports.append(
                {"publish": kind, **report_of(place / "plain", place / str(number), kills)}
            )
    print(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), SHORT if "short" in sys.argv else POINTS)
