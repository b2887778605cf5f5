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
KNOWN = {"harness_version": "1", "program_digest": "p", "image_digest": "i"}


class Known:
    """Stands in for `Provenances`."""

    def __init__(self, harness, **fields):
        self.provenance = Provenance(preset_digest=harness.digest(), **{**KNOWN, **fields})

    async def of(self, image):
        if image == "gone":
            raise InputError("no such image")
        return self.provenance


class Elsewhere(ProcessRuntime):
    name = "elsewhere"


async def parts(
    *,
    model="m",
    weights="default",
    digest="d",
    runtime=None,
    task=TASK,
    harness=HARNESS,
    config=None,
    **known,
):
    recorder = SimpleNamespace(model=str(model), engine="")
    settings = RolloutConfig.of({"timeout": 60, **(config or {})})
    context = SessionContext(settings, harness, runtime or ProcessRuntime(), recorder, Path())
    context.provenances = Known(harness, **known)
    context.digests["t"] = digest
    return key_parts(await key_values(task, context, weights))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"digest": "e"}, "task"),
        ({"config": {"timeout": 61}}, "timeout"),
        ({"runtime": Elsewhere()}, "runtime"),
        ({"model": "n"}, "model"),
        ({"weights": "default,1"}, "weights"),
        ({"harness_version": "2"}, "harness_version"),
        ({"program_digest": "q"}, "program"),
        ({"image_digest": "j"}, "image"),
        ({"config": {"recorder": {"rolltap_sampling": "{}"}}}, "rolltap_sampling"),
        ({"config": {"budget": {"calls": 3}}}, "rolltap_max_calls"),
        ({"config": {"recorder": {"rolltap_allow": ["a"]}}}, "rolltap_allow"),
        ({"harness": HARNESS.model_copy(update={"env": {"A": "1"}})}, "harness"),
    ],
)
async def test_each_of_them_changes_the_key_and_is_named(changed, name):
    known = await parts()
    other = await parts(**changed)
    assert changed_parts(known, other) == [name]
    assert group_key(known) != group_key(other)


async def test_an_image_that_cannot_be_had_does_not_end_the_rollout():
    gone = TASK.model_copy(update={"image": "gone"})
    assert (await parts(task=gone))["task"] == (await parts())["task"]


async def test_what_decides_nothing_does_not_change_it(tmp_path, monkeypatch):
    known = await parts()
    free = {"rolltap_fsync": "never", "rolltap_patience": "9", "rolltap_secret_file": "/s"}
    assert await parts(config={"recorder": free}) == known
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    known = await parts()
    for folder in ("m", tmp_path / "m", f"../{tmp_path.name}/m"):
        assert await parts(model=folder) == known
    own = TASK.model_copy(update={"timeout": 5})
    assert await parts(task=own) == await parts(task=own, config={"timeout": 61})
