"""Redaction of secrets in the answers about calls: in their texts, and in tokens.

A piece of tokens whose text has a part of a secret loses its text and its ids.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rolltap.trainer.runs.secrets import REDACTED, Secrets
from rolltap.trainer.runs.views.text import Piece
from rolltap.trainer.traces.tree import path_to
from rolltap.trainer.viewer.data import JSON

_PARTS = ("prompt", "completion")
_MARK = "redacted"
"""Third entry of a piece that is redacted."""


def redact_call(values: JSON, secrets: Secrets) -> JSON:
    """Return a call's answer without secrets in its texts. Its tokens stay as `redact_tokens` left
    them. Log-probabilities have four decimals."""
    pieces = {name: values.pop(name) for name in ("prompt_pieces", "completion_pieces")}
    call = values["call"]
    numbers = {name: call.pop(name) for name in ("prompt_ids", "completion_ids", "logprobs")}
    redacted: JSON = secrets.redact_values(values) | pieces
    redacted["call"] |= numbers
    redacted["call"]["logprobs"] = [round(value, 4) for value in numbers["logprobs"]]
    return redacted


def redact_tokens(
    calls: Sequence[JSON], secrets: Secrets, *, everything: bool
) -> tuple[set[str], bool]:
    """Redact tokens in the answers of a session's calls, which have not the tokens of their
    parents.

    With `everything`, all are redacted where their text is not known. Returns the kinds of the
    secrets in the tokens, and whether tokens were redacted. Then those that show where prompts
    differ are removed: they are of several calls.
    """
    kinds = _mark_secrets(calls, secrets)
    is_hidden = False
    for call in calls:
        for part in _PARTS:
            ids = call["call"][f"{part}_ids"]
            pieces: list[Piece] | None = call[f"{part}_pieces"]
            if pieces is None and everything:
                pieces = [["", len(ids), _MARK]]
            at = 0
            for piece in pieces or ():
                end = at + piece[1]
                if piece[2:] == [_MARK]:
                    ids[at:end] = [None] * piece[1]
                    is_hidden = True
                at = end
    if is_hidden:
        for call in calls:
            if call["difference"]:
                call["difference"] |= {"common": [], "recorded": [], "rendered": []}
                call["difference_text"] = None
    return kinds, is_hidden


def _mark_secrets(calls: Sequence[JSON], secrets: Secrets) -> set[str]:
    """Mark the pieces that have a secret, which may begin in one call and end in another. Return
    the kinds of the secrets."""
    by_id = {call["call"]["call_id"]: call for call in calls}
    parents = {call_id: call["parent_id"] for call_id, call in by_id.items()}
    kinds: set[str] = set()
    found: list[list[Piece]] = []
    for last in parents.keys() - parents.values():
        pieces: list[Piece] = []
        for call_id in path_to(last, parents.__getitem__):
            for part in _PARTS:
                pieces += by_id[call_id][f"{part}_pieces"] or []
        ends = list(accumulate(len(piece[0]) for piece in pieces))
        for kind, start, end in secrets.find("".join(piece[0] for piece in pieces)):
            kinds.add(kind)
            found.append(pieces[bisect_right(ends, start) : bisect_left(ends, end) + 1])
    # conversations share pieces: none is changed before all were searched
    for within in found:
        for piece in within:
            piece[:] = ["", piece[1], _MARK]
        within[0][0] = REDACTED
    return kinds
