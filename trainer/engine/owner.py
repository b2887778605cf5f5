"""The owner of an engine: the training that publishes weights to it.

The engine keeps it in a register (`in_vllm.rolltap_owner`). It ends with the engine, as the published weights do.
"""

from dataclasses import dataclass

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin


@dataclass(frozen=True, slots=True)
class Owner:
    """A training. `run` is its id, which its restarts share. `about` says where it runs, for people."""

    run: str
    about: str


def claim(engine: EngineAdmin, owner: Owner, *, steal: bool = False) -> bool:
    """Take an engine for a training, from any other one only with `steal`.

    Returns False for a vLLM that `rolltap serve` did not start: it knows no owner. Raises `EngineError`, which names
    the present owner.
    """
    status, answer = engine.register("PUT", owner=owner.run, about=owner.about, steal=steal)
    if status == 409:
        raise EngineError(
            f"another training owns the engine at {engine.url}: {answer['owner']} ({answer['about']}). Wait until it "
            "has ended; if it was killed, take the engine from it (--steal, steal=True)"
        )
    return status == 200


def release(engine: EngineAdmin, owner: Owner) -> None:
    """Give an engine back, if the training still owns it. Raises `EngineError`."""
    engine.register("DELETE", owner=owner.run)
