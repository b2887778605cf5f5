"""The parameters of running sessions.

Things that are made once for all sessions of a rollout, or of a whole training.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rolltap.trainer.concurrency import run_to_end
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.mitmdump import workplace
from rolltap.trainer.rollouts.provenance import Provenances
from rolltap.trainer.rollouts.runtimes.process import ProcessRuntime
from rolltap.trainer.rollouts.runtimes.runtime import Runtime
from rolltap.trainer.rollouts.workspace import Starts


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of running sessions.

    Attributes:
        concurrency: Maximum number of sessions that run at the same time.
        timeout: Seconds for the harness, without its judge. A task may have a time limit of its own.
        retries: Number of further attempts at a session that failed because of the engine, the recorder or the machine.
        give_up_after: Number of sessions in a row after which the rollout stops: each failed so, had no completed call,
            or could not be judged. They are of two tasks at least, if there are as many. Attempts do not count.
    """

    harness: Harness
    concurrency: int
    timeout: float
    runtime: Runtime = field(default_factory=ProcessRuntime)
    retries: int = 2
    give_up_after: int = 8


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
