"""The ledger: how many sampled tokens are trained, and how many are left out for which reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from rich.jupyter import JupyterMixin
from rich.table import Table

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.records import CallRole

LeftOut = Literal[
    "aborted",
    "failed",
    "missing_logprobs",
    "violation",
    "grammar",
    "other_weights",
    CallRole,
    "superseded",
    "over_length",
    "infrastructure",
    "unjudged",
    "cancelled",
    "excluded",
    "suspicious",
    "no_reward",
    "no_signal",
]
"""Why sampled tokens are not trained. `grammar`: the call's `under_grammar`. `other_weights`: in an online training, a
token of the call was sampled by other weights than those of its step. A role: the call's role was not selected.
`infrastructure`, `unjudged`, `cancelled`: the session's outcome. `excluded`: the recipe leaves out its outcome.
`suspicious`: the recipe leaves out sessions with evidence of cheating. `no_reward`: it has no reward for another
reason. When several reasons hold, the first in this order counts."""


@dataclass(slots=True, kw_only=True)
class Ledger(JupyterMixin):
    """Token counts: sampled, trained, and left out by reason. `+` adds two ledgers.

    Attributes:
        left_out: `LeftOut` reason -> number of tokens. `+` drops reasons with 0 tokens.
    """

    sampled: int = 0
    trained: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: "Ledger") -> "Ledger":
        left_out = Counter(self.left_out) + Counter(other.left_out)
        return Ledger(
            sampled=self.sampled + other.sampled, trained=self.trained + other.trained, left_out=dict(left_out)
        )

    def __str__(self) -> str:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{self.sampled:,}: {self.trained:,} to train, left out: {left_out or 'none'}"

    def lines(self) -> list[tuple[str, int]]:
        """Return the ledger as names and numbers of tokens."""
        left_out = [(f"  left out: {reason}", tokens) for reason, tokens in sorted(self.left_out.items())]
        return [("sampled tokens", self.sampled), ("  to train", self.trained), *left_out]

    def __rich__(self) -> Table:
        table = Table("", "", show_header=False, title="tokens")
        for name, tokens in self.lines():
            table.add_row(name, str(tokens))
        return table

    def check(self) -> None:
        """Raise `LedgerError` unless sampled = trained + left out."""
        if self.sampled != self.trained + sum(self.left_out.values()):
            raise LedgerError(f"the ledger of sampled tokens does not add up: {self}")
