"""The key of a group: all that decides its sessions is in it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rolltap.errors import InputError
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness, Provenance
from rolltap.trainer.rollouts.preparation import SessionContext
from rolltap.trainer.rollouts.resume import changed_parts, group_key, key_parts
from rolltap.trainer.rollouts.worker import key_values
from rolltap.trainer.tasks.task import Task

TASK = Task(id="t", instruction="go", evaluate=["true"])
HARNESS = Harness(name="h", program="p", headless=[])


class Known:
    """Stands in for `Provenances`."""

    def __init__(self, **fields):
        self.fields = {"harness_version": "1", "program_digest": "p", "image_digest": "i", **fields}

    async def of(self, image):
        if image == "gone":
            raise InputError("no such image")
        return Provenance(preset_digest=HARNESS.digest(), **self.fields)


class Elsewhere(ProcessRuntime):
    name = "elsewhere"


async def parts(
    *,
    model="m",
    weights="default",
    options=None,
    budget=None,
    digest="d",
    timeout=60,
    runtime=None,
    task=None,
    **known,
):
    config = RolloutConfig.of(
        {"timeout": timeout, "recorder": options or {}, "budget": budget or {}}
    )
    task = task or TASK
    recorder = SimpleNamespace(model=str(model), engine="")
    context = SessionContext(config, HARNESS, runtime or ProcessRuntime(), recorder, Path())
    context.provenances = Known(**known)
    context.digests["t"] = digest
    return key_parts(await key_values(task, context, weights))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"digest": "e"}, "task"),
        ({"timeout": 61}, "timeout"),
        ({"runtime": Elsewhere()}, "runtime"),
        ({"model": "n"}, "model"),
        ({"weights": "default,1"}, "weights"),
        ({"harness_version": "2"}, "harness_version"),
        ({"program_digest": "q"}, "program"),
        ({"image_digest": "j"}, "image"),
        ({"options": {"rolltap_sampling": "{}"}}, "rolltap_sampling"),
        ({"budget": {"calls": 3}}, "rolltap_max_calls"),
        ({"options": {"rolltap_allow": ["a", "b"]}}, "rolltap_allow"),
    ],
)
async def test_each_of_them_changes_the_key_and_is_named(changed, name):
    known, other = await parts(), await parts(**changed)
    assert changed_parts(known, other) == [name]
    assert group_key(known) != group_key(other)


async def test_the_preset_changes_the_key(monkeypatch):
    known = await parts()
    gone = TASK.model_copy(update={"image": "gone"})
    assert (await parts(task=gone))["task"] == known[
        "task"
    ]  # an image that cannot be had does not end the rollout
    monkeypatch.setitem(globals(), "HARNESS", HARNESS.model_copy(update={"env": {"A": "1"}}))
    assert changed_parts(known, await parts()) == ["harness"]


async def test_what_decides_nothing_does_not_change_it(tmp_path, monkeypatch):
    free = {"rolltap_fsync": "never", "rolltap_patience": "9", "rolltap_secret_file": "/s"}
    assert await parts(options=free) == await parts()
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (
        await parts()
        == await parts(model=tmp_path / "m")
        == await parts(model=f"../{tmp_path.name}/m")
    )
    own = TASK.model_copy(update={"timeout": 5})
    assert await parts(task=own, timeout=60) == await parts(task=own, timeout=61)
