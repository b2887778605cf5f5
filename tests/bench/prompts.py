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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from transformers import AutoTokenizer

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import Message, ModelCall
from rolltap.addons.endpoint.body import KeptTexts, RecentBodies
from rolltap.addons.prompts.conversations import Conversations
from rolltap.addons.prompts.rendering import Rendering
from tests.bench.frame import Rows, command, model_option, prose
from tests.bench.wire import PARAMETERS

TURNS = 9
"""Number of turns that are measured before each length."""
RENDERINGS = 5
LENGTHS = (1_000, 4_000, 16_000, 64_000, 128_000)


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
    tools = []
    for name in ("bash", "read", "write", "edit", "search"):
        function = {"name": name, "description": prose(rng, 20), "parameters": PARAMETERS}
        tools.append({"type": "function", "function": function})
    bodies = RecentBodies(KeptTexts())
    conversations = Conversations(rendering)
    messages: list[Message] = [
        {"role": "system", "content": prose(rng, 100)},
        {"role": "user", "content": "Fix it."},
    ]
    number = 0
    while True:
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
        result = {"role": "tool", "content": prose(rng, 100)}
        result["tool_call_id"] = reply["tool_calls"][0]["id"]
        messages = [*messages, reply, result]
        number += 1


def _sampled(rng: random.Random, number: int) -> str:
    arguments = {"command": f"sed -n {number}p file.py | {prose(rng, 8)}"}
    call = json.dumps({"name": "bash", "arguments": arguments})
    thought = f"<think>\n{prose(rng, 30)}\n</think>\n\n"
    return f"{thought}I look.\n<tool_call>\n{call}\n</tool_call><|im_end|>"


def _render(rendering: Rendering, call: ModelCall) -> float:
    """Render a prompt in full and return the CPU seconds."""
    started = time.process_time()
    rendering.render(call.messages, call.tools)
    return time.process_time() - started


@command
@click.option("--tokens", type=int, multiple=True, default=LENGTHS)
@model_option
def main(tokens: tuple[int, ...], model: Path) -> dict[str, Rows]:
    """Measure what a prompt costs in CPU time as its conversation grows."""
    playing = session(Rendering(str(model), "qwen3"), AutoTokenizer.from_pretrained(model).encode)
    rows: Rows = []
    turns: list[Turn] = []
    for length in sorted(tokens):
        while not turns or turns[-1].tokens < length:
            turns = [*turns[1 - TURNS :], next(playing)]
        call = turns[-1].call
        fresh = [Rendering(str(model), "qwen3") for _ in range(RENDERINGS)]
        cold = median(_render(rendering, call) for rendering in fresh)
        warm = median(_render(rendering, call) for rendering in fresh)
        continued = median(turn.prompt for turn in turns)
        row = {
            "tokens": turns[-1].tokens,
            "rendered ms": 1e3 * cold,
            "texts kept ms": 1e3 * warm,
            "continued ms": 1e3 * continued,
            "ratio": warm / continued,
            "decoding ms": 1e3 * median(turn.decode for turn in turns),
        }
        rows.append(row)
    return {"CPU of a call's prompt": rows}


if __name__ == "__main__":
    main()
