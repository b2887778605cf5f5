"""The parameters of running sessions."""

from dataclasses import dataclass, field

from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.runtimes.process import ProcessRuntime
from rolltap.trainer.rollouts.runtimes.runtime import Runtime


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
