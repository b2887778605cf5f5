"""The metrics of a training in its run folder: one JSON object a line, in the order of the steps.

A line has `step`, the number of optimizer steps taken, and the metrics by name. A number that JSON lacks is null.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltap.addons.errors import RunError
from rolltap.addons.store.staging import write_atomically

METRICS = "metrics.jsonl"
"""Name of the file in the run folder."""


def append_metrics(path: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Append the metrics of a step, in one write. Raises `OSError`."""
    line = {"step": step, **{name: _json_value(value) for name, value in metrics.items()}}
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines, oldest first; none when there is no file. A last line that is being written is left out.

    Raises `RunError` for a line that is not a JSON object with a step.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    read = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            values["step"] + 0
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{path}, line {number} is not a step's metrics: correct or remove it") from error
        read.append(values)
    return read


def cut_metrics(path: Path, step: int) -> None:
    """Remove the lines after `step`, and a last line that was not written to its end.

    A training that resumes from the checkpoint of `step` takes the later steps again. Raises `RunError` as
    `read_metrics`, and `OSError`.
    """
    if not path.exists():
        return
    kept = "".join(json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step)
    if kept.encode() != path.read_bytes():
        write_atomically(path, kept)


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
