"""The formats of exports, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from rolltap.addons.errors import InputError
from rolltap.trainer.console import Advance

ExportFormat = Literal["parquet", "openenv", "atif", "messages"]


def exporter(target: ExportFormat) -> Callable[[Path, Path, Advance], int]:
    """Return the function that writes a run to a folder and counts records. Raises `InputError` for other names."""
    if target not in get_args(ExportFormat):
        raise InputError(f"unknown format {target!r}: choose {', '.join(get_args(ExportFormat))}")
    # datasets takes a second to import
    from rolltap.trainer.runs.exports import atif, messages, openenv, parquet

    modules = {"parquet": parquet.export, "openenv": openenv.export, "atif": atif.export, "messages": messages.export}
    return modules[target]
