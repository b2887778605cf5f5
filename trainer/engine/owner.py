"""The owner of an engine: the training that publishes weights to it.

The engine keeps it in a register (`in_vllm.rolltap_owner`). It ends with the engine, as the published weights do.
"""

from dataclasses import dataclass
from pathlib import Path

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin


@dataclass(frozen=True, slots=True)
class Owner:
    """A training. `run` is its id, which its restarts share. `about` says where it runs, for people."""

    run: str
    about: str


class StolenError(EngineError):
    """Another training owns the engine."""


def claim(engine: EngineAdmin, owner: Owner, *, steal: bool = False) -> bool:
    """Take an engine for a training, from any other one only with `steal`.

    Returns False for a vLLM that `rolltap serve` did not start: it knows no owner. Raises `StolenError`, which names
    the present owner, and `EngineError`.
    """
    status, answer = engine.register("PUT", owner=owner.run, about=owner.about, steal=steal)
    if status == 409:
        raise StolenError(
            f"another training owns the engine at {engine.url}: {answer['owner']} ({answer['about']}). Wait until it "
            "has ended; if it was killed, take the engine from it (--steal, steal=True)"
        )
    return status == 200


def release(engine: EngineAdmin, owner: Owner) -> None:
    """Give an engine back, if the training still owns it. Raises `EngineError`."""
    engine.register("DELETE", owner=owner.run)


def note_base(engine: EngineAdmin, owner: Owner, model: Path) -> None:
    """Note that the owner has verified that the engine's own model is the one in a folder. Raises `EngineError`."""
    engine.register("PUT", owner=owner.run, about=owner.about, base=str(model.absolute()))


def noted_base(engine: EngineAdmin) -> str | None:
    """Return the folder as which a training has verified the engine's own model, if any. Raises `EngineError`."""
    status, answer = engine.register("GET")
    return answer.get("base") if status == 200 else None
