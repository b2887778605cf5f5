"""The facts that nodes of a cluster tell of themselves; no Ray runs."""

import asyncio
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import RunError
from rolltap.trainer.nodes import cluster
from rolltap.trainer.nodes.messages import Failure
from tests.trainer.nodes.local import RayError


def ray_with(status):
    """Return a module `ray` whose cluster has one actor, which answers by a coroutine function."""
    actor = SimpleNamespace(status=SimpleNamespace(remote=status))
    return SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError),
        get_actor=lambda name: actor,
        util=SimpleNamespace(list_named_actors=lambda: ["1a2b-left"]),
    )


async def says_an_error():
    return Failure.of(RunError("its disk is full"), "left")


async def says_nothing():
    await asyncio.Event().wait()


async def is_gone():
    raise RayError("the actor is dead")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (says_an_error, "its disk is full"),
        (says_nothing, "it did not answer within 0.001 s"),
        (is_gone, "it does not answer: the actor is dead"),
    ],
)
async def test_a_node_that_does_not_say_its_status_has_its_name_and_why(status, error, monkeypatch):
    monkeypatch.setattr(cluster, "connect", lambda address: ray_with(status))
    monkeypatch.setattr(cluster, "STATUS_SECONDS", 0.001)
    assert await cluster.nodes_status("auto") == [{"run": "1a2b", "node": "left", "error": error}]
