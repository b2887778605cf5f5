"""The result of `rolltap doctor`. `rich` prints it; `to_json` returns it as JSON values."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from rolltap.addons.store.records import Call, Event
from rolltap.trainer.doctor.findings import Finding, findings
from rolltap.trainer.doctor.observed import Observed

LAST_LINES = 12
"""Lines of the program's output that are printed."""


@dataclass(frozen=True, slots=True)
class Diagnosis(JupyterMixin):
    """Facts of one run of a program, and what they mean."""

    seen: Observed
    findings: list[Finding]
    """Problems first."""

    @classmethod
    def of(cls, seen: Observed) -> Self:
        """Return the diagnosis of what was seen."""
        return cls(seen, findings(seen))

    @property
    def problems(self) -> int:
        """Number of problems. 0: all calls were captured, and those with a history were continued."""
        return sum(finding.level == "problem" for finding in self.findings)

    @property
    def ready(self) -> bool:
        """True without a problem, and when at least one call was continued."""
        return self.problems == 0 and bool(self.seen.continued)

    @property
    def verdict(self) -> str:
        """One sentence, or two."""
        if self.problems:
            return f"{self.seen.program}: {self.problems} problem{'s' if self.problems > 1 else ''}."
        captured = f"{_calls(len(self.seen.calls))} captured"
        if self.ready:
            continued = len(self.seen.continued)
            return f"{self.seen.program}: ready. {captured}, {continued} continued token for token."
        return f"{self.seen.program}: {captured}; continuity not tried."

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values. `calls` are in the order in which they started."""
        seen = self.seen
        return {
            "program": seen.program,
            "verdict": self.verdict,
            "ok": self.ready,
            "exit_status": seen.exit_status,
            "stopped": seen.stopped,
            "version": seen.version,
            "tested_version": seen.tested_version,
            "quirks": list(seen.quirks),
            "findings": [asdict(finding) for finding in self.findings],
            "calls": [_call(call) for call in seen.calls],
            "events": [_event(event) for event in seen.events],
            "output": seen.output,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        style = "bold red" if self.problems else "bold green" if self.ready else "bold yellow"
        yield Text(self.verdict, style=style)
        for finding in self.findings:
            colour = "red" if finding.level == "problem" else "yellow"
            yield Text.assemble((f"{finding.level}: ", colour), finding.text)
            if finding.advice:
                yield Text(f"    {finding.advice}")
        for text in _apis(self.seen.calls):
            yield Text(text)
        if self.seen.calls:
            yield _call_table(self.seen.calls)
        if self.seen.events:
            yield _event_table(self.seen)
        for quirk in self.seen.quirks:
            yield Text(f"quirk: {quirk}")
        lines = [line for line in self.seen.output.splitlines() if line.strip()]
        if lines and (self.problems or self.seen.exit_status):
            yield Text("last lines of its output:")
            yield from (Text(f"    {line}") for line in lines[-LAST_LINES:])


def _call(call: Call) -> dict[str, Any]:
    names = ("call_id", "kind", "kind_reason", "role", "role_evidence", "status", "dialect", "host", "path", "model")
    tools = [str((tool.get("function") or tool).get("name")) for tool in call.parsed_tools or []]
    made = [made["function"]["name"] for made in (call.parsed_reply or {}).get("tool_calls") or []]
    return {**{name: getattr(call, name) for name in names}, "stream": call.stream, "tools": tools, "tool_calls": made}


def _event(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in ("kind", "method", "host", "path", "detail")}


def _apis(calls: Sequence[Call]) -> list[str]:
    """Return a line for each API, address and model."""
    used = Counter(f"{call.dialect} at {call.host}{call.path}, model {call.model or 'not named'}" for call in calls)
    return [f"API: {text}: {_calls(count)}" for text, count in used.items()]


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


def _call_table(calls: Sequence[Call]) -> Table:
    table = Table("call", "prompt", "role", "evidence of the role", "it calls")
    for number, call in enumerate(calls, 1):
        cells = (call.kind, call.role, call.role_evidence, ", ".join(_call(call)["tool_calls"]))
        table.add_row(str(number), *map(Text, cells))
    return table


def _event_table(seen: Observed) -> Table:
    table = Table("times", "other request", "event", "detail")
    told = Counter((f"{e.method} {e.host}{e.path}".strip(), e.kind, e.detail) for e in seen.events)
    for cells, count in told.items():
        table.add_row(str(count), *(Text(cell, overflow="fold") for cell in cells))
    return table
