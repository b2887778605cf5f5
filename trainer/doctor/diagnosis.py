"""The result of `rolltap doctor`. `rich` prints it; `to_json` returns it as JSON values."""

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from rolltap.addons.store.records import Call
from rolltap.trainer.doctor.findings import Finding, Observed, findings, offered
from rolltap.trainer.names import counted

LAST_LINES = 12
"""Lines of the program's output that are printed."""
_CALL = "call_id kind kind_reason role role_evidence status dialect host path model stream"
_SEEN = "program exit_status stopped version tested_version output"
_EVENT = "kind method host path detail"
"""Fields of a call, of `Observed` and of an event that the diagnosis has as JSON."""


@dataclass(frozen=True)
class Diagnosis(JupyterMixin):
    """Facts of one run of a program, and what they mean."""

    seen: Observed

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings of the run, problems first."""
        return findings(self.seen)

    @property
    def problems(self) -> int:
        """Number of problems. 0: all calls were captured, and those with a history were continued."""
        return sum(finding.level == "problem" for finding in self.findings)

    @property
    def ready(self) -> bool:
        """True without a problem, when at least one call was continued, and a tool's result if it has tools."""
        return self.problems == 0 and bool(self.seen.continued) and self.seen.tools_tried

    @property
    def verdict(self) -> str:
        """One sentence, or two."""
        if self.problems:
            return f"{self.seen.program}: {counted(self.problems, 'problem')}."
        captured = f"{counted(len(self.seen.calls), 'call')} captured"
        if not self.seen.continued:
            return f"{self.seen.program}: {captured}; continuity not tried."
        continued = f"{captured}, {len(self.seen.continued)} continued token for token"
        if self.ready:
            return f"{self.seen.program}: ready. {continued}."
        return f"{self.seen.program}: {continued}; no tool's result was seen."

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values. `calls` are in the order in which they started."""
        seen = self.seen
        return {
            **{name: getattr(seen, name) for name in _SEEN.split()},
            "quirks": list(seen.quirks),
            "verdict": self.verdict,
            "ok": self.ready,
            "findings": [asdict(finding) for finding in self.findings],
            "calls": [_call(call) for call in seen.calls],
            "events": [{name: getattr(event, name) for name in _EVENT.split()} for event in seen.events],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        style = "bold red" if self.problems else "bold green" if self.ready else "bold yellow"
        yield Text(self.verdict, style=style)
        for finding in self.findings:
            colour = "red" if finding.level == "problem" else "yellow"
            yield Text.assemble((f"{finding.level}: ", colour), finding.text)
            if finding.advice:
                yield Text(f"    {finding.advice}")
        calls = self.seen.calls
        apis = Counter(f"{call.dialect} at {call.host}{call.path}, model {call.model or 'not named'}" for call in calls)
        yield from (Text(f"API: {api}: {counted(count, 'call')}") for api, count in apis.items())
        if calls:
            table = Table("call", "prompt", "role", "evidence of the role", "it calls")
            for number, call in enumerate(calls, 1):
                cells = (call.kind, call.role, call.role_evidence, ", ".join(_made(call)))
                table.add_row(str(number), *map(Text, cells))
            yield table
        yield from (Text(f"quirk: {quirk}") for quirk in self.seen.quirks)
        lines = [line for line in self.seen.output.splitlines() if line.strip()]
        if lines and (self.problems or self.seen.exit_status):
            yield Text("last lines of its output:")
            yield from (Text(f"    {line}") for line in lines[-LAST_LINES:])


def _call(call: Call) -> dict[str, Any]:
    return {**{name: getattr(call, name) for name in _CALL.split()}, "tools": offered(call), "tool_calls": _made(call)}


def _made(call: Call) -> list[str]:
    """Return the names of the tools that a call's reply calls."""
    return [made["function"]["name"] for made in (call.parsed_reply or {}).get("tool_calls") or []]
