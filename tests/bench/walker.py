"""A script for `mitmdump -s` that writes which files of `addons` a call visits. It is loaded before
the recorder."""

import inspect
import json
import sys
import threading
from pathlib import Path

from mitmproxy import ctx

_FOLDER = "/rolltap/addons/"
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of functions whose frames are entered more than once."""


class Walker:
    """An addon that writes the JSON file `bench_walk` whenever a connection of a client is closed.

    The file has all functions that ran in any thread since the connection before was closed, in the
    order of their first calls, as `file:name`, and all calls of a function by one of another file,
    as pairs of files. Calls through another package are not among these.
    """

    def __init__(self):
        self._clear()

    def load(self, loader):
        loader.add_option("bench_walk", str, "", "File that the walk is written to.")
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def client_disconnected(self, client):
        found = {"functions": list(self._functions), "hops": self._hops}
        self._clear()
        Path(ctx.options.bench_walk).write_text(json.dumps(found))

    def _clear(self):
        self._functions = {}
        self._hops = []
        self._entered = set()

    def _called(self, frame, event, _):
        file = _file_of(frame)
        if event != "call" or file is None:
            return
        if frame.f_code.co_flags & _RESUMED:
            if frame in self._entered:
                return
            self._entered.add(frame)
        self._functions[f"{file}:{frame.f_code.co_qualname}"] = None
        caller = frame.f_back and _file_of(frame.f_back)
        if caller is not None and caller != file:
            self._hops.append((caller, file))


def _file_of(frame):
    """Return the file of a function in `addons`, or None."""
    _, folder, file = frame.f_code.co_filename.partition(_FOLDER)
    return file if folder else None


addons = [Walker()]
