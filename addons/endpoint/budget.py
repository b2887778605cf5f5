"""Budgets of a session: its model calls, its sampled tokens, and the prompt tokens of one call.

A call takes from the budgets before it begins, and gives back what it did not use, so that calls
at the same time cannot use more than there is. Used is what the session's rows say, after a
restart too.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltap.addons.dialects.call import ContextOverflow, DialectError
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.routes import CHAT, DIALECTS
from rolltap.addons.options import RecorderOptions
from rolltap.addons.store.records import Call, Event

WAITED = ", while it waited for an engine: "
"""Part of the error of a call that was aborted while no engine answered it. The engine's error
follows."""
FINAL_STATUS = {each.NAME: 404 if each is CHAT else 400 for each in DIALECTS}
"""HTTP status of an error after which no call is answered, by API: harnesses end within a second
after it.

All retry 429 and 5xx; Codex retries 402 and 403 for seconds, mini-swe-agent (LiteLLM) 400 and 403
for minutes.
"""


class BudgetUsedUp(DialectError):
    """A budget of the session is used up: no later call is answered."""

    def __init__(self, what: str, dialect: Dialect) -> None:
        why = f"The budget of this session is used up: {what}."
        advice = "Further requests will fail: end the work here."
        status = FINAL_STATUS[dialect.NAME]
        super().__init__(f"{why} {advice}", status=status, code="insufficient_quota")


class PromptOverBudget(ContextOverflow):
    """A prompt of more tokens than a call of the session may have.

    Harnesses may compact their history and go on.
    """


def prompt_window(options: RecorderOptions, context_window: int) -> int:
    """Return the number of prompt tokens that a call may have of an engine's context window."""
    return min(context_window, options.max_prompt_tokens or context_window)


def require_fit(options: RecorderOptions, prompt_tokens: int, context_window: int) -> None:
    """Raise `ContextOverflow` for a prompt without room for a reply, or over the budget."""
    most = options.max_prompt_tokens
    if most and prompt_tokens > most:
        raise PromptOverBudget(prompt_tokens, most)
    if prompt_tokens >= context_window:
        raise ContextOverflow(prompt_tokens, context_window)


@dataclass(slots=True)
class Used:
    """Model calls that an engine was asked, and sampled tokens, of a session.

    Calls that end in a fault of ours, and requests that repeat a call, do not count. Aborted calls
    count, also without a token: an engine worked on them.
    """

    calls: int = 0
    tokens: int = 0

    def add(
        self,
        status: str,
        num_sampled: int,
        error: str | None,
        *,
        fault: bool = False,
    ) -> None:
        """Count a call that has ended.

        `error` is that of the call's row, `fault` True for a call that failed for a reason of ours.
        """
        waited = status == "aborted" and WAITED in (error or "")
        if not fault and not waited:
            self.calls += 1
            self.tokens += num_sampled

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "Used":
        """Return what the calls in these rows used."""
        used = cls()
        for row in rows:
            failed = row["status"] == "failed"  # its row does not say why
            used.add(row["status"], len(row["completion_ids"] or ()), row["error"], fault=failed)
        return used


@dataclass(slots=True, eq=False)
class Grant:
    """The share of a budget that one running call may use."""

    budget: "SessionBudget"
    tokens: int
    """Maximum number of sampled tokens."""
    cut: bool
    """True when that is less than the call would have without the budget."""

    def give_back(self, call: Call, *, fault: bool = False) -> Event | None:
        """Give back what an ended call did not use. Return an event `budget` when it was cut."""
        self.budget.free(self)
        self.budget.used.add(call.status, len(call.completion_ids), call.error, fault=fault)
        if not self.cut or call.finish_reason != "length":
            return None
        last = f"the last {self.tokens} of the tokens that may be sampled"
        return call.event("budget", f"the reply was cut after {last}")


@dataclass(slots=True)
class SessionBudget:
    """The budgets of a session, its use of them, and its running calls.

    Not thread-safe: use it in the event loop.
    """

    options: RecorderOptions
    used: Used
    running: list[Grant] = field(default_factory=list)
    """The grants of its running calls."""
    _given_back: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, dialect: Dialect, max_tokens: int) -> Grant | None:
        """Grant a call up to `max_tokens` sampled tokens, or what is left. Raises `BudgetUsedUp`.

        Returns None when running calls may give back what is missing: try again after `given_back`.
        """
        most_calls = self.options.max_calls
        if most_calls and self.used.calls + len(self.running) >= most_calls:
            raise BudgetUsedUp(f"it may make {most_calls:,} model calls", dialect)
        left = max_tokens
        most = self.options.max_sampled_tokens
        if most:
            reserved = sum(grant.tokens for grant in self.running)
            left = most - self.used.tokens - reserved
            if left < max_tokens and self.running:
                return None
            if left <= 0:
                raise BudgetUsedUp(f"{most:,} tokens may be sampled for it", dialect)
        grant = Grant(self, min(left, max_tokens), left < max_tokens)
        self.running.append(grant)
        return grant

    def free(self, grant: Grant) -> None:
        """End a grant."""
        self.running.remove(grant)
        self._given_back.set()

    async def given_back(self) -> None:
        """Wait until a running call has ended."""
        self._given_back.clear()
        await self._given_back.wait()
