"""Trying a program without vLLM, as `rolltap doctor` does."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rolltap.addons.errors import MissingPackageError

if TYPE_CHECKING:
    from rolltap.trainer.doctor.diagnosis import Diagnosis


def examine(
    command: Sequence[str] = (),
    *,
    harness: str | None = None,
    timeout: float = 120.0,
    options: Mapping[str, Sequence[str]] | None = None,
) -> "Diagnosis":
    """Run a program once, led by scripted replies, and return what came of it: see `rolltap.trainer.doctor.examine`.

    Raises `MissingPackageError` without the packages of the extra `record`, and what `examine` there raises.
    """
    try:
        from rolltap.trainer.doctor import examine as module
    except ImportError as error:
        message = f"rolltap doctor needs packages that are not installed ({error}): pip install 'rolltap[record]'"
        raise MissingPackageError(message) from error
    return module.examine(command, harness=harness, timeout=timeout, options=options)
