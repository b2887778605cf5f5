"""Limits of a session's box."""

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Limits of all programs of a session together. None is no limit.

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
