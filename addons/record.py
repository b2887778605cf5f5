"""Script of the recorder: `mitmdump -s addons/record.py --set rolltap_out=RUN --set rolltap_engine=URL ...`."""

import sys

from rolltap.addons.capture import Capture
from rolltap.addons.egress import Egress
from rolltap.addons.limits import Descriptors, Limits
from rolltap.addons.log import Log
from rolltap.addons.recorder import Startup
from rolltap.addons.sessions import Sessions
from rolltap.addons.wire.listen import Listen

# Transformers imports torch when it is installed: three seconds and 200 MB that a tokenizer does not need.
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]

capture = Capture(lambda host, port: egress.is_named(host, port))
sessions = Sessions(capture.record)
egress: Egress = Egress(capture.record, sessions.session_of)
addons = [
    Log(),
    Startup(),
    Listen(capture.warnings),
    sessions,
    Limits(capture.record, capture.running_calls),
    Descriptors(capture.record),
    capture,
    egress,
]
