"""The account of a token: every sampled token is trained once, or left out for a named reason.

                  tokens that calls sampled
    build_traces    - of calls that nothing is learned from    aborted failed missing_logprobs
    (build.py)                                                 violation grammar missing_routing
                                                               missing_scores stale ROLE
                                                               superseded
                    - beyond `max_tokens` of a trace           over_length
                  = in traces: each token has mask 1 in exactly one
    label_session   - of sessions without a reward             infrastructure unjudged cancelled
    (sessions.py)                                              excluded suspicious no_reward
                  = in a batch
    with_signal     - of groups whose rewards are equal        no_signal
    (training/      (skipped with a `teacher_share`)
    step/batch.py)
                  = in the loss

`LeftOut` says what each reason means. A call, and a token of it, has one reason: the first that
holds, in the order of `LeftOut`. The code of each step asks in this order: `_untrainable`,
`classify_calls` and `_spans` of build.py, then `label_session`. Who adds or moves a reason changes
both, and the table of recipes/site/pages/traces.md; only the place of `stale` is read from
`LeftOut`. A training from recorded runs (`training/offline.py`) gives `no_signal` too.

Every step takes tokens out of a `Ledger` with `leave_out`, so that `sampled` never changes. The
sums are checked, and a difference is a `LedgerError` or stops the training, where

- `build_traces` has counted the calls of a session: the masks of its traces hold the trained
  tokens;
- `trace_session` has built a session: its calls hold the sampled tokens;
- the trainer (`training/step/trainer.py`) takes a batch, from wherever: sampled = trained + left
  out, and the masks of the batch again;
- an optimizer step is recorded (`trained.py`): the accounts of its sessions add up to the ledger of
  its batch.

A run's ledger (`Run.ledger`, `rolltap traces`) is the sum over its sessions, after `label_session`.
Prompt tokens are counted beside it: `CachedPrompts`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from rich.jupyter import JupyterMixin
from rich.table import Table

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.records import Call, CallKind, CallRole

LeftOut = Literal[
    "aborted",
    "failed",
    "missing_logprobs",
    "violation",
    "grammar",
    "missing_routing",
    "missing_scores",
    "stale",
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
"""Why sampled tokens are not trained. When several reasons hold, the first in this order counts.

- `aborted`, `failed`: the call's status.
- `missing_logprobs`: the call has none.
- `violation`: the call breaks an invariant of its tokens (`find_violation`), or its prompt cannot
  be rebuilt.
- `grammar`: the call's `under_grammar`.
- `missing_routing`: the experts of some of the call's tokens are asked for, and were not recorded.
- `missing_scores`: the scores of its tokens are asked for (a teacher's), and the run does not have
  them.
- `stale`: in an online training, the token was sampled by weights that are older than those of its
  step by more than `max_staleness`, or by others.
- A role: the call's role was not selected.
- `superseded`: the harness asked again, and continued with the other answer.
- `over_length`: the token is beyond `max_tokens`.
- `infrastructure`, `unjudged`, `cancelled`: the session's outcome.
- `excluded`: the recipe leaves out its outcome.
- `suspicious`: the recipe leaves out sessions with evidence of cheating.
- `no_reward`: the session has no reward for another reason, as `diverged` and `unknown` ones.
- `no_signal`: all rewards of its group are equal.
"""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Sampled tokens of a call, `completion_ids[start:end]`: trained, or left out for a reason."""

    call_id: str
    start: int
    end: int
    reason: LeftOut | None = None


LEAST_CACHEABLE = 1_000
"""Tokens that could have been cached, below which nothing is said about the cache."""
LEAST_CACHED_SHARE = 0.05
"""Share of them that is near to none. Provisional: no run has calibrated it."""


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
        return Ledger(
            sampled=self.sampled + other.sampled,
            trained=self.trained + other.trained,
            left_out=dict(Counter(self.left_out) + Counter(other.left_out)),
        )

    def leave_out(self, reason: LeftOut, tokens: int | None = None) -> "Ledger":
        """Return the ledger with some trained tokens left out; all of them by default."""
        if tokens is None:
            tokens = self.trained
        return self + Ledger(trained=-tokens, left_out={reason: tokens})

    def __str__(self) -> str:
        reasons = [f"{count:,} {reason}" for reason, count in sorted(self.left_out.items())]
        left_out = ", ".join(reasons) or "none"
        return f"{self.sampled:,}: {self.trained:,} to train, left out: {left_out}"

    def lines(self) -> list[tuple[str, int]]:
        """Return the ledger as names and numbers of tokens."""
        lines = [("sampled tokens", self.sampled), ("  to train", self.trained)]
        for reason, tokens in sorted(self.left_out.items()):
            lines.append((f"  left out: {reason}", tokens))
        return lines

    def __rich__(self) -> Table:
        table = Table("", "", show_header=False, title="tokens")
        for name, tokens in self.lines():
            table.add_row(name, str(tokens))
        return table

    def check(self) -> None:
        """Raise `LedgerError` unless sampled = trained + left out."""
        if self.sampled != self.trained + sum(self.left_out.values()):
            raise LedgerError(f"the ledger of sampled tokens does not add up: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAccount:
    """The account of one session. Each of its sampled tokens is in one span.

    Attributes:
        spans: Those that are trained are in the order in which the session's traces have their
            tokens.
        reason: Why the whole session is left out; None when it is not.
        group_id, reward: Those of the session in a batch.
    """

    spans: tuple[TokenSpan, ...] = ()
    reason: LeftOut | None = None
    group_id: str = ""
    reward: float | None = None

    @property
    def ledger(self) -> Ledger:
        """The ledger of the session."""
        ledger = Ledger()
        for span in self.spans:
            tokens = span.end - span.start
            ledger.sampled += tokens
            if span.reason is None:
                ledger.trained += tokens
            else:
                ledger.left_out[span.reason] = ledger.left_out.get(span.reason, 0) + tokens
        return ledger

    def leave_out(self, reason: LeftOut) -> "SessionAccount":
        """Return the account with all trained tokens left out. An earlier reason stays."""
        spans = tuple(replace(span, reason=span.reason or reason) for span in self.spans)
        return replace(self, spans=spans, reason=self.reason or reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrompts:
    """Prompt tokens of calls whose engine said how many it took from its prefix cache.

    Attributes:
        prompt_tokens: All tokens of the prompts.
        known_tokens: Those that the engine had processed in the parent call: its prompt and
            completion.
        cached_tokens: Those that the engine took from its cache.
    """

    calls: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "CachedPrompts") -> "CachedPrompts":
        sums = Counter(asdict(self)) + Counter(asdict(other))
        return CachedPrompts(**sums)

    @property
    def share(self) -> float | None:
        """Cached tokens of a prompt token; None without tokens."""
        if not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @property
    def unused(self) -> bool:
        """True when next to nothing of what the engine had processed came from its cache."""
        least = LEAST_CACHED_SHARE * self.known_tokens
        return self.known_tokens >= LEAST_CACHEABLE and self.cached_tokens < least


def cached_prompts(calls: Iterable[Call]) -> dict[CallKind, CachedPrompts]:
    """Return the prompts of calls by kind.

    Calls whose engine did not say how many tokens were cached are left out.
    """
    kinds: defaultdict[CallKind, CachedPrompts] = defaultdict(CachedPrompts)
    for call in calls:
        if call.cached_tokens is not None:
            kinds[call.kind] += CachedPrompts(
                calls=1,
                prompt_tokens=len(call.prompt_ids),
                known_tokens=call.prefix_length,
                cached_tokens=call.cached_tokens,
            )
    return dict(kinds)


def cached_shares(continued: Mapping[str, CachedPrompts]) -> dict[str, float]:
    """Return the share of all harnesses' prompts as `""`; with several, that of each by its name.

    `continued` has the prompts of continued calls by harness. Without tokens there is no share.
    """
    prompts = {"": sum(continued.values(), CachedPrompts())}
    if len(continued) > 1:
        prompts = {**continued, **prompts}
    return {name: each.share for name, each in prompts.items() if each.share is not None}
