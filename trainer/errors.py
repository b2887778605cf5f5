"""Errors that the user can mend: printed without a traceback."""

from pydantic import ValidationError


class UserError(Exception):
    """What went wrong, where, and what to do."""


def describe(error: ValidationError) -> str:
    """A pydantic error as one line that names each key, its value and the fault."""
    faults = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"]) or "the line"
        if fault["type"] == "extra_forbidden":
            faults.append(f"unknown key {key!r}")
        elif fault["type"] == "missing":
            faults.append(f"{key!r} is missing")
        else:
            faults.append(f"{key!r} is {fault['input']!r}: {fault['msg']}")
    return "; ".join(faults)
