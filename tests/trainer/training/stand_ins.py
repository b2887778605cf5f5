"""Stand-ins of an online training: a folder for the engine, a function for harness and recorder; points to be killed
at."""

import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.engine.admin import Models
from rolltap.trainer.rollouts.scheduler import Group, Plan
from rolltap.trainer.traces.reader import load_sessions
from tests.trainer.grpo.tiny import VOCABULARY, tiny_model

PROMPT = 6
FAULTS = re.compile(r"\.2\.(0-0|2-[01])\.")
"""Sessions that are faults when they are run first: in step 2 one of the first group, and all of a further group."""


class Points:
    """The points that a training passes. It is killed at the point `kill_at`."""

    def __init__(self, kill_at: str | None) -> None:
        self.step = 0
        self.passed: list[str] = []
        self._kill_at = kill_at
        self._counts: Counter[tuple[int, str]] = Counter()

    def reach(self, name: str) -> None:
        """Pass a point. Its full name begins with the step, and tells it from earlier points of the same name."""
        name = re.sub(r"[0-9a-f]{8}\.\d+\.\d+(-[0-9a-f]{16})?|\.\d+$", "", name)
        self._counts[self.step, name] += 1
        full = f"{self.step}: {name} {self._counts[self.step, name]}"
        self.passed.append(full)
        if full == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, label: Callable[..., str] | None = None) -> None:
        """Make a function pass a point before and after it. `label` names it by its arguments."""
        function = getattr(owner, name)

        def passing(*args: Any, **kwargs: Any) -> Any:
            what = label(*args) if label else name.strip("_")
            self.reach(f"before {what}")
            result = function(*args, **kwargs)
            self.reach(f"after {what}")
            return result

        setattr(owner, name, passing)


class FolderEngine:
    """Stands in for `EngineAdmin`: a folder with the loaded weights. It outlives a killed training, as vLLM does."""

    folder: Path
    points: Points

    def __init__(self, url: str) -> None:
        self.folder.mkdir(exist_ok=True)

    def require_endpoints(self) -> None:
        """Do nothing."""

    def runs_on_cpu(self) -> bool:
        """Return False, so that any model is published."""
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pass the points of a pause."""
        self.points.reach("paused")
        yield
        self.points.reach("before the engine goes on")

    def reload_weights(self, checkpoint: Path) -> None:
        """Replace the weights file by file, as an engine does that loads one tensor after the other."""
        (self.folder / "version").unlink(missing_ok=True)
        shutil.copy(checkpoint / "model.safetensors", self.folder)
        self.points.reach("after the engine has loaded the weights")

    def reset_prefix_cache(self) -> None:
        """Do nothing."""

    def set_weight_version(self, version: str) -> None:
        """Name the weights. No name is given twice."""
        self._name(version)
        (self.folder / "version").write_text(version)

    def models(self) -> Models:
        """Return the loaded adapters."""
        return Models("tiny", "tiny", 100, frozenset(path.name for path in self.folder.glob("policy-*")))

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter. No name is given twice."""
        self._name(name.removeprefix("policy-"))
        shutil.copytree(folder, self.folder / name)
        self.points.reach("after the engine has loaded the adapter")

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        shutil.rmtree(self.folder / name)

    def _name(self, version: str) -> None:
        names = self.folder / "names"
        assert not names.exists() or version not in names.read_text().splitlines(), f"{version} was published before"
        with names.open("a") as file:
            file.write(f"{version}\n")


class FakeRecorder:
    """Stands in for the recorder's process: makes the run folder."""

    def __init__(self, run: Path, **options: Any) -> None:
        self.path = run

    def __enter__(self) -> "FakeRecorder":
        write_metadata(self.path, {"model": "tiny"})
        return self

    def __exit__(self, *error: object) -> None:
        pass


def sessions_by(points: Points) -> Callable[..., Any]:
    """Return a function that stands in for `run_groups`."""

    async def run_groups(
        groups: Sequence[Group], plan: Plan, recorder: FakeRecorder, *, policy_version: str, advance: Any
    ) -> list[Session]:
        """Record sessions that are a function of the engine's weights, the task and the index, in any order."""
        model, weights = served(recorder.path.parent / "engine", policy_version)
        waiting = [(group, session_id) for group in groups for session_id in group.session_ids]
        random.Random(policy_version).shuffle(waiting)
        ended = []
        before = {session_id.rpartition(".")[0] for session_id in load_sessions(recorder.path)}
        with RunWriter(recorder.path, "never") as writer:
            for group, session_id in waiting:
                index = session_id.removeprefix(group.group_id).partition(".")[0]
                rng = random.Random(f"{weights} {group.task.id} {index}")
                calls = sampled(model, rng, group.task.id, session_id, policy_version)
                for call in calls:
                    writer.add_call(call)
                    points.reach("after a call was recorded")
                even = [token % 2 == 0 for call in calls for token in call.completion_ids]
                session = Session(
                    session_id=session_id,
                    task_id=group.task.id,
                    group_id=group.group_id,
                    status="completed",
                    reward=0.5 if group.task.id.startswith("flat") else sum(even) / len(even),
                    policy_version=policy_version,
                )
                if FAULTS.search(session_id) and session_id.rpartition(".")[0] not in before:
                    session.status, session.reward, session.error = "error", None, "no engine"
                points.reach("before a session is recorded")
                writer.add_session(session)
                points.reach("after a session was recorded")
                ended.append(session)
        return ended

    return run_groups


def served(engine: Path, version: str) -> tuple[Any, str]:
    """Return the model that the engine serves under a version, and the digest of its weights."""
    model = tiny_model()
    adapter = engine / f"policy-{version}" / "adapter_model.safetensors"
    if adapter.exists():
        model = get_peft_model(model, lora())
        named = {name.replace(".weight", ".default.weight"): weight for name, weight in load_file(adapter).items()}
        assert not model.load_state_dict(named, strict=False).unexpected_keys
    else:
        assert (engine / "version").read_text() == version, "the engine serves other weights"
        adapter = engine / "model.safetensors"
        model.load_state_dict(load_file(adapter))
    return model.eval(), sha256(adapter.read_bytes()).hexdigest()


@torch.no_grad()
def sampled(model: Any, rng: random.Random, task: str, session_id: str, version: str) -> list[Call]:
    """Return the calls of two turns, with tokens between them. The tokens are random, their probabilities the
    model's."""
    prompt = random.Random(task).choices(range(2, VOCABULARY), k=PROMPT)
    calls = []
    for turn in range(2):
        ids = rng.choices(range(2, VOCABULARY), k=rng.randrange(2, 6))
        scores = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        calls.append(
            Call(
                session_id=session_id,
                call_id=f"{turn}",
                prompt_ids=prompt,
                completion_ids=ids,
                logprobs=scores.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist(),
                weight_versions=[VersionSpan(version=version, start=0, end=len(ids))],
            )
        )
        prompt = prompt + ids + rng.choices(range(2, VOCABULARY), k=3)
    return calls


def lora() -> LoraConfig:
    """Return the adapter's configuration, the same as in the recipe."""
    return LoraConfig(r=2, target_modules="all-linear")
