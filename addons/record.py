"""Script of the recorder: `mitmdump -s addons/record.py --set rolltap_out=RUN ...`."""

import sys
from types import SimpleNamespace
from typing import Any

# Packages that these libraries import when they are installed, and a recorder does not need: torch
# takes three seconds and 200 MB, openai half a second, pandas a third of a second and 40 MB.
_UNUSED: dict[str, Any] = {"torch": None, "openai": SimpleNamespace(AsyncOpenAI=None)}
_hidden = _UNUSED.keys() - sys.modules.keys()
for _name in _hidden:
    sys.modules[_name] = _UNUSED[_name]


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, _NoPandas)

# they look for torch and for pandas once
import pyarrow
import transformers  # noqa: F401

pyarrow.array([0])

from rolltap.addons.log import Log
from rolltap.addons.proxy.capture import Capture
from rolltap.addons.proxy.egress import Egress
from rolltap.addons.proxy.limits import Descriptors
from rolltap.addons.proxy.listen import Listen
from rolltap.addons.proxy.sessions import Sessions
from rolltap.addons.recorder import Recorder

# another script may use them
sys.meta_path.remove(_NoPandas)
for _name in _hidden:
    del sys.modules[_name]

recorder = Recorder()
listen = Listen(recorder)
sessions = Sessions(recorder.record)
egress = Egress(recorder.record, sessions.session_of, recorder.options_of)
addons = [
    Log(),
    recorder,
    listen,
    sessions,
    Descriptors(recorder.record, boxes=listen.boxes),
    Capture(recorder, egress.allows),
    egress,
]
