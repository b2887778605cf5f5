"""Records that cross between the driver and the nodes of a fleet. Each is data: no exception is pickled."""

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
from rolltap.trainer.rollouts.queue import Phase
from rolltap.trainer.rollouts.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


class Failure(NamedTuple):
    """An error on a node; that of a session is in its row. `kind` is the name of one of rolltap's, or `OSError`."""

    kind: str
    node: str
    message: str

    @classmethod
    def of(cls, error: Exception, node: str) -> "Failure":
        """Return the record of an error. One that is neither rolltap's nor the system's becomes a `RolltapError`."""
        names = [each.__name__ for each in type(error).__mro__]
        kind = next((name for name in names if name == "OSError" or _kind(name) is not None), "RolltapError")
        return cls(kind, node, str(error) if kind != "RolltapError" else f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """Return the error of this kind, which names the node."""
        kind = OSError if self.kind == "OSError" else _kind(self.kind) or RolltapError
        return kind(f"node {self.node}: {self.message}")


def _kind(name: str) -> type[RolltapError] | None:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, RolltapError) else None


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
    """Settings of a node's worker. `engine` is its own; boxes hide `private`; `key_file` has the key of the engines."""

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
        return Worker(self.config, harness=self.harness, engine=self.engine, model=self.model, out=out)


@dataclass(frozen=True, slots=True)
class Package:
    """Rows and files of a node's run that are new.

    Attributes:
        tables: Name of a table and an Arrow IPC stream of its new rows; that of the sessions is the last.
        metadata: The node's `run.json`.
        logs: Name of a log of an ended session -> its last bytes.
    """

    tables: Sequence[tuple[str, bytes]]
    metadata: Mapping[str, Any]
    logs: Mapping[str, bytes]


class Report(NamedTuple):
    """News of a node since its report before. It is given again until its number is acknowledged.

    `package` is a reference to a `Package`, or None. `ended` are sessions that have rows in it or an earlier one, with
    the seconds for which they were judged; `closed` are groups of which nothing is left.
    """

    number: int
    package: Any
    ended: Sequence[tuple[Session, float]]
    closed: Sequence[str]
    running: Mapping[str, str]
    """Session that runs -> the version of the weights that it began with."""
    counts: Mapping[Phase, int]
    failure: Failure | None


def require_ray() -> Any:
    """Return the module `ray`. Raises `MissingPackageError`."""
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(f"--ray needs a package that is not installed: {install_command('ray')}") from error
    return ray
