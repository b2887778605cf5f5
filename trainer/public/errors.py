"""The kinds of `rolltap.RolltapError`. A caller that handles them alike catches the base."""

from rolltap.addons.errors import (
    EngineError,
    HubError,
    InputError,
    LedgerError,
    MissingPackageError,
    RankError,
    RecorderError,
    RolltapError,
    RunError,
)

__all__ = [
    "EngineError",
    "HubError",
    "InputError",
    "LedgerError",
    "MissingPackageError",
    "RankError",
    "RecorderError",
    "RolltapError",
    "RunError",
]
