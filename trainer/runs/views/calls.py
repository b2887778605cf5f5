"""One call of a run, as `rolltap inspect` and notebooks show it: its messages, and its tokens with
their log-probabilities."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rolltap.addons.store.records import Call, json_text
from rolltap.trainer.runs.views.inspect import find_id, find_session
from rolltap.trainer.runs.views.tables import make_table
from rolltap.trainer.runs.views.text import Decoder, load_decoder
from rolltap.trainer.traces.build import classify_calls
from rolltap.trainer.traces.conversations import rebuild_conversations
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.tokens import common_length, to_bytes
from rolltap.trainer.traces.tree import start_order

NEAR = 12
"""Tokens shown before, and after, the first difference of two prompts."""
CONTEXT_TOKENS = 100
"""Most new tokens of the prompt that are shown before the completion."""
_COLOURS = {"green": -0.1, "yellow": -1.0, "dark_orange": -3.0}
"""Colour -> least log-probability. Lower ones are red."""


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

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values, the columns that hold JSON parsed."""
        call = self.call
        columns = asdict(call) | {
            "prompt_ids": list(call.prompt_ids),
            "sampling": call.parsed_sampling,
            "reply": call.parsed_reply,
            "tools": call.parsed_tools,
            "messages": self.messages,
        }
        shown = {
            "call": columns,
            "left_out": self.left_out,
            "difference": self.difference and asdict(self.difference),
            "previous": self.previous,
            "next": self.next,
        }
        values: dict[str, Any] = json.loads(json_text(shown))
        return values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.is_terminal or console.is_jupyter
        return _parts(self, load_decoder(self.run), coloured=coloured)


def view_call(
    run: Path,
    session: str,
    prefix: str,
    *,
    full: bool = False,
) -> CallView:
    """Return the view of a call, by a unique prefix of its session's id, and one of its own or its
    number; with `full`, of its whole conversation and prompt. Raises as `view_session`."""
    recorded = find_session(run, session)
    number = _find_call(recorded, prefix)
    _, reasons = classify_calls(recorded.calls)
    view = show_call(run, recorded.calls, number, reasons[number])
    if full:
        messages = rebuild_conversations(recorded.calls)[number].messages()
        view = replace(view, messages=messages, full=True)
    return view


def _find_call(recorded: RecordedSession, given: str) -> int:
    ids = [call.call_id for call in recorded.calls]
    if given not in ids and given.isdecimal() and 1 <= int(given) <= len(ids):
        return int(given) - 1
    where = f"session {recorded.session_id} (calls 1 to {len(ids)})"
    return ids.index(find_id(given, ids, "call", where))


def show_call(
    run: Path,
    calls: Sequence[Call],
    number: int,
    left_out: str | None,
) -> CallView:
    """Return the view of the call `calls[number]` of a session. `left_out` is the reason that
    `classify_calls` gives."""
    call = calls[number]
    difference = None
    if call.kind == "rendered":
        difference = find_divergence(call, calls)
    around = [None, *(each.call_id for each in calls), None]
    return CallView(
        call=call,
        messages=call.parsed_messages,
        tools=tool_names(call),
        left_out=left_out,
        difference=difference,
        run=run,
        previous=around[number],
        next=around[number + 2],
    )


def tool_names(call: Call) -> list[str] | None:
    """Return the names of the tools shown to the model; None when they are the parent's."""
    tools = call.parsed_tools
    if tools is None:
        return None
    return [str(tool.get("function", tool).get("name")) for tool in tools]


def find_divergence(call: Call, calls: Sequence[Call]) -> Divergence | None:
    """Return where the prompt of `call` differs from the completed calls that started before it, or
    None without any.

    Of calls that share equally long prefixes with it, the last one is compared.
    """
    prompt = to_bytes(call.prompt_ids)
    best = None
    position = 0
    for other in calls:
        if other.status == "completed" and start_order(other) < start_order(call):
            recorded = to_bytes(other.prompt_ids) + to_bytes(other.completion_ids)
            length = common_length(prompt, recorded)
            if length >= position:
                best = other
                position = length
    if best is None:
        return None
    common, rendered = tokens_around(call.prompt_ids, position)
    _, earlier = tokens_around([*best.prompt_ids, *best.completion_ids], position)
    return Divergence(best.call_id, position, common, earlier, rendered)


def tokens_around(ids: Sequence[int], position: int) -> tuple[list[int], list[int]]:
    """Return the tokens before a position, and those from it on, at most `NEAR` of each."""
    before = ids[max(position - NEAR, 0) : position]
    return list(before), list(ids[position : position + NEAR])


def _parts(view: CallView, decode: Decoder | None, *, coloured: bool) -> Iterator[RenderableType]:
    """Yield the parts of a call: facts, divergence, messages, reply, tokens. Without a decoder
    tokens are shown as ids.

    Without colours each token is a line.
    """
    call = view.call
    yield _facts(view)
    if view.difference is not None:
        yield _difference(view.difference, decode)
    title = "new messages"
    first = max(call.prefix_length, len(call.prompt_ids) - CONTEXT_TOKENS)
    if view.full:
        title = "messages"
        first = 0
    yield Rule(title)
    yield from map(message_text, view.messages)
    reply = call.parsed_reply
    if reply:
        yield Rule("reply")
        yield message_text(reply)
    yield Rule("tokens")
    if coloured:
        yield context(call, decode, first).append(completion(call, decode))
    else:
        yield _token_lines(call, decode, first)
    yield _legend(view, coloured=coloured, decoded=decode is not None)


def _legend(view: CallView, *, coloured: bool, decoded: bool) -> Text:
    legend = Text("\n")
    if view.left_out:
        legend.append(f"not trained: {view.left_out}  ", "yellow")
    if coloured:
        legend.append("context", "dim").append("  log-probability: ")
        for colour, least in _COLOURS.items():
            legend.append(f" {least:g} and more ", f"reverse {colour}")
        legend.append(" less ", "reverse red")
    if not decoded:
        missing = "\ntoken ids, as the tokenizer of the run's model is not on this machine"
        legend.append(missing, "dim")
    return legend


def _token_lines(call: Call, decode: Decoder | None, first: int) -> Text:
    """Return a line for each token of prompt and completion from `first` on: its position, id, text
    as JSON, and log-probability, which only sampled tokens have. What is not known is `-`."""
    tokens = [*call.prompt_ids, *call.completion_ids]
    logprobs = ["-"] * len(call.prompt_ids)
    logprobs += [f"{logprob:.6g}" for logprob in call.logprobs]
    lines = ["position id text logprob"]
    rows = enumerate(zip_longest(tokens, logprobs, fillvalue="-"))
    for position, (token, logprob) in islice(rows, first, None):
        text = "-"
        if decode is not None and token != "-":
            text = json.dumps(decode([int(token)]), ensure_ascii=False)
        lines.append(f"{position} {token} {text} {logprob}")
    return Text("\n".join(lines))


def context(call: Call, decode: Decoder | None, first: int) -> Text:
    """Return the tokens of the prompt from `first` on. Their mask is 0."""
    text = Text("", "dim italic")
    hidden = first - call.prefix_length
    if hidden > 0:
        text.append(f"({hidden} tokens) … ")
    shown = list(call.prompt_ids[first:])
    if decode is None:
        return text.append("".join(f"{token} " for token in shown), "dim")
    return text.append(decode(shown), "dim")


def completion(call: Call, decode: Decoder | None) -> Text:
    """Return the completion, each token in the colour of its log-probability; without a decoder its
    ids."""
    text = Text()
    logprobs = call.logprobs[: len(call.completion_ids)]
    for token, logprob in zip_longest(call.completion_ids, logprobs):
        shown = f"{token} "
        if decode is not None:
            shown = decode([token]) or f"<{token}>"
        text.append(shown, _colour(logprob))
    return text


def _colour(logprob: float | None) -> str:
    if logprob is None:
        return ""
    for colour, least in _COLOURS.items():
        if logprob >= least:
            return colour
    return "red"


def _facts(view: CallView) -> Table:
    call = view.call
    request = f"{call.dialect} {call.host}{call.path} {call.model}"
    if call.stream:
        request += " streamed"
    facts = {
        "call": call.call_id,
        "session": call.session_id,
        "role": call.role,
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
        "weights": ", ".join(f"{s.version} [{s.start}:{s.end}]" for s in call.weight_versions),
        "request": request,
        "sampling": call.sampling,
        "tools": view.tools and ", ".join(view.tools),
        "started": call.started_at.isoformat(),
        "finished": call.finished_at and call.finished_at.isoformat(),
    }
    if call.role_evidence:
        facts["role"] = f"{call.role} ({call.role_evidence})"
    if view.tools == []:
        facts["tools"] = "none"
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
    text = ""
    if decode is not None and ids:
        text = json.dumps(decode(ids), ensure_ascii=False)
    return f"{ids} {text}"


def message_text(message: dict[str, Any]) -> Text:
    """Return a message for a person."""
    text = Text.assemble((f"{message.get('role', '')}: ", "bold"))
    reasoning = message.get("reasoning_content")
    if reasoning:
        text.append(f"{reasoning}\n", "italic")
    text.append(str(message.get("content") or ""))
    for call in message.get("tool_calls") or []:
        text.append(f"\n{json.dumps(call['function'], ensure_ascii=False)}", "cyan")
    return text
