"""How much of its prompts an engine took from its prefix cache."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolltap.addons.store.records import Call, CallKind

LEAST_TOKENS = 1_000
"""Tokens that could have been cached, below which nothing is said about the cache."""
LEAST_SHARE = 0.05
"""Share of them that is near to none. Provisional: no run has calibrated it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrompts:
    """Prompt tokens of calls whose engine said how many it took from its cache.

    Attributes:
        prompt_tokens: All tokens of the prompts.
        known_tokens: Those that the engine had processed in the parent call: its prompt and completion.
        cached_tokens: Those that the engine took from its cache.
    """

    calls: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "CachedPrompts") -> "CachedPrompts":
        return CachedPrompts(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            known_tokens=self.known_tokens + other.known_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )

    @property
    def share(self) -> float | None:
        """Cached tokens of a prompt token; None without tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def unused(self) -> bool:
        """True when next to nothing of what the engine had processed came from its cache."""
        return self.known_tokens >= LEAST_TOKENS and self.cached_tokens < LEAST_SHARE * self.known_tokens


def cached_prompts(calls: Iterable[Call]) -> dict[CallKind, CachedPrompts]:
    """Return the prompts of calls by kind. Calls whose engine did not say how many tokens were cached are left out."""
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
    """Return the share of all harnesses' prompts as `""`, and with several harnesses that of each by its name.

    `continued` has the prompts of continued calls by harness. Without tokens there is no share.
    """
    shares = {"": sum(continued.values(), CachedPrompts()).share}
    if len(continued) > 1:
        shares |= {harness: prompts.share for harness, prompts in continued.items() if harness}
    return {name: share for name, share in shares.items() if share is not None}
