"""The owner of an engine: the training that publishes weights to it.

The engine keeps it in a register (`in_vllm.rolltap_owner`), which ends with the engine, as the
published weights do.
"""

from typing import NamedTuple

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin


class Owner(NamedTuple):
    """A training. `run` is its id, which its restarts share. `about` says where it runs, for
    people."""

    run: str
    about: str


class StolenError(EngineError):
    """Another training owns the engine."""


def claim(engine: EngineAdmin, owner: Owner, *, steal: bool = False) -> bool:
    """Take an engine for a training, from any other one only with `steal`.

    Returns False for a vLLM that `rolltap serve` did not start: it knows no owner. Raises
    `StolenError`, which names the present owner, and `EngineError`.
    """
    status, answer = engine.register("PUT", owner=owner.run, about=owner.about, steal=steal)
    if status == 409:
        raise StolenError(
            f"another training owns the engine at {engine.url}: {answer['owner']}"
            f" ({answer['about']}). Wait until it has ended; if it was killed, take the engine from"
            " it (--steal, steal=True)"
        )
    return status == 200


def note_base(engine: EngineAdmin, owner: Owner, folder: str) -> None:
    """Note in the register of an engine that its owner has verified its own model to be that in a
    folder. Raises `EngineError`."""
    engine.register("PUT", owner=owner.run, about=owner.about, base=folder)


def release(engine: EngineAdmin, owner: Owner) -> None:
    """Give an engine back, if the training still owns it. Raises `EngineError`."""
    engine.register("DELETE", owner=owner.run)
