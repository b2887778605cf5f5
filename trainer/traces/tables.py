"""The trainer's own tables of a run folder: `trained` and `scores`. No recorder writes them.

Whoever reads or copies all tables of a run imports this file, which makes them known to the store.
"""

from dataclasses import dataclass, field

import pyarrow as pa
from pydantic import BaseModel, model_validator

from rolltap.addons.store.records import DIGEST, schema_of
from rolltap.addons.store.tables import TABLES as TABLES
from rolltap.addons.store.tables import add_table
from rolltap.addons.store.untrusted import Count, Logprobs, Span, TokenIds

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
"""The columns of `trained`: a row for each session of an optimizer step.

Of several rows of one session and step the last counts: a training that was stopped takes steps
again.
"""


class _TrainedRow(BaseModel):
    session_id: str = ""
    group_id: str = ""
    step: Count = 0
    sampled: Count = 0
    trained: Count = 0
    left_out: list[Span] = []
    spans: list[Span] = []


@dataclass(slots=True)
class Score:
    """Scores of a call's C sampled tokens at temperature 1, by other weights; a row of `scores`.

    Of several rows of one call and name the last counts.

    Attributes:
        name: Name of the scores in the run. One scorer has it.
        scorer: Folder or full name of the model, whose tokenizer is that of the run, and the name
            of its weights.
        logprobs: Natural-log probability of each sampled token, shape (C,).
        top_k: Number K of the likeliest tokens that are kept at each place.
        top_ids: These tokens, likeliest first, shape (C * K,), place by place.
        top_logprobs: Their natural-log probabilities, shape (C * K,).
    """

    session_id: str
    call_id: str
    name: str
    scorer: str
    logprobs: list[float] = field(repr=False)
    top_k: int = 0
    top_ids: list[int] = field(default_factory=list, repr=False)
    top_logprobs: list[float] = field(default_factory=list, repr=False)


SCORE_SCHEMA = schema_of(Score)


class _ScoreRow(BaseModel):
    session_id: str
    call_id: str
    name: str
    scorer: str
    logprobs: Logprobs
    top_k: Count
    top_ids: TokenIds
    top_logprobs: Logprobs

    @model_validator(mode="after")
    def _whole(self) -> "_ScoreRow":
        expected = self.top_k * len(self.logprobs)
        if not len(self.top_ids) == len(self.top_logprobs) == expected:
            raise ValueError(f"its top_ids are not {self.top_k} for each token")
        return self


add_table("trained", TRAINED_SCHEMA, _TrainedRow, own_column="trained")
add_table("scores", SCORE_SCHEMA, _ScoreRow, own_column="scorer")
