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
    logprobs = values["call"].pop("logprobs")
    tokens = {}
    for part in _PARTS:
        tokens[part] = (values["call"].pop(f"{part}_ids"), values.pop(f"{part}_pieces"))
    redacted: JSON = secrets.redact_values(values)
    redacted["call"]["logprobs"] = [round(value, 4) for value in logprobs]
    for part, (ids, pieces) in tokens.items():
        redacted["call"][f"{part}_ids"] = ids
        redacted[f"{part}_pieces"] = pieces
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
    by_id: dict[str, JSON] = {}
    parents: dict[str, str | None] = {}
    for call in calls:
        call_id = call["call"]["call_id"]
        by_id[call_id] = call
        parents[call_id] = call["parent_id"]
    kinds: set[str] = set()
    found: list[list[Piece]] = []
    for last in parents.keys() - parents.values():
        pieces: list[Piece] = []
        for call_id in path_to(last, parents.__getitem__):
            for part in _PARTS:
                pieces += by_id[call_id][f"{part}_pieces"] or []
        texts = [piece[0] for piece in pieces]
        ends = list(accumulate(map(len, texts)))
        for kind, start, end in secrets.find("".join(texts)):
            kinds.add(kind)
            first_piece = bisect_right(ends, start)
            last_piece = bisect_left(ends, end)
            found.append(pieces[first_piece : last_piece + 1])
    # conversations share pieces: none is changed before all were searched
    for marked in found:
        for piece in marked:
            piece[:] = ["", piece[1], _MARK]
        marked[0][0] = REDACTED
    return kinds
