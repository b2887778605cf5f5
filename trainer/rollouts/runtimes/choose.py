"""Runtimes by name."""

from collections.abc import Sequence
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.container import ContainerRuntime
from rolltap.trainer.rollouts.runtimes.process import ProcessRuntime
from rolltap.trainer.rollouts.runtimes.runtime import Runtime


def make_runtime(name: str, *, tools: Sequence[Path] = ()) -> Runtime:
    """Return the runtime of a name. Raises `InputError` for one that does not exist."""
    if name == "process":
        return ProcessRuntime()
    if name == "container":
        return ContainerRuntime(tools=tools)
    raise InputError(f"no runtime is named {name!r}")
