"""The columns of the table `trained`: a row for each session of an optimizer step. Trainings write it, no recorder.

Of several rows of one session and step the last counts: a training that was stopped takes steps again.
"""

import pyarrow as pa

from rolltap.addons.store.records import DIGEST

_SPAN = [("call_id", pa.string()), ("start", pa.int32()), ("end", pa.int32())]

TRAINED_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("version", pa.string()),
        ("session_id", pa.string()),
        ("group_id", pa.string()),
        ("reward", pa.float32()),
        ("advantage", pa.float32()),
        ("reason", pa.string()),
        ("sampled", pa.int32()),
        ("trained", pa.int32()),
        ("left_out", pa.list_(pa.struct([*_SPAN, ("reason", pa.string())]))),
        ("spans", pa.list_(pa.struct(_SPAN))),
        ("differences", pa.list_(pa.float16())),
        ("weights", pa.list_(pa.float32())),
        (DIGEST, pa.string()),
    ]
)
