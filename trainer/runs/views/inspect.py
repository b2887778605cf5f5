"""One session and one call of a run, as `rolltap inspect` and notebooks show them."""

import difflib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rolltap.addons.errors import InputError
from rolltap.addons.store.door import open_file
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import Call, Session, json_text
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.tables import batch_rows
from rolltap.trainer.names import some
from rolltap.trainer.runs.suspicions.rules import CALL_COLUMNS, EVENT_COLUMNS, suspicions
from rolltap.trainer.runs.views.outcomes import fact_tables, make_table
from rolltap.trainer.runs.views.text import TokenText, load_text
from rolltap.trainer.runs.views.training import session_step_table
from rolltap.trainer.traces.build import judge_calls
from rolltap.trainer.traces.conversations import rebuild_conversations
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions, recorded_ids
from rolltap.trainer.traces.sessions import TraceOptions, suspected, trace_session
from rolltap.trainer.traces.tokens import common_length, pack
from rolltap.trainer.traces.trained import TABLE, TrainedSession, trained_steps
from rolltap.trainer.traces.tree import start_order

FIRST_WORDS = 60
"""Most characters of a reply in the call tree."""
BEFORE, AFTER = 12, 12
"""Tokens shown before and after the first difference of two prompts."""


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
        steps = [step.to_json() for step in self.trained]
        values: dict[str, Any] = json.loads(
            json_text(asdict(replace(self, trained=())) | {"trained": steps})
        )
        return values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = Text.assemble(("session ", "bold"), self.session_id)
        if (session := self.session) is not None:
            reward = "no reward" if session.reward is None else f"reward {session.reward:g}"
            versions = self.policy_versions or [session.policy_version or ""]
            weights = f"weights {', '.join(filter(None, versions))}" if any(versions) else None
            fields = (session.harness, session.status, weights, reward, session.error)
            title.append(": " + ", ".join(field for field in fields if field))
        facts = fact_tables(self.session, self.suspicions, self.diff, self.revisions)
        # a label that is longer than a line is folded, not cut
        folded = options.update(no_wrap=False, overflow="fold")
        tokens = session_step_table(self.trained) if self.trained else self.ledger
        return console.render(Group(call_tree(self.calls, title), *facts, tokens), folded)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which a prompt differs from the tokens that its session recorded
    before."""

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
    messages: list[dict[str, Any]] = field(repr=False)
    """New messages of the call; all of its request with `full`."""
    tools: list[str] | None
    """Names of the tools shown to the model; None when they are the parent's."""
    left_out: str | None
    """Reason why its sampled tokens are not trained; None when they are."""
    difference: Divergence | None
    """For a `rendered` call, if an earlier call of its session was completed."""
    run: Path
    """Run folder of the call, whose tokenizer decodes it."""
    previous: str | None
    """The call of the session that started before it."""
    next: str | None
    """The call that started after it."""
    full: bool = False
    """True to print all tokens of its prompt."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.is_terminal or console.is_jupyter
        return render_call(self, load_decoder(self.run), coloured=coloured)

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values, the columns that hold JSON parsed."""
        call = asdict(self.call) | {"prompt_ids": list(self.call.prompt_ids)}
        for name in ("sampling", "reply", "tools"):
            call[name] = json.loads(call[name]) if call[name] is not None else None
        call["messages"] = self.messages
        difference = self.difference and asdict(self.difference)
        shown: dict[str, Any] = {"call": call, "left_out": self.left_out, "difference": difference}
        shown |= {"previous": self.previous, "next": self.next}
        values: dict[str, Any] = json.loads(json_text(shown))
        return values


def find_id(prefix: str, ids: Collection[str], what: str, where: str) -> str:
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
    near = difflib.get_close_matches(prefix, sorted(ids), n=5, cutoff=0.0)
    raise InputError(
        f"{where} has no {what} {prefix!r}" + (f", only {some(near, of=len(ids))}" if near else "")
    )


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
    with SessionIndex(run, TABLE) as trained, SessionIndex(run, "events") as events:
        return show_session(
            run,
            recorded,
            session_events(events, recorded.session_id),
            trained_steps(trained, recorded.session_id),
        )


def show_session(
    run: Path,
    recorded: RecordedSession,
    events: Sequence[Mapping[str, Any]],
    steps: Sequence[TrainedSession],
) -> SessionView:
    """Return the view of a session. `events` are its own, `steps` those that took it. Raises as
    `view_session`."""
    ledger = (
        steps[-1].ledger if steps else trace_session(recorded, TraceOptions()).rewarded().ledger
    )
    spans = [
        span for call in recorded.calls for span in call.weight_versions if span.end > span.start
    ]
    versions = list(dict.fromkeys(span.version for span in spans))
    diff = f"logs/{recorded.session_id}.diff"
    return SessionView(
        session_id=recorded.session_id,
        session=recorded.session,
        calls=call_nodes(recorded.calls),
        ledger=ledger,
        policy_versions=versions,
        suspicions=session_suspicions(recorded, events),
        revisions=session_rows(run, recorded.session_id),
        diff=diff if _has_file(run, diff) else None,
        trained=steps,
    )


def _has_file(run: Path, name: str) -> bool:
    try:
        open_file(run, name).close()
    except OSError:
        return False
    return True


def session_events(index: SessionIndex, session_id: str | None) -> list[dict[str, Any]]:
    """Return the events of a session, with `EVENT_COLUMNS` and `call_id`; with None those without a
    session."""
    batches = index.batches(session_id, (*EVENT_COLUMNS, "call_id"))
    return [event for batch in batches for event in batch_rows(batch)]


def session_suspicions(
    recorded: RecordedSession, events: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Return the suspicions in the session's row, or of its calls and events so far."""
    if recorded.session is not None:
        return suspected(recorded.session)
    calls = [tuple(getattr(call, name) for name in CALL_COLUMNS) for call in recorded.calls]
    return suspicions(calls, [tuple(event[name] for name in EVENT_COLUMNS) for event in events])


def view_call(run: Path, session: str, prefix: str, *, full: bool = False) -> CallView:
    """Return the view of a call, by a unique prefix of its session's id, and one of its own or its
    number; with `full`, of its whole conversation and prompt. Raises as `view_session`."""
    recorded = find_session(run, session)
    number = _find_call(recorded, prefix)
    view = show_call(run, recorded.calls, number, judge_calls(recorded.calls)[1][number])
    return (
        replace(view, messages=rebuild_conversations(recorded.calls)[number].messages(), full=True)
        if full
        else view
    )


def _find_call(recorded: RecordedSession, given: str) -> int:
    ids = [call.call_id for call in recorded.calls]
    if given not in ids and given.isdecimal() and 1 <= int(given) <= len(ids):
        return int(given) - 1
    where = f"session {recorded.session_id} (calls 1 to {len(ids)})"
    return ids.index(find_id(given, ids, "call", where))


def show_call(run: Path, calls: Sequence[Call], number: int, left_out: str | None) -> CallView:
    """Return the view of the call `calls[number]` of a session. `left_out` is the reason that
    `judge_calls` gives."""
    call = calls[number]
    return CallView(
        call=call,
        messages=call.parsed_messages,
        tools=tool_names(call),
        left_out=left_out,
        difference=find_divergence(call, calls) if call.kind == "rendered" else None,
        run=run,
        previous=calls[number - 1].call_id if number else None,
        next=calls[number + 1].call_id if number + 1 < len(calls) else None,
    )


def tool_names(call: Call) -> list[str] | None:
    """Return the names of the tools shown to the model; None when they are the parent's."""
    given = call.parsed_tools
    return (
        None if given is None else [str(tool.get("function", tool).get("name")) for tool in given]
    )


def call_nodes(calls: Sequence[Call]) -> list[CallNode]:
    """Return the call tree of one session's calls, which are in `start_order`."""
    tree = []
    parents, reasons = judge_calls(calls)
    for number, call in enumerate(calls, 1):
        parent = parents[number - 1]
        reason = reasons[number - 1]
        above = calls[parent] if parent is not None else None
        known = len(above.prompt_ids) + len(above.completion_ids) if above else 0
        tree.append(
            CallNode(
                number=number,
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
    """Return the start of a call's reply in one line: its text, else its tool calls, else its
    reasoning."""
    message = json.loads(call.reply) if call.reply else {}
    functions = [tool_call["function"] for tool_call in message.get("tool_calls") or []]
    written = ", ".join(f"{function['name']}({function['arguments']})" for function in functions)
    text = (
        " ".join((message.get("content") or "").split())
        or written
        or message.get("reasoning_content")
        or ""
    )
    line = " ".join(text.split())
    return line if len(line) <= FIRST_WORDS else line[: FIRST_WORDS - 1] + "…"


def find_divergence(call: Call, calls: Sequence[Call]) -> Divergence | None:
    """Return where the prompt of `call` differs from the completed calls that started before it, or
    None without any.

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
        recorded=[*earlier[best].prompt_ids, *earlier[best].completion_ids][
            position : position + AFTER
        ],
        rendered=list(call.prompt_ids[position : position + AFTER]),
    )


Decoder = Callable[[list[int]], str]

_LIKELY = [(-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (float("-inf"), "red")]
"""Least log-probability of each colour."""
_SHORT_ID = 8
CONTEXT_TOKENS = 100
"""Most new tokens of the prompt that are shown before the completion."""


def load_decoder(run: Path) -> Decoder | None:
    """Return a function from token ids to text; None as `load_text`, whose errors it raises."""
    text = load_text(run)
    return text.text if isinstance(text, TokenText) else None


def call_tree(nodes: Sequence[CallNode], title: Text) -> Tree:
    """Return the call tree. A chain of calls is one node, a line a call; branches are the nodes
    below it."""
    ids = [node.call_id for node in nodes]
    length = next((n for n in range(_SHORT_ID, 64) if len({i[:n] for i in ids}) == len(ids)), 64)
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
        stack += [(drawn, child) for child in reversed(children[node.call_id])]
    return tree


def _label(node: CallNode, length: int) -> Text:
    outcome = node.finish_reason if node.status == "completed" else node.status
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


def render_call(
    view: CallView, decode: Decoder | None, *, coloured: bool = True
) -> Iterator[RenderableType]:
    """Yield the parts of a call: facts, divergence, messages, reply, tokens. Without a decoder
    tokens are shown as ids.

    Without colours each token is a line.
    """
    yield _facts(view)
    if view.difference is not None:
        yield _difference(view.difference, decode)
    yield Rule("messages" if view.full else "new messages")
    yield from map(message_text, view.messages)
    call = view.call
    if reply := call.parsed_reply:
        yield Rule("reply")
        yield message_text(reply)
    yield Rule("tokens")
    first = 0 if view.full else max(call.prefix_length, len(call.prompt_ids) - CONTEXT_TOKENS)
    yield (
        context(call, decode, first).append(completion(call, decode))
        if coloured
        else token_lines(call, decode, first)
    )
    legend = Text("\n")
    if view.left_out:
        legend.append(f"not trained: {view.left_out}  ", "yellow")
    if coloured:
        legend.append("context", "dim").append("  log-probability: ")
    for least, colour in _LIKELY if coloured else ():
        legend.append(
            f" {least:g} and more " if least > float("-inf") else " less ", f"reverse {colour}"
        )
    if decode is None:
        legend.append(
            "\ntoken ids, as the tokenizer of the run's model is not on this machine", "dim"
        )
    yield legend


def token_lines(call: Call, decode: Decoder | None, first: int) -> Text:
    """Return a line for each token of prompt and completion from `first` on: its position, id, text
    as JSON, and log-probability, which only sampled tokens have. What is not known is `-`."""
    logprobs = [*["-"] * len(call.prompt_ids), *(f"{logprob:.6g}" for logprob in call.logprobs)]
    lines = ["position id text logprob"]
    tokens = zip_longest([*call.prompt_ids, *call.completion_ids], logprobs, fillvalue="-")
    for position, (token, logprob) in islice(enumerate(tokens), first, None):
        text = "-" if decode is None else json.dumps(decode([int(token)]), ensure_ascii=False)
        lines.append(f"{position} {token} {text} {logprob}")
    return Text("\n".join(lines))


def context(call: Call, decode: Decoder | None, first: int) -> Text:
    """Return the tokens of the prompt from `first` on. Their mask is 0."""
    hidden, shown = first - call.prefix_length, list(call.prompt_ids[first:])
    text = Text(f"({hidden} tokens) … " if hidden > 0 else "", "dim italic")
    return text.append(
        "".join(f"{token} " for token in shown) if decode is None else decode(shown), "dim"
    )


def completion(call: Call, decode: Decoder | None) -> Text:
    """Return the completion, each token in the colour of its log-probability; without a decoder its
    ids."""
    text = Text()
    for token, logprob in zip_longest(
        call.completion_ids, call.logprobs[: len(call.completion_ids)]
    ):
        written = f"{token} " if decode is None else decode([token]) or f"<{token}>"
        colour = next(
            (colour for least, colour in _LIKELY if logprob is not None and logprob >= least), ""
        )
        text.append(written, colour)
    return text


def _facts(view: CallView) -> Table:
    call = view.call
    spans = [f"{span.version} [{span.start}:{span.end}]" for span in call.weight_versions]
    facts = {
        "call": call.call_id,
        "session": call.session_id,
        "role": f"{call.role} {f'({call.role_evidence})' if call.role_evidence else ''}",
        "prompt": (
            f"{call.kind}, {len(call.prompt_ids)} tokens, {call.prefix_length} of them its parent's"
        ),
        "why": call.kind_reason,
        "parent": call.parent_id,
        "previous call": view.previous,
        "next call": view.next,
        "status": ", ".join(filter(None, [call.status, call.finish_reason, call.error])),
        "violation": call.violation,
        "completion": (
            f"{len(call.completion_ids)} tokens, sum of log-probabilities {sum(call.logprobs):.3f}"
        ),
        "weights": ", ".join(spans),
        "request": (
            f"{call.dialect} {call.host}{call.path}"
            f" {call.model}{' streamed' if call.stream else ''}"
        ),
        "sampling": call.sampling,
        "tools": None if view.tools is None else ", ".join(view.tools) or "none",
        "started": call.started_at.isoformat(),
        "finished": call.finished_at and call.finished_at.isoformat(),
    }
    return make_table("", ("", ""), [(name, fact) for name, fact in facts.items() if fact])


def _difference(difference: Divergence, decode: Decoder | None) -> Text:
    text = Text(
        f"The prompt agrees with call {difference.call_id} up to token {difference.position}.\n",
        "bold",
    )
    text.append(f"  common    {written(difference.common, decode)}\n", "dim")
    text.append(f"  recorded  {written(difference.recorded, decode)}\n", "green")
    text.append(f"  rendered  {written(difference.rendered, decode)}\n", "red")
    return text


def written(ids: list[int], decode: Decoder | None) -> str:
    """Return tokens as ids, and as quoted text, in which white space is visible."""
    return f"{ids} {json.dumps(decode(ids), ensure_ascii=False) if decode and ids else ''}"


def message_text(message: dict[str, Any]) -> Text:
    """Return a message for a person."""
    text = Text.assemble((f"{message.get('role', '')}: ", "bold"))
    if reasoning := message.get("reasoning_content"):
        text.append(f"{reasoning}\n", "italic")
    text.append(str(message.get("content") or ""))
    for call in message.get("tool_calls") or []:
        text.append(f"\n{json.dumps(call['function'], ensure_ascii=False)}", "cyan")
    return text
