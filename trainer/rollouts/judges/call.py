"""Calls a Python function of the user's. A program of its own: `python -P call.py MODULE:FUNCTION [FOLDER OUTPUT]`.

It writes the function's result to the file OUTPUT as JSON, and ends with status 3 when there is none. Without FOLDER
and OUTPUT it only imports the function.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def main(function: str, folder: str | None = None, output: str = "") -> int:
    """Call the function with the folder, or only import it, and return the exit status."""
    module, _, name = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if folder is None:
            return 0
        text = json.dumps(found(Path(folder)), default=float)  # numbers of NumPy
    except Exception:
        traceback.print_exc()
        return 3
    Path(output).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
