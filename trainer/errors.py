"""Errors that the user can mend: printed without a traceback."""

import reprlib

from pydantic import ValidationError


class UserError(Exception):
    """A mistake of the user's: the message says what went wrong, where, and what to do."""


def describe(error: ValidationError) -> str:
    """A pydantic error as one line that names each key, its value, shortened, and the first fault in it."""
    faults: dict[str, str] = {}
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        match fault["type"]:
            case "extra_forbidden":
                what = f"unknown key {key!r}"
            case "missing":
                what = f"{key!r} is missing"
            case "json_invalid":
                what = fault["msg"]
            case _:
                what = f"{repr(key) if key else 'the line'} is {reprlib.repr(fault['input'])}: {fault['msg']}"
        # a list of token ids may have thousands of faults
        faults.setdefault(".".join(part for part in fault["loc"] if isinstance(part, str)), what)
    return "; ".join(faults.values())
