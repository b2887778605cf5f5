"""Rendering of a session and of a call for a terminal."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call
from rolltap.trainer.views.inspect import CallNode, CallView, Divergence, SessionView
from rolltap.trainer.views.session_facts import fact_tables

Decoder = Callable[[list[int]], str]

_LIKELY = [(-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (float("-inf"), "red")]
"""Least log-probability of each colour."""
_SHORT_ID = 8
CONTEXT_TOKENS = 100
"""Most new tokens of the prompt that are shown before the completion."""


def load_decoder(run: Path) -> Decoder | None:
    """Return a function from token ids to text; None when the model's tokenizer or `transformers` is not installed.

    Raises `RunError` when the folder cannot be read.
    """
    model = str(read_metadata(run).get("model", ""))
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render_session(view: SessionView) -> RenderableType:
    """Return a session's outcome, its call tree, the facts about it and its ledger."""
    title = Text.assemble(("session ", "bold"), view.session_id)
    if (session := view.session) is not None:
        reward = "no reward" if session.reward is None else f"reward {session.reward:g}"
        versions = view.policy_versions or [session.policy_version or ""]
        weights = f"weights {', '.join(filter(None, versions))}" if any(versions) else None
        fields = (session.harness, session.status, weights, reward, session.error)
        title.append(": " + ", ".join(field for field in fields if field))
    facts = fact_tables(view.session, view.suspicions, view.diff, view.revisions)
    return Group(call_tree(view.calls, title), *facts, view.ledger)


def call_tree(nodes: Sequence[CallNode], title: Text) -> Tree:
    """Return the call tree. A chain of calls is one node, a line a call; branches are the nodes below it."""
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


def render_call(view: CallView, decode: Decoder | None) -> Iterator[RenderableType]:
    """Yield the parts of a call: facts, divergence, messages, tokens. Without a decoder tokens are shown as ids."""
    yield _facts(view)
    if view.difference is not None:
        yield _difference(view.difference, decode)
    yield Rule("new messages")
    yield from map(_message, view.messages)
    yield Rule("tokens")
    yield context(view.call, decode).append(completion(view.call, decode))
    legend = Text("\n")
    if view.left_out:
        legend.append(f"not trained: {view.left_out}  ", "yellow")
    legend.append("context", "dim").append("  log-probability: ")
    for least, colour in _LIKELY:
        legend.append(f" {least:g} and more " if least > float("-inf") else " less ", f"reverse {colour}")
    if decode is None:
        legend.append("\ntoken ids, as the tokenizer of the run's model is not on this machine", "dim")
    yield legend


def context(call: Call, decode: Decoder | None) -> Text:
    """Return the last tokens of the prompt that follow the parent's tokens. Their mask is 0."""
    ids = call.prompt_ids[call.prefix_length :]
    shown = list(ids[-CONTEXT_TOKENS:])
    text = Text(f"({len(ids) - len(shown)} tokens) … " if len(shown) < len(ids) else "", "dim italic")
    return text.append("".join(f"{token} " for token in shown) if decode is None else decode(shown), "dim")


def completion(call: Call, decode: Decoder | None) -> Text:
    """Return the completion, each token in the colour of its log-probability; without a decoder its ids."""
    text = Text()
    for token, logprob in zip_longest(call.completion_ids, call.logprobs[: len(call.completion_ids)]):
        written = f"{token} " if decode is None else decode([token]) or f"<{token}>"
        colour = next((colour for least, colour in _LIKELY if logprob is not None and logprob >= least), "")
        text.append(written, colour)
    return text


def _facts(view: CallView) -> Table:
    call = view.call
    spans = [f"{span.version} [{span.start}:{span.end}]" for span in call.weight_versions]
    facts = {
        "call": call.call_id,
        "session": call.session_id,
        "role": f"{call.role} {f'({call.role_evidence})' if call.role_evidence else ''}",
        "prompt": f"{call.kind}, {len(call.prompt_ids)} tokens, {call.prefix_length} of them its parent's",
        "why": call.kind_reason,
        "parent": call.parent_id,
        "status": ", ".join(filter(None, [call.status, call.finish_reason, call.error])),
        "violation": call.violation,
        "completion": f"{len(call.completion_ids)} tokens, sum of log-probabilities {sum(call.logprobs):.3f}",
        "weights": ", ".join(spans),
        "request": f"{call.dialect} {call.host}{call.path} {call.model}{' streamed' if call.stream else ''}",
        "sampling": call.sampling,
        "tools": None if view.tools is None else ", ".join(view.tools) or "none",
        "started": call.started_at.isoformat(),
        "finished": call.finished_at and call.finished_at.isoformat(),
    }
    table = Table("", "", show_header=False)
    for name, fact in facts.items():
        if fact:
            table.add_row(name, Text(fact, overflow="fold"))
    return table


def _difference(difference: Divergence, decode: Decoder | None) -> Text:
    def written(ids: list[int]) -> str:
        # quoted, so that white space is visible
        return f"{ids} {json.dumps(decode(ids), ensure_ascii=False) if decode and ids else ''}\n"

    text = Text(f"The prompt agrees with call {difference.call_id} up to token {difference.position}.\n", "bold")
    text.append(f"  common    {written(difference.common)}", "dim")
    text.append(f"  recorded  {written(difference.recorded)}", "green")
    text.append(f"  rendered  {written(difference.rendered)}", "red")
    return text


def _message(message: dict[str, Any]) -> Text:
    text = Text.assemble((f"{message.get('role', '')}: ", "bold"))
    if reasoning := message.get("reasoning_content"):
        text.append(f"{reasoning}\n", "italic")
    text.append(str(message.get("content") or ""))
    for call in message.get("tool_calls") or []:
        text.append(f"\n{json.dumps(call['function'], ensure_ascii=False)}", "cyan")
    return text
