"""Script of the recorder: `mitmdump -s addons/record.py --set rolltap_out=RUN --set rolltap_engine=URL ...`."""

import sys
from types import SimpleNamespace

# Transformers imports torch when it is installed: three seconds and 200 MB that a tokenizer does not need.
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
# renderers imports openai for a client that is not used here: half a second
unused = sys.modules.setdefault("openai", SimpleNamespace(AsyncOpenAI=None))  # type: ignore[arg-type]

import pyarrow


class _NoPandas:
    """Pandas, which pyarrow imports if it is installed: a third of a second and 40 MB that a recorder does not need."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, _NoPandas)
pyarrow.array([0])  # it asks for pandas once
sys.meta_path.remove(_NoPandas)

from rolltap.addons.capture import Capture
from rolltap.addons.egress import Egress
from rolltap.addons.limits import Descriptors
from rolltap.addons.log import Log
from rolltap.addons.recorder import Startup
from rolltap.addons.sessions import Sessions
from rolltap.addons.wire.listen import Listen

if isinstance(unused, SimpleNamespace):
    del sys.modules["openai"]  # another script may use it

capture = Capture(lambda host, port: egress.is_named(host, port))
sessions = Sessions(capture.record)
egress: Egress = Egress(capture.record, sessions.session_of)
addons = [
    Log(),
    Startup(),
    Listen(capture.warnings),
    sessions,
    Descriptors(capture.record),
    capture,
    egress,
]
