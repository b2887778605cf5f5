"""One session and one call of a run, as `rolltap inspect` shows them. `rich` prints them (`views/show.py`)."""

import difflib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Call, Session
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.session_index import SessionIndex
from rolltap.addons.store.tables import read_batches
from rolltap.trainer.rollouts.suspicions.session import CALL_COLUMNS, EVENT_COLUMNS, recorded_suspicions
from rolltap.trainer.traces.build import judge_calls
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.outcomes import suspected
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from rolltap.trainer.traces.shared_prefixes import common_length
from rolltap.trainer.traces.tokens import pack
from rolltap.trainer.traces.tree import start_order
from rolltap.trainer.views.session_facts import parsed_session

FIRST_WORDS = 60
"""Most characters of a reply in the call tree."""
BEFORE, AFTER = 12, 12
"""Tokens shown before and after the first difference of two prompts."""
NEAR = 5
"""Most ids that an error names."""


@dataclass(frozen=True, slots=True)
class CallNode:
    """One call in the call tree of a session."""

    call_id: str
    parent_id: str | None
    """Parent by the tokens, as for traces: the call whose prompt and completion are a prefix of this prompt."""
    role: str
    kind: str
    kind_reason: str | None
    status: str
    finish_reason: str | None
    violation: str | None
    left_out: str | None
    """Reason why its sampled tokens are not trained; None when they are."""
    prompt_tokens: int
    new_tokens: int
    """Tokens of the prompt after the parent's prompt and completion."""
    completion_tokens: int
    reply: str
    """First words of the reply."""


@dataclass(frozen=True, slots=True)
class SessionView(JupyterMixin):
    """A session, its calls in the order in which they started, and its ledger."""

    session_id: str
    session: Session | None
    """The session's row; None when only calls were recorded."""
    calls: list[CallNode]
    ledger: Ledger
    policy_versions: list[str]
    """All weights that sampled tokens of its calls, in the order of their first use."""
    suspicions: dict[str, int]
    """Rule -> how often the session matched it: of its row; of its calls so far while it has none."""
    revisions: list[Session]
    """All rows of the session, the one that counts last."""
    diff: str | None
    """File with the agent's changes, relative to the run folder; None when there is none."""

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values, the columns that hold JSON parsed."""
        session = self.session and parsed_session(self.session)
        revisions = [parsed_session(row) for row in self.revisions]
        return json_values(asdict(self) | {"session": session, "revisions": revisions})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rolltap.trainer.views.show import render_session

        # a label that is longer than a line is folded, not cut
        return console.render(render_session(self), options.update(no_wrap=False, overflow="fold"))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which a prompt differs from the tokens that its session recorded before."""

    call_id: str
    """The earlier call whose prompt and completion share the longest prefix with the prompt."""
    position: int
    """Length of that prefix in tokens."""
    common: list[int]
    """Last tokens of the prefix."""
    recorded: list[int]
    """The earlier call's tokens from `position` on; empty when all of them are shared."""
    rendered: list[int]
    """The prompt's tokens from `position` on."""


@dataclass(frozen=True, slots=True)
class CallView(JupyterMixin):
    """One call, its parsed messages, and why it is not trained or not continued."""

    call: Call
    messages: list[dict[str, Any]]
    """New messages of the call."""
    tools: list[str] | None
    """Names of the tools shown to the model; None when they are the parent's."""
    left_out: str | None
    """Reason why its sampled tokens are not trained; None when they are."""
    difference: Divergence | None
    """For a `rendered` call, if an earlier call of its session was completed."""
    run: Path
    """Run folder of the call, whose tokenizer decodes it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rolltap.trainer.views.show import load_decoder, render_call

        return render_call(self, load_decoder(self.run))

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values, the columns that hold JSON parsed."""
        call = asdict(self.call) | {"prompt_ids": list(self.call.prompt_ids)}
        for name in ("sampling", "reply"):
            call[name] = json.loads(call[name]) if call[name] is not None else None
        call["tools"] = json.loads(self.call.tools) if self.call.tools is not None else None
        call["messages"] = self.messages
        difference = self.difference and asdict(self.difference)
        return json_values({"call": call, "left_out": self.left_out, "difference": difference})


def json_values(value: dict[str, Any]) -> dict[str, Any]:
    """Return JSON values: timestamps as ISO 8601; NaN and the infinities, which JSON lacks, as their names."""
    values: dict[str, Any] = json.loads(json.dumps(value, default=lambda time: time.isoformat()), parse_constant=str)
    return values


def find_id(prefix: str, ids: Collection[str], what: str, where: str) -> str:
    """Return the id that equals `prefix`, or the only one that starts with it. Raises `InputError`, which names similar
    ids."""
    if prefix in ids:
        return prefix
    found = sorted(known for known in ids if known.startswith(prefix))
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{len(found)} {what}s of {where} begin with {prefix!r}: {_some(found)}")
    near = difflib.get_close_matches(prefix, sorted(ids), n=NEAR, cutoff=0.0)
    raise InputError(f"{where} has no {what} {prefix!r}" + (f", only {_some(near, len(ids))}" if near else ""))


def find_session_id(run: Path, prefix: str) -> str:
    """Return the id of the session with this id or unique prefix of it. Raises `InputError`."""
    ids = set()
    for table in ("sessions", "calls"):
        for batch in read_batches(run, table):
            ids.update(batch.column("session_id").unique().to_pylist())
    return find_id(prefix, ids, "session", str(run))


def find_session(run: Path, prefix: str) -> RecordedSession:
    """Return the session with this id or unique prefix of it. Raises `InputError`."""
    return next(iter_sessions(run, [find_session_id(run, prefix)]))


def view_session(run: Path, prefix: str) -> SessionView:
    """Return the view of the session with this id or unique prefix of it.

    Raises `InputError` for an unknown id, `RunError` when the folder cannot be read and `LedgerError`.
    """
    recorded = find_session(run, prefix)
    ledger = trace_session(recorded, TraceOptions()).rewarded().ledger
    spans = [span for call in recorded.calls for span in call.weight_versions if span.end > span.start]
    versions = list(dict.fromkeys(span.version for span in spans))
    diff = f"logs/{recorded.session_id}.diff"
    return SessionView(
        session_id=recorded.session_id,
        session=recorded.session,
        calls=call_nodes(recorded.calls),
        ledger=ledger,
        policy_versions=versions,
        suspicions=find_suspicions(recorded, _events(run, recorded.session_id)),
        revisions=session_rows(run, recorded.session_id),
        diff=diff if (run / diff).is_file() else None,
    )


def find_suspicions(recorded: RecordedSession, events: Sequence[tuple[Any, ...]]) -> dict[str, int]:
    """Return the suspicions of a session: of its row, or of its calls and events so far. `events` as for
    `recorded_suspicions`."""
    if recorded.session is not None:
        return suspected(recorded.session)
    calls = [tuple(getattr(call, name) for name in CALL_COLUMNS) for call in recorded.calls]
    return recorded_suspicions(calls, events)


def _events(run: Path, session_id: str) -> list[tuple[Any, ...]]:
    with SessionIndex(run, "events") as index:
        batches = [batch.to_pydict() for batch in index.batches(session_id, EVENT_COLUMNS)]
    return [row for batch in batches for row in zip(*batch.values(), strict=True)]


def view_call(run: Path, session: str, prefix: str) -> CallView:
    """Return the view of a call, by unique prefixes of its session's id and of its own. Raises as `view_session`."""
    recorded = find_session(run, session)
    calls = {call.call_id: call for call in recorded.calls}
    call = calls[find_id(prefix, calls, "call", f"session {recorded.session_id}")]
    tools = None
    if call.tools is not None:
        tools = [str(tool.get("function", tool).get("name")) for tool in json.loads(call.tools)]
    left_out = judge_calls(recorded.calls)[1][recorded.calls.index(call)]
    difference = find_divergence(call, recorded.calls) if call.kind == "rendered" else None
    return CallView(call, call.parsed_messages, tools, left_out, difference, run)


def call_nodes(calls: Sequence[Call]) -> list[CallNode]:
    """Return the call tree of one session's calls, which are in `start_order`."""
    tree = []
    for call, parent, reason in zip(calls, *judge_calls(calls), strict=True):
        above = calls[parent] if parent is not None else None
        known = len(above.prompt_ids) + len(above.completion_ids) if above else 0
        tree.append(
            CallNode(
                call_id=call.call_id,
                parent_id=above.call_id if above else None,
                role=call.role,
                kind=call.kind,
                kind_reason=call.kind_reason,
                status=call.status,
                finish_reason=call.finish_reason,
                violation=call.violation,
                left_out=reason,
                prompt_tokens=len(call.prompt_ids),
                new_tokens=len(call.prompt_ids) - known,
                completion_tokens=len(call.completion_ids),
                reply=first_words(call),
            )
        )
    return tree


def first_words(call: Call) -> str:
    """Return the start of a call's reply in one line: its text, else its tool calls, else its reasoning."""
    message = json.loads(call.reply) if call.reply else {}
    functions = [tool_call["function"] for tool_call in message.get("tool_calls") or []]
    written = ", ".join(f"{function['name']}({function['arguments']})" for function in functions)
    text = " ".join((message.get("content") or "").split()) or written or message.get("reasoning_content") or ""
    line = " ".join(text.split())
    return line if len(line) <= FIRST_WORDS else line[: FIRST_WORDS - 1] + "…"


def find_divergence(call: Call, calls: Sequence[Call]) -> Divergence | None:
    """Return where the prompt of `call` differs from the completed calls that started before it, or None without any.

    Of calls that share equally long prefixes with it, the last one is compared.
    """
    earlier = [e for e in calls if e.status == "completed" and start_order(e) < start_order(call)]
    if not earlier:
        return None
    prompt = pack(call.prompt_ids)
    lengths = [common_length(prompt, pack(e.prompt_ids) + pack(e.completion_ids)) for e in earlier]
    position = max(lengths)
    best = max(i for i, length in enumerate(lengths) if length == position)
    return Divergence(
        call_id=earlier[best].call_id,
        position=position,
        common=list(call.prompt_ids[max(position - BEFORE, 0) : position]),
        recorded=[*earlier[best].prompt_ids, *earlier[best].completion_ids][position : position + AFTER],
        rendered=list(call.prompt_ids[position : position + AFTER]),
    )


def _some(ids: Sequence[str], of: int = 0) -> str:
    more = max(of, len(ids)) - len(ids[:NEAR])
    return ", ".join(ids[:NEAR]) + (f" and {more} more" if more else "")
