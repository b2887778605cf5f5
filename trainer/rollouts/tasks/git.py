"""Git commands that read nothing but the repository that they are given."""

import os
import subprocess
from pathlib import Path
from typing import IO

from rolltap.addons.errors import InputError

_SETTINGS = {
    "safe.directory": "*",  # a dataset may belong to another user
    "core.logAllRefUpdates": "false",
    "pack.useBitmaps": "false",  # they may have been written with replacements or grafts, and reach later commits then
}


def git(
    *arguments: str,
    folder: Path,
    stdin: str | IO[bytes] = "",
    stdout: IO[bytes] | None = None,
    may_fail: bool = False,
) -> str:
    """Run git in a repository, and return its output without the last line end.

    Settings of the user and of the system, replacements, grafts, and the network have no effect. The repository is
    `folder` itself, never one above it. Raises `InputError` when git is not installed, and when it fails; with
    `may_fail` its output is returned then.

    Args:
        stdin: Text, or a file that is open for reading.
        stdout: File for the output. The result is empty then.
    """
    try:
        ended = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=_environment(folder),
            input=stdin.encode() if isinstance(stdin, str) else None,
            stdin=None if isinstance(stdin, str) else stdin,
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
        )
    except FileNotFoundError as error:
        raise InputError(f"git cannot run in {folder}: {error.strerror}: {error.filename}") from error
    if ended.returncode != 0 and not may_fail:
        reason = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"status {ended.returncode}"]
        raise InputError(f"`git {arguments[0]}` failed in {folder}: {reason[0]}")
    return (ended.stdout or b"").decode(errors="surrogateescape").removesuffix("\n")


def _environment(folder: Path) -> dict[str, str]:
    settings = {"GIT_CONFIG_COUNT": str(len(_SETTINGS))}
    for number, (name, value) in enumerate(_SETTINGS.items()):
        settings |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return {
        **settings,
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_ALLOW_PROTOCOL": "none",  # a partial clone would fetch what it lacks
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_GRAFT_FILE": os.devnull,
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }
