"""Node, and whether its own `fetch` goes through a proxy."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SECONDS = 20.0
_BEGINNING = 256


def node_version(program: str, environment: Mapping[str, str]) -> str:
    """Return the version of the Node that runs a program, for instance `22.21.0`; empty for another program.

    Such a program is Node itself, or a script whose first line names it.
    """
    path = environment.get("PATH")
    found = shutil.which(program, path=path)
    if found is None:
        return ""
    is_node = Path(found).name == "node"
    node = found if is_node else shutil.which("node", path=path)
    with Path(found).open("rb") as file:
        first = file.read(_BEGINNING).partition(b"\n")[0]
    if node is None or (not is_node and not re.match(rb"#!.*\bnode\b", first)):
        return ""
    try:
        told = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip().removeprefix("v")


def fetch_uses_proxy(version: str) -> bool:
    """Return True when this version follows `HTTPS_PROXY` with `NODE_USE_ENV_PROXY=1`: 22.21, 24.5 and newer.

    Source: the documentation of Node's command line. 24.0 does so in `fetch` alone.
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return numbers >= [24, 5] or [22, 21] <= numbers < [23, 0]
