"""Stand-ins of an online training: a folder for the engine, a function for harness and recorder;
points to be killed at."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import Whitespace

from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import EngineError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.engine.admin import Models, Sampled
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.traces.reader import load_sessions
from tests.trainer.training.step.tiny import VOCABULARY, tiny_model, tokenizer

PROMPT = 6
FAULTS = re.compile(r"\.2\.(0-0|1-[01])\.")
"""Sessions that are faults when they are run first: one of the first group of step 2, and all of
the second."""


class Points:
    """The points that a training passes. It is killed at the point `kill_at`."""

    def __init__(self, kill_at: str | None) -> None:
        self.step = 0
        self.passed: list[str] = []
        self._kill_at = kill_at
        self._counts: Counter[tuple[int, str]] = Counter()

    def reach(self, name: str) -> None:
        """Pass a point. Its full name begins with the step, and tells it from earlier points of the
        same name."""
        name = re.sub(r"[0-9a-f]{8}\.\d+\.\d+(-[0-9a-f]{16})?|\.\d+$", "", name)
        self._counts[self.step, name] += 1
        full = f"{self.step}: {name} {self._counts[self.step, name]}"
        self.passed.append(full)
        if full == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, label: str = "") -> None:
        """Make a function pass a point before and after it. `label` is its name at these points,
        and may have `{}` for the name of the file that it gets."""
        function = getattr(owner, name)

        def passing(*args: Any, **kwargs: Any) -> Any:
            what = label or name.strip("_")
            if "{}" in what:
                what = what.format(args[0].name)
            self.reach(f"before {what}")
            result = function(*args, **kwargs)
            self.reach(f"after {what}")
            return result

        setattr(owner, name, passing)


class FolderEngine:
    """Stands in for `EngineAdmin`: a folder with all that an engine knows. It outlives a killed
    training, as vLLM does.

    It is started by its first use, with the weights in `model`. The folder below `folder` is named
    by the URL's port.
    """

    folder: Path
    model: Path
    points: Points
    loaded: ClassVar[list[Path]] = []
    """Folders of the adapters that were loaded."""
    refuses: Collection[str] = ()
    """Ports whose engines refuse to load weights that are not those of `model`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = self.folder / url.rpartition(":")[2]
        if not self.place.exists():
            self.place.mkdir(parents=True)
            shutil.copy(self.model / "model.safetensors", self.place)
            (self.place / "version").write_text("default")

    def require_endpoints(self) -> None:
        """Do nothing."""

    def require_adapters(self, max_staleness: int, adapters: int) -> None:
        """Do nothing."""

    def healthy(self) -> bool:
        return True

    def dtype(self) -> None:
        return None

    def runs_on_cpu(self) -> bool:
        return False

    def register(self, method: str, *, owner: str = "", **asked: Any) -> tuple[int, Any]:
        file = self.place / "owner"
        if method == "GET":
            return 200, {"owner": file.read_text() if file.exists() else None}
        present = file.read_text() if file.exists() else owner
        if present != owner and not asked.get("steal"):
            return 409, {"owner": present, "about": "the other training"}
        if method == "PUT":
            file.write_text(owner)
        else:
            file.unlink(missing_ok=True)
        return 200, {"owner": owner, **asked}

    def is_paused(self) -> bool:
        return (self.place / "paused").exists()

    def pause(self, *, keep: bool = False) -> None:
        (self.place / "paused").touch()
        self.points.reach("paused")

    def resume(self) -> None:
        """Pass the point before an engine goes on. Without whole weights it would crash."""
        assert (self.place / "version").exists(), "it has no usable weights"
        self.points.reach("before the engine goes on")
        (self.place / "paused").unlink(missing_ok=True)

    def serve(self, checkpoint: Path, version: str, *, keep: bool = False) -> None:
        self.pause()
        self.install(checkpoint, version)
        self.resume()

    def install(self, checkpoint: Path, version: str) -> None:
        """Replace the weights file by file, as an engine does that loads one tensor after the
        other; then name them."""
        assert self.is_paused(), "weights change only between calls"
        if (self.place / "version").exists():
            (self.place / "version").replace(self.place / "earlier")
        self._refuse(checkpoint)
        shutil.copy(checkpoint / "model.safetensors", self.place)
        self.points.reach("after the engine has loaded the weights")
        self._name(version, self.place / "model.safetensors")
        (self.place / "version").write_text(version)

    def weight_version(self) -> str:
        """Return the name of the weights. An engine that has loaded others keeps it until it is
        told the new one."""
        named = self.place / "version"
        return (named if named.exists() else self.place / "earlier").read_text()

    def models(self) -> Models:
        adapters = frozenset(path.name for path in self.place.glob("policy-*"))
        return Models("tiny", str(self.model), 1000, adapters)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter. No name is given twice."""
        self._refuse(folder)
        self._name(name.removeprefix("policy-"), folder / "adapter_model.safetensors")
        self.loaded.append(folder)
        shutil.copytree(folder, self.place / name)
        self.points.reach("after the engine has loaded the adapter")

    def unload_adapter(self, name: str) -> None:
        shutil.rmtree(self.place / name)

    def sample(self, model: str, prompt_ids: Sequence[int], tokens: int) -> Sampled:
        assert not self.is_paused(), "a call waits until the engine is resumed"
        policy, _ = served(self.place, None if model == "tiny" else model)
        ids = random.Random(model).choices(range(2, VOCABULARY), k=tokens)
        return Sampled(ids, logprobs_of(policy, [*prompt_ids], ids))

    def _refuse(self, folder: Path) -> None:
        if self.place.name in self.refuses and folder != self.model:
            raise EngineError(f"the engine at {self.url} refuses {folder.name}")

    def _name(self, version: str, weights: Path) -> None:
        """Give weights a name that no others have."""
        tensors = sorted(load_file(weights).items())
        digest = sha256(b"".join(tensor.numpy().tobytes() for _, tensor in tensors)).hexdigest()
        names = self.folder / "names"
        names.touch()
        known = dict(line.split() for line in names.read_text().splitlines())
        assert known.get(version, digest) == digest, f"{version} was given to other weights"
        with names.open("a") as file:
            file.write(f"{version} {digest}\n")


class FakeRecorder:
    """Stands in for the recorder's process: makes the run folder."""

    def __init__(self, run: Path, **options: Any) -> None:
        self.path = run
        self.engine = options["engine"]
        self.model = options["model"]

    def __enter__(self) -> "FakeRecorder":
        write_metadata(self.path, {"model": "tiny"})
        return self

    def __exit__(self, *error: object) -> None:
        pass


def runner_by(points: Points) -> type:
    """Return a class that stands in for `GroupRunner`. A group ends as soon as it is submitted."""

    class AtOnce:
        running = 0

        def __init__(self, nodes: Any, advance: Any, **_: Any) -> None:
            pass

        def add_node(self, node: Any) -> None:
            self.node = node

        def remove_node(self, node: Any, why: Exception) -> None:
            pass

        async def __aenter__(self) -> "AtOnce":
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

        async def submit(self, group: Group) -> asyncio.Future[list[Session]]:
            result = asyncio.get_running_loop().create_future()
            context = await self.node.context_of(group)
            run = context.recorder.path
            result.set_result(record_group(run, group, PolicyFile(run).read().version, points))
            return result

        def cancel_running(self, too_old: Any, why: str) -> None:
            """Do nothing: no session runs."""

    return AtOnce


def record_group(run: Path, group: Group, version: str, points: Points) -> list[Session]:
    """Record sessions that are a function of the engine's weights, the task and the index, in any
    order."""
    if not group.session_ids:
        return []
    places = sorted(path for path in FolderEngine.folder.iterdir() if path.is_dir())
    policies = [policy_of(place, version) for place in places]
    waiting = [*group.session_ids]
    random.Random(f"{version} {group.group_id}").shuffle(waiting)
    ended = []
    before = {session_id.rpartition(".")[0] for session_id in load_sessions(run)}
    is_flat = group.task.id.startswith("flat") and group.fork is None
    with RunWriter(run, "never") as writer:
        for session_id in waiting:
            index = session_id.removeprefix(group.group_id).partition(".")[0]
            model, weights = policies[len(ended) % len(policies)]
            rng = random.Random(f"{weights} {group.task.id} {index}")
            calls = sampled(model, rng, group.task.id, session_id, version)
            for call in calls:
                writer.add_call(call)
                points.reach("after a call was recorded")
            even = [token % 2 == 0 for call in calls for token in call.completion_ids]
            session = Session(
                session_id=session_id,
                task_id=group.task.id,
                group_id=group.group_id,
                status="completed",
                reward=0.5 if is_flat else sum(even) / len(even),
                policy_version=version,
            )
            if FAULTS.search(session_id) and session_id.rpartition(".")[0] not in before:
                session.status = "infrastructure"
                session.reward = None
                session.error = "no engine"
            points.reach("before a session is recorded")
            writer.add_session(session)
            points.reach("after a session was recorded")
            ended.append(session)
    return ended


def policy_of(place: Path, version: str) -> tuple[Any, str]:
    """Return what an engine serves under a version, as `served` does."""
    if (place / f"policy-{version}").exists():
        return served(place, f"policy-{version}")
    assert (place / "version").read_text() == version, "the engine serves other weights"
    assert not (place / "paused").exists(), "a call waits until the engine is resumed"
    return served(place, None)


def served(place: Path, adapter: str | None) -> tuple[Any, str]:
    """Return the model of an engine, with an adapter if one is named, and the digest of its
    weights."""
    model = tiny_model()
    weights = place / "model.safetensors"
    model.load_state_dict(load_file(weights))
    if adapter is not None:
        weights = place / adapter / "adapter_model.safetensors"
        model = get_peft_model(model, lora())
        named = {}
        for name, weight in load_file(weights).items():
            named[name.replace(".weight", ".default.weight")] = weight
        assert not model.load_state_dict(named, strict=False).unexpected_keys
    return model.eval(), sha256(weights.read_bytes()).hexdigest()


@torch.no_grad()
def sampled(model: Any, rng: random.Random, task: str, session_id: str, version: str) -> list[Call]:
    """Return the calls of two turns, with tokens between them. The tokens are random, their
    probabilities the model's."""
    prompt = random.Random(task).choices(range(2, VOCABULARY), k=PROMPT)
    calls = []
    for turn in range(2):
        ids = rng.choices(range(2, VOCABULARY), k=rng.randrange(2, 6))
        calls.append(
            Call(
                session_id=session_id,
                call_id=f"{turn}",
                prompt_ids=prompt,
                completion_ids=ids,
                logprobs=logprobs_of(model, prompt, ids),
                sampling=json.dumps(NEUTRAL_SAMPLING),
                weight_versions=[VersionSpan(version=version, start=0, end=len(ids))],
            )
        )
        prompt = prompt + ids + rng.choices(range(2, VOCABULARY), k=3)
    return calls


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], ids: list[int]) -> list[float]:
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
    scored: list[float] = chosen[:, 0].tolist()
    return scored


def tiny_folder(folder: Path) -> Path:
    """Write the tiny model, with a tokenizer that makes several tokens of a text. Return the
    folder."""
    tiny_model().save_pretrained(folder)
    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = Whitespace()
    words.save_pretrained(folder)
    return folder


def write_inputs(folder: Path, tasks: Sequence[str]) -> None:
    """Write the tiny model, tasks and a harness, as recipes of the tests name them."""
    tiny_folder(folder / "model")
    lines = [
        json.dumps({"id": task, "instruction": "go", "evaluate": ["true"]}) + "\n" for task in tasks
    ]
    (folder / "tasks.jsonl").write_text("".join(lines))
    (folder / "harness.toml").write_text('name = "h"\nprogram = "true"\nheadless = []\n')


def lora() -> LoraConfig:
    """Return the adapter's configuration, the same as in the recipe."""
    return LoraConfig(r=2, target_modules="all-linear")
