"""One session of a run, as `rolltap inspect` and notebooks show it, and sessions by their ids."""

import difflib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rolltap.addons.errors import InputError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import PHASES, Call, Session, json_text
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.untrusted import open_file
from rolltap.trainer.names import some
from rolltap.trainer.runs.views.outcomes import COMPARED, suspicion_rows
from rolltap.trainer.runs.views.sessions import Events, digest_session, session_events
from rolltap.trainer.runs.views.tables import make_table
from rolltap.trainer.runs.views.training import session_step_table
from rolltap.trainer.traces.build import classify_calls
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions, recorded_ids
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from rolltap.trainer.traces.trained import TABLE, TrainedSession, trained_steps

FIRST_WORDS = 60
"""Most characters of a reply in the call tree."""
_SHORT_ID = 8
"""Fewest characters of an id in the call tree."""
_MOST = 10
"""Most entries of a list in the evidence that are printed."""
_FACTS = ("task_id", "group_id", "preset_digest", *COMPARED[1:])
"""Columns of the session's row that are shown."""


@dataclass(frozen=True, slots=True)
class CallNode:
    """One call in the call tree of a session."""

    number: int
    """Its place in the order in which the calls of the session started, from 1."""
    call_id: str
    parent_id: str | None
    """Parent by the tokens, as for traces: the call whose prompt and completion are a prefix of
    this prompt."""
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
    calls: list[CallNode] = field(repr=False)
    ledger: Ledger
    policy_versions: list[str]
    """All weights that sampled tokens of its calls, in the order of their first use."""
    suspicions: dict[str, int]
    """Rule -> how often the session matched it: of its row; of its calls so far while it has none.
    """
    revisions: list[Session] = field(repr=False)
    """All rows of the session, the one that counts last."""
    diff: str | None
    """File with the agent's changes, relative to the run folder; None when there is none."""
    trained: Sequence[TrainedSession] = field(repr=False)
    """The optimizer steps that took the session, by the table `trained`. With one, `ledger` is that
    of the newest."""

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values."""
        shown = asdict(replace(self, trained=()))
        shown["trained"] = [step.to_json() for step in self.trained]
        values: dict[str, Any] = json.loads(json_text(shown))
        return values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = list(_tables(self))
        if self.trained:
            tables.append(session_step_table(self.trained))
        else:
            tables.append(self.ledger.__rich__())
        # a label that is longer than a line is folded, not cut
        folded = options.update(no_wrap=False, overflow="fold")
        return console.render(Group(call_tree(self.calls, _title(self)), *tables), folded)


def find_id(
    prefix: str,
    ids: Collection[str],
    what: str,
    where: str,
) -> str:
    """Return the id that equals `prefix`, or the only one that starts with it.

    Raises `InputError`, which names similar ids.
    """
    if prefix in ids:
        return prefix
    found = sorted(known for known in ids if known.startswith(prefix))
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{len(found)} {what}s of {where} begin with {prefix!r}: {some(found)}")
    missing = f"{where} has no {what} {prefix!r}"
    near = difflib.get_close_matches(prefix, sorted(ids), n=5, cutoff=0.0)
    if near:
        missing += f", only {some(near, of=len(ids))}"
    raise InputError(missing)


def find_session_id(run: Path, prefix: str) -> str:
    """Return the id of the session with this id or unique prefix of it. Raises `InputError`."""
    return find_id(prefix, recorded_ids(run), "session", str(run))


def find_session(run: Path, prefix: str) -> RecordedSession:
    """Return the session with this id or unique prefix of it. Raises `InputError`."""
    return next(iter_sessions(run, [find_session_id(run, prefix)]))


def view_session(run: Path, prefix: str) -> SessionView:
    """Return the view of the session with this id or unique prefix of it.

    Raises `InputError` for an unknown id, `RunError` when the folder cannot be read and
    `LedgerError`.
    """
    recorded = find_session(run, prefix)
    with SessionIndex(run, TABLE) as trained, SessionIndex(run, "events") as index:
        events = session_events(index, recorded.session_id)
        steps = trained_steps(trained, recorded.session_id)
    return show_session(run, recorded, events, steps)


def show_session(
    run: Path,
    recorded: RecordedSession,
    events: Events,
    steps: Sequence[TrainedSession],
) -> SessionView:
    """Return the view of a session. `events` are its own, `steps` those that took it. Raises as
    `view_session`."""
    newest = None
    if steps:
        newest = steps[-1]
    counted = digest_session(trace_session(recorded, TraceOptions()), events, newest).row
    return SessionView(
        session_id=recorded.session_id,
        session=recorded.session,
        calls=call_nodes(recorded.calls),
        ledger=counted.ledger,
        policy_versions=sampling_versions(recorded.calls),
        suspicions=counted.suspicions,
        revisions=session_rows(run, recorded.session_id),
        diff=_find_diff(run, recorded.session_id),
        trained=steps,
    )


def sampling_versions(calls: Iterable[Call]) -> list[str]:
    """Return the weights that sampled tokens of calls, in the order of their first use."""
    versions: dict[str, None] = {}
    for call in calls:
        for span in call.weight_versions:
            if span.end > span.start:
                versions[span.version] = None
    return list(versions)


def _find_diff(run: Path, session_id: str) -> str | None:
    name = f"logs/{session_id}.diff"
    try:
        open_file(run, name).close()
    except OSError:
        return None
    return name


def call_nodes(calls: Sequence[Call]) -> list[CallNode]:
    """Return the call tree of one session's calls, which are in `start_order`."""
    parents, reasons = classify_calls(calls)
    nodes: list[CallNode] = []
    for call, parent, reason in zip(calls, parents, reasons, strict=True):
        parent_id = None
        known = 0
        if parent is not None:
            above = nodes[parent]
            parent_id = above.call_id
            known = above.prompt_tokens + above.completion_tokens
        node = CallNode(
            number=len(nodes) + 1,
            call_id=call.call_id,
            parent_id=parent_id,
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
            reply=_first_words(call),
        )
        nodes.append(node)
    return nodes


def _first_words(call: Call) -> str:
    """Return the start of a call's reply in one line: its text, else its tool calls, else its
    reasoning."""
    message = call.parsed_reply or {}
    functions = []
    for tool_call in message.get("tool_calls") or []:
        function = tool_call["function"]
        functions.append(f"{function['name']}({function['arguments']})")
    content = (message.get("content") or "").strip()
    text = content or ", ".join(functions) or message.get("reasoning_content") or ""
    line = " ".join(text.split())
    if len(line) > FIRST_WORDS:
        line = line[: FIRST_WORDS - 1] + "…"
    return line


def _title(view: SessionView) -> Text:
    title = Text.assemble(("session ", "bold"), view.session_id)
    session = view.session
    if session is None:
        return title
    reward = "no reward"
    if session.reward is not None:
        reward = f"reward {session.reward:g}"
    weights = ", ".join(view.policy_versions) or session.policy_version
    if weights:
        weights = f"weights {weights}"
    fields = [session.harness, session.status, weights, reward, session.error]
    return title.append(": " + ", ".join(filter(None, fields)))


def call_tree(nodes: Sequence[CallNode], title: Text) -> Tree:
    """Return the call tree. A chain of calls is one node, a line a call; branches are the nodes
    below it."""
    ids = [node.call_id for node in nodes]
    length = _SHORT_ID
    while len({call_id[:length] for call_id in ids}) < len(ids):
        length += 1
    children: defaultdict[str | None, list[CallNode]] = defaultdict(list)
    for node in nodes:
        children[node.parent_id].append(node)
    tree = Tree(title)
    stack = [(tree, node) for node in reversed(children[None])]
    while stack:
        above, node = stack.pop()
        chain = [_label(node, length)]
        while len(children[node.call_id]) == 1:
            node = children[node.call_id][0]
            chain.append(Text("↓ ").append_text(_label(node, length)))
        drawn = above.add(Text("\n").join(chain))
        for child in reversed(children[node.call_id]):
            stack.append((drawn, child))
    return tree


def _label(node: CallNode, length: int) -> Text:
    outcome: str | None = node.status
    if node.status == "completed":
        outcome = node.finish_reason
    label = Text.assemble(
        f"{node.number} ",
        (node.call_id[:length], "bold"),
        f" {node.role} {node.kind} ",
        (f"{node.new_tokens}+{node.completion_tokens} tokens", "cyan"),
        f" {outcome or ''}",
    )
    if node.left_out:
        label.append(f" not trained: {node.left_out}", "yellow")
    if node.violation:
        label.append(f" {node.violation}", "red")
    if node.reply:
        label.append(f"  {node.reply}", "dim")
    return label


def _tables(view: SessionView) -> Iterator[Table]:
    """Yield the tables of a session that have rows."""
    session = view.session
    if session is not None:
        facts = list(_facts(session))
        if facts:
            yield make_table("session", ("", ""), facts)
        evidence = list(_evidence(session.evidence))
        if view.diff is not None:
            evidence.append(("diff", view.diff))
        if evidence:
            yield make_table("evidence", ("", ""), evidence)
    matched = suspicion_rows([view.suspicions])
    if matched:
        columns = ("rule", "matches", "looks for", "cannot see")
        rules = [(row.rule, row.matches, row.looks_for, row.cannot_see) for row in matched]
        yield make_table("suspicions", columns, rules)
    if len(view.revisions) > 1:
        title = "rows of the session: the last counts"
        columns = ("revision", "status", "reward", "ended")
        yield make_table(title, columns, map(_revision, view.revisions))


def _facts(session: Session) -> Iterator[tuple[str, str]]:
    """Yield names and values of a session's columns that have one."""
    for name in _FACTS:
        value = getattr(session, name)
        if value:
            yield name, value
    phases = []
    for name in PHASES:
        seconds = getattr(session, f"{name}_seconds")
        if seconds is not None:
            phases.append(f"{name} {seconds:.1f} s")
    if phases:
        yield "phases", ", ".join(phases)
    for name, value in session.parts.items():
        yield f"part {name}", f"{value:g}"


def _evidence(evidence: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts of the evidence. The evidence of several judges follows, with their
    names before it."""
    for name, value in evidence.items():
        if name == "judges" and isinstance(value, dict):
            for judge, part in value.items():
                yield from _evidence(part, f"{prefix}{judge}: ")
        elif name == "tests" and isinstance(value, dict):
            counts = Counter(value.values())
            outcomes = [f"{count} {outcome}" for outcome, count in sorted(counts.items())]
            yield f"{prefix}tests", ", ".join(outcomes)
            bad = [f"{test}: {end}" for test, end in value.items() if end != "passed"]
            if bad:
                yield f"{prefix}tests not passed", _listed(bad)
        elif isinstance(value, list):
            if value:
                yield f"{prefix}{name}", _listed(value)
        elif isinstance(value, str):
            if value:
                yield f"{prefix}{name}", value
        elif value is not None and value != {}:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)


def _listed(values: Sequence[object]) -> str:
    lines = list(map(str, values[:_MOST]))
    if len(values) > _MOST:
        lines.append(f"… and {len(values) - _MOST} more")
    return "\n".join(lines)


def _revision(session: Session) -> tuple[object, ...]:
    reward = "none"
    if session.reward is not None:
        reward = f"{session.reward:g}"
    ended = ""
    if session.finished_at is not None:
        ended = session.finished_at.isoformat(timespec="seconds")
    return session.revision, session.status, reward, ended
