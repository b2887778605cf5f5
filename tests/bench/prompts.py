"""Measure the cost of a call's prompt as its conversation grows: rendered in full, and continued.

    python -m tests.bench.prompts

One process without an engine plays a coding session of tool calls and their results, in Chat
Completions bodies. Times are CPU milliseconds: medians of the last turns before each length.
Decoding the body is the same for both. Prompts are rendered in full twice: with an empty cache of
texts ("rendered"), and after the same conversation was rendered ("texts kept"). The ratio is "texts
kept" over "continued".
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from transformers import AutoTokenizer

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import Message, ModelCall, Tool
from rolltap.addons.endpoint.body import KeptTexts, RecentBodies
from rolltap.addons.prompts.conversations import Conversations
from rolltap.addons.prompts.rendering import Rendering
from tests.bench.frame import Rows, command, model_option, prose

TURNS = 9
"""Number of turns that are measured before each length."""
RENDERINGS = 5


@dataclass
class Turn:
    """A call of the session and its costs in CPU seconds."""

    call: ModelCall
    tokens: int
    decode: float
    prompt: float


def session(rendering: Rendering, encode: Callable[[str], list[int]]) -> Iterator[Turn]:
    """Yield the calls of one session, each longer than the one before."""
    rng = random.Random(0)
    tools = [_tool(rng, name) for name in ("bash", "read", "write", "edit", "search")]
    bodies = RecentBodies(KeptTexts())
    conversations = Conversations(rendering)
    messages: list[Message] = [
        {"role": "system", "content": prose(rng, 100)},
        {"role": "user", "content": "Fix it."},
    ]
    for number in range(10_000):
        body = json.dumps({"model": "bench", "messages": messages, "tools": tools}).encode()
        started = time.process_time()
        read = bodies.decode(routes.CHAT, body, "/v1/chat/completions")
        bodies.keep(read)
        call = read.model_call
        decoded = time.process_time()
        prompt = conversations.prompt(call)
        made = time.process_time()
        assert prompt.kind == ("bridged" if number else "root")
        yield Turn(call, len(prompt.ids), decoded - started, made - decoded)
        completion_ids = encode(_sampled(rng, number))
        sampled, _ = rendering.read(prompt.ids, completion_ids, call.tools)
        sampled.issue(str(number))
        reply = sampled.to_message()
        conversations.add(str(number), prompt, completion_ids, reply)
        result = {
            "role": "tool",
            "tool_call_id": reply["tool_calls"][0]["id"],
            "content": prose(rng, 100),
        }
        messages = [*messages, reply, result]


def _tool(rng: random.Random, name: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": prose(rng, 20), "parameters": parameters},
    }


def _sampled(rng: random.Random, number: int) -> str:
    call = json.dumps(
        {"name": "bash", "arguments": {"command": f"sed -n {number}p file.py | {prose(rng, 8)}"}}
    )
    return (
        f"<think>\n{prose(rng, 30)}\n</think>\n\nI"
        f" look.\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    )


def _render(rendering: Rendering, call: ModelCall) -> float:
    """Render a prompt in full and return the CPU seconds."""
    started = time.process_time()
    rendering.render(call.messages, call.tools)
    return time.process_time() - started


def _milliseconds(seconds: Iterable[float]) -> float:
    return 1e3 * statistics.median(seconds)


@command
@click.option(
    "--tokens",
    type=int,
    multiple=True,
    default=(1_000, 4_000, 16_000, 64_000, 128_000),
    show_default=True,
)
@model_option
def main(tokens: tuple[int, ...], model: Path) -> dict[str, Rows]:
    """Measure what a prompt costs in CPU time as its conversation grows."""

    def rendering() -> Rendering:
        return Rendering(str(model), "qwen3")

    left = sorted(tokens)
    rows: Rows = []
    turns: list[Turn] = []
    for turn in session(rendering(), AutoTokenizer.from_pretrained(model).encode):
        turns = [*turns[1 - TURNS :], turn]
        if turn.tokens < left[0]:
            continue
        fresh = [rendering() for _ in range(RENDERINGS)]
        cold, warm = (_milliseconds(_render(one, turn.call) for one in fresh) for _ in range(2))
        continued = _milliseconds(turn.prompt for turn in turns)
        row = {
            "tokens": turn.tokens,
            "rendered ms": cold,
            "texts kept ms": warm,
            "continued ms": continued,
            "ratio": warm / continued,
            "decoding ms": _milliseconds(turn.decode for turn in turns),
        }
        rows.append(row)
        del left[0]
        if not left:
            return {"CPU of a call's prompt": rows}
    raise AssertionError("the session has no end")


if __name__ == "__main__":
    main()
