"""The key of an engine, which its clients send with every request.

It is kept in a file, never in a run or a log.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from rolltap.addons.errors import InputError

KEY_FILE = "ROLLTAP_ENGINE_KEY_FILE"
"""Environment variable with the path of the key file, for the recorder and all commands."""


def read_key(file: str | Path | None = None) -> str | None:
    """Return the engine's key from a file, by default from the one that `KEY_FILE` names; None when
    none is named.

    Raises `InputError` if the file cannot be read, or does not hold one word of printable ASCII.
    """
    path = str(file or os.environ.get(KEY_FILE, ""))
    if not path:
        return None
    advice = "give the file that `rolltap serve` names, or one that holds vLLM's --api-key"
    try:
        key = Path(path).expanduser().read_bytes().decode("latin-1").strip()
    except OSError as error:
        why = f"cannot be read: {error.strerror}; {advice}"
        raise InputError(f"the engine's key file {path} {why}") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        why = f"does not hold one word of printable ASCII: {advice}"
        raise InputError(f"the engine's key file {path} {why}")
    return key


def make_key(file: Path) -> None:
    """Write a new key, which only this user can read. A file that exists is kept. Raises
    `OSError`."""
    with suppress(FileExistsError):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")


def authorization(key: str | None) -> dict[str, str]:
    """Return the header that vLLM's `--api-key` and `rolltap serve` ask for; none without a key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def key_refused(url: str, status: int, key: str | None) -> str | None:
    """Return what to do about an engine's status 401 or 403, or None for another status."""
    if status not in (401, 403):
        return None
    what = "requires a key" if key is None else "does not accept the key"
    option = "for mitmdump alone: rolltap_engine_key_file"
    advice = f"set {KEY_FILE} ({option}) to the file that `rolltap serve` names"
    return f"the engine at {url} {what} ({status}): {advice}"
