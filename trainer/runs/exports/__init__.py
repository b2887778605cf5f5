"""The formats that a run can be exported to, one module each.

`export(run, out, advance)` of each module writes the sessions of a run into `out`, an empty folder
that exists. It reports its progress in sessions to `advance`, and returns the number of records
written: rows, trajectories or conversations. The caller makes `out` atomic: it stages the folder
and renames it when `export` returns.

Secrets are kept: only `push_to_hub` leaves out sessions with one.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from rolltap.addons.errors import InputError
from rolltap.trainer.console import Advance

ExportFormat = Literal["parquet", "atif", "messages"]


def exporter(target: ExportFormat) -> Callable[[Path, Path, Advance], int]:
    """Return the function that writes a run to a folder and counts records. Raises `InputError` for
    other names."""
    if target not in get_args(ExportFormat):
        raise InputError(
            f"unknown format {target!r}: choose {', '.join(get_args(ExportFormat))}; push_to_hub"
            " for the Hub"
        )
    # on first use: datasets takes a second to import
    export: Callable[[Path, Path, Advance], int] = import_module(f"{__name__}.{target}").export
    return export
