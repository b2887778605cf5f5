"""Things that are made once for all sessions of a rollout, or of a whole training."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rolltap.trainer.blocking import run_to_end
from rolltap.trainer.rollouts.plan import Plan
from rolltap.trainer.rollouts.provenance import Provenances
from rolltap.trainer.rollouts.tasks.starts import Starts
from rolltap.trainer.rollouts.workplace import workplace


@dataclass(frozen=True, slots=True)
class Shared:
    """Things that are made once. `run_groups` may be called with them several times, in one event loop after another.

    Attributes:
        work: Folder for what sessions need while they run.
        digests: Task id -> the task's digest, which takes reading its folders.
    """

    work: Path
    starts: Starts
    provenances: Provenances
    digests: dict[str, str] = field(default_factory=dict)


@contextmanager
def shared(plan: Plan) -> Iterator[Shared]:
    """Yield what the sessions of a plan share, and remove its folder at the end. Raises `OSError` for a full disk."""
    with workplace() as work:
        yield Shared(work, Starts(work / "starts", plan.runtime), Provenances(plan.harness, plan.runtime, work))


@asynccontextmanager
async def shared_async(plan: Plan) -> AsyncIterator[Shared]:
    """Do what `shared` does without blocking the event loop."""
    stack = ExitStack()
    try:
        yield await run_to_end(stack.enter_context, shared(plan))
    finally:
        await run_to_end(stack.close)
