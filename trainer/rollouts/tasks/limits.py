"""Limits of a session's box."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

_ISOLATED = {"memory_gib": 8.0, "processes": 1024, "disk_gib": 20.0}


class Limits(BaseModel):
    """Limits of all programs of a session together. None is no limit in the runtime `process`.

    The other runtimes, which isolate, have a limit of 8 GiB of memory, 1024 processes and 20 GiB on disk where a task
    sets none; cores stay without a limit.

    Attributes:
        cpus: Number of processor cores.
        memory_gib: Memory in GiB.
        processes: Number of processes and threads.
        disk_gib: Size in GiB of what the session writes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: float | None = Field(default=None, gt=0)
    memory_gib: float | None = Field(default=None, gt=0)
    processes: int | None = Field(default=None, ge=1)
    disk_gib: float | None = Field(default=None, gt=0)

    def of_isolated(self) -> Self:
        """Return these limits as a runtime that isolates holds them: its own in place of those that are None."""
        return self.model_copy(update={name: value for name, value in _ISOLATED.items() if getattr(self, name) is None})
