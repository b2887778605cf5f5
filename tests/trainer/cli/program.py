"""The `rolltap` command as users run it, and a small program to run under it."""

import logging
import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rolltap.trainer.cli.main import SIGNALS, main

ROLLTAP = Path(sys.executable).with_name("rolltap")
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
ASK = f"""
import httpx, sys
reply = httpx.post("https://api.openai.com/v1/chat/completions", json={HELLO!r}, timeout=120)
print(reply.json()["choices"][0]["message"]["content"])
sys.exit(3)
"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASK_WITH_TOOLS = ASK.replace("json={", f"json={{'tools': [{TOOL!r}], ").replace(
    "reply.json()", "reply.raise_for_status().json()"
)
NO_CALL = ["no model call came: did the program use the proxy?", "rolltap doctor -- COMMAND"]
"""Words that a session without a call is told with."""


def run_rolltap(*arguments, cwd=None, env=None):
    """Run the command in this process, which has imported already what a process of its own would
    import."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    status = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        _written(patch, 1) as stdout,
        _written(patch, 2) as stderr,
    ):
        patch.setattr(logging.root, "handlers", [])  # pytest's
        patch.setattr(sys, "argv", ["rolltap", *map(str, arguments)])
        if cwd is not None:
            patch.chdir(cwd)
        if env is not None:
            patch.setattr(tempfile, "tempdir", None)  # $TMPDIR counts again
            for name in os.environ.keys() - env.keys():
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return CompletedProcess(arguments, status, *map(_read, (stdout, stderr)))


@contextmanager
def _written(patch, descriptor):
    """Give a file that has what this process and its children write to a descriptor."""
    kept = os.dup(descriptor)
    with tempfile.TemporaryFile("w+", buffering=1) as file:
        os.dup2(file.fileno(), descriptor)
        patch.setattr(sys, {1: "stdout", 2: "stderr"}[descriptor], file)
        try:
            yield file
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def _read(file):
    file.flush()
    file.seek(0)
    return file.read()
