"""Records that cross between the driver and the nodes. Each is data: no exception is pickled."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rolltap.addons import errors
from rolltap.addons.engine.key import KEY_FILE
from rolltap.addons.errors import MissingPackageError, RolltapError, install_command
from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.node import EnteredPhase
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.traces.facts import Facts

P = ParamSpec("P")
T = TypeVar("T")


class Failure(NamedTuple):
    """An error on a node; the error of a session is in its row.

    `kind` is the name of one of rolltap's, or `OSError`.
    """

    kind: str
    node: str
    message: str

    @classmethod
    def of(cls, error: BaseException, node: str) -> "Failure":
        """Return the record of an error. One that is neither kind becomes a `RolltapError`."""
        for each in type(error).__mro__:
            name = each.__name__
            if name == "OSError" or _kind(name) is not None:
                return cls(name, node, str(error))
        return cls("RolltapError", node, f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """Return the error of this kind, which names the node."""
        message = f"node {self.node}: {self.message}"
        if self.kind == "OSError":
            return OSError(message)
        kind = _kind(self.kind) or RolltapError
        return kind(message)


def _kind(name: str) -> type[RolltapError] | None:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RolltapError):
        return kind
    return None


class Policies(NamedTuple):
    """The policies of a run, as the driver read them. Later ones have a higher `number`.

    `files` has part of the run -> its `policy.json`, if it has one.
    """

    number: int
    files: Mapping[str, str]


def recorded(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], Awaitable[T | Failure]]:
    """Let a method of an actor, which has a `name`, return a `Failure` in place of raising."""

    @wraps(method)
    async def call(actor: Any, /, *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        try:
            return await method(actor, *args, **kwargs)
        except Exception as error:
            return Failure.of(error, actor.name)

    return call


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a node's worker.

    `engine` is its own. Boxes hide `private`. `key_file` has the key of the engines.
    """

    config: RolloutConfig
    harness: Harness
    engine: str
    model: str
    private: tuple[Path, ...] = ()
    key_file: str = field(default_factory=lambda: os.environ.get(KEY_FILE, ""))

    def worker(self, out: Path) -> Worker:
        """Return a worker that records into a folder of this machine. Raises `InputError`."""
        if self.key_file:
            os.environ[KEY_FILE] = self.key_file
        return Worker(
            self.config,
            harness=self.harness,
            engine=self.engine,
            model=self.model,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class Package:
    """Rows and files of a run folder on a node that are new.

    Attributes:
        tables: Name of a table and an Arrow IPC stream of its new rows; the sessions come last.
        metadata: The folder's `run.json`.
        logs: Name of a log of an ended session -> its last bytes.
        part: The folder's place in the run of the driver; empty for the run itself.
    """

    tables: Sequence[tuple[str, bytes]]
    metadata: Mapping[str, Any]
    logs: Mapping[str, bytes]
    part: str = ""


class EndedAttempt(NamedTuple):
    """The end of an attempt. `row` is None if it never ran, and `facts` if it was stopped."""

    number: int
    row: Session | None
    facts: Facts | None


class Report(NamedTuple):
    """News of a node since its report before. It is given again until its number is acknowledged.

    Attributes:
        packages: A reference to a list of `Package`, or None. The rows of ended sessions are in it
            or in an earlier one.
        phases: Number of an attempt, and the phase for which it waits.
        silent: URLs of the node's engines that did not answer when a session had failed.
        is_over: True in the last report of a node, which runs no further session.
        failure: Why it is over; None if it was closed.
    """

    number: int
    packages: Any
    phases: Sequence[tuple[int, EnteredPhase]]
    ended: Sequence[EndedAttempt]
    silent: Sequence[str] = ()
    is_over: bool = False
    failure: Failure | None = None


def require_ray() -> Any:
    """Return the module `ray`. Raises `MissingPackageError`."""
    try:
        import ray
    except ImportError as error:
        why = f"--ray needs a package that is not installed: {install_command('ray')}"
        raise MissingPackageError(why) from error
    return ray
