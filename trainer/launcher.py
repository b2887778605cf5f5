"""The processes of a launcher (`torchrun`, `accelerate launch`), as its environment variables tell. Needs no torch."""

import os


def processes_started() -> int:
    """Return the number of training processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def runs_first() -> bool:
    """Return True in the process that prints: the first one of the launcher, or the only one."""
    return processes_started() == 1 or int(os.environ.get("RANK", 0)) == 0
