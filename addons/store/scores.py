"""Log-probabilities of a call's sampled tokens by other weights: the table `scores`. No recorder writes it."""

from dataclasses import dataclass, field

from rolltap.addons.store.records import schema_of


@dataclass(slots=True)
class Score:
    """Scores of a call's C sampled tokens at temperature 1. Of several rows of one call and name the last counts.

    Attributes:
        name: Name of the scores in the run. One scorer has it.
        scorer: Folder or full name of the model, whose tokenizer is that of the run, and the name of its weights.
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
