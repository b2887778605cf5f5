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
        """Number of problems. 0: all calls were captured, and those with a history were
        continued."""
        return sum(finding.level == "problem" for finding in self.findings)

    @property
    def ready(self) -> bool:
        """True without a problem, when at least one call was continued, and a tool's result if it
        has tools."""
        return self.problems == 0 and bool(self.seen.continued) and self.seen.tools_tried

    @property
    def verdict(self) -> str:
        """One sentence, or two."""
        if self.problems:
            return f"{self.seen.program}: {counted(self.problems, 'problem')}."
        captured = f"{counted(len(self.seen.calls), 'call')} captured"
        if not self.seen.continued:
            untried = "no call continued another, so continuity was not tried"
            return f"{self.seen.program}: {captured}; {untried}."
        continued = f"{captured}, {len(self.seen.continued)} continued token for token"
        if self.ready:
            return f"{self.seen.program}: ready. {continued}."
        return f"{self.seen.program}: {continued}; no tool's result was seen."

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `calls` are in the order in which they started."""
        seen = self.seen
        calls = []
        for call in seen.calls:
            calls.append({**_named(_CALL, call), "tools": offered(call), "tool_calls": _made(call)})
        return {
            **_named(_SEEN, seen),
            "quirks": list(seen.quirks),
            "verdict": self.verdict,
            "ok": self.ready,
            "findings": [asdict(finding) for finding in self.findings],
            "calls": calls,
            "events": [_named(_EVENT, event) for event in seen.events],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.verdict, style=self._style())
        for finding in self.findings:
            colour = "red" if finding.level == "problem" else "yellow"
            yield Text.assemble((f"{finding.level}: ", colour), finding.text)
            if finding.advice:
                yield Text(f"    {finding.advice}")
        yield from self._calls()
        for quirk in self.seen.quirks:
            yield Text(f"quirk: {quirk}")
        lines = [line for line in self.seen.output.splitlines() if line.strip()]
        if lines and (self.problems or self.seen.exit_status):
            yield Text("last lines of its output:")
            for line in lines[-LAST_LINES:]:
                yield Text(f"    {line}")

    def _style(self) -> str:
        if self.problems:
            return "bold red"
        return "bold green" if self.ready else "bold yellow"

    def _calls(self) -> RenderResult:
        if not self.seen.calls:
            return
        apis: Counter[str] = Counter()
        table = Table("call", "prompt", "role", "evidence of the role", "it calls")
        for number, call in enumerate(self.seen.calls, 1):
            model = call.model or "not named"
            apis[f"{call.dialect} at {call.host}{call.path}, model {model}"] += 1
            made = ", ".join(_made(call))
            cells = (str(number), call.kind, call.role, call.role_evidence, made)
            table.add_row(*map(Text, cells))
        for api, count in apis.items():
            yield Text(f"API: {api}: {counted(count, 'call')}")
        yield table


def _named(names: str, found: object) -> dict[str, Any]:
    """Return attributes of an object."""
    return {name: getattr(found, name) for name in names.split()}


def _made(call: Call) -> list[str]:
    """Return the names of the tools that a call's reply calls."""
    reply = call.parsed_reply or {}
    return [made["function"]["name"] for made in reply.get("tool_calls") or []]
