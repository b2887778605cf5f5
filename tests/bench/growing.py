"""Generated runs whose sessions are conversations that grow, a call after the other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call
from rolltap.addons.store.tables import RunWriter
from tests.factories import make_call, make_session

VOCABULARY = 150_000
GROUP = 8
"""Sessions of a group."""
TEXT = "the file has a test that fails when it is run with an empty list"
WORDS = TEXT.split()
calls_option = click.option("--turns", default=60, help="Calls of a session.")
tokens_option = click.option("--tokens", default=40_000, help="Tokens of a session's last call.")


def session_id(number: int) -> str:
    return f"session-{number:06}"


def call_id(session: int, turn: int) -> str:
    return f"{session:08x}{turn:024x}"


def grow(
    number: int, turns: int, given: int, sampled: int, vocabulary: int = VOCABULARY, **fields: Any
) -> Iterator[Call]:
    """Yield the calls of a session, each with so many tokens that are given and sampled. The same
    arguments give the same session."""
    some = np.random.default_rng(number)
    call = None
    for turn in range(turns):
        call = make_call(
            call_id(number, turn),
            # frequent tokens have small ids
            (vocabulary ** some.random(given)).astype(int).tolist(),
            (vocabulary ** some.random(sampled)).astype(int).tolist(),
            after=call,
            session_id=session_id(number),
            logprobs=(-some.exponential(0.3, sampled)).tolist(),
            **fields,
        )
        yield call


def add_text(call: Call, given: int, said: int) -> None:
    """Give a call's message and its reply so many words."""
    some = np.random.default_rng(int(call.call_id, 16))
    role = "tool" if call.parent_id else "user"
    call.messages = json.dumps([{"role": role, "content": " ".join(some.choice(WORDS, given))}])
    call.reply = json.dumps({"role": "assistant", "content": " ".join(some.choice(WORDS, said))})


def write_run(
    run: Path,
    sessions: int,
    turns: int,
    tokens: int,
    *,
    share: float,
    text: bool = False,
    model: str = "bench",
    **fields: Any,
) -> Path:
    """Write a run whose sessions have `turns` calls each and `tokens` tokens in all, of which a
    share is sampled. With `text`, a token is a word."""
    sampled = max(1, round(share * tokens / turns))
    given = tokens // turns - sampled
    write_metadata(run, {"model": model})
    with RunWriter(run, "never") as writer:
        for number in range(sessions):
            for call in grow(number, turns, given, sampled, **fields):
                if text:
                    add_text(call, given, sampled)
                writer.add_call(call)
            group = f"g{number // GROUP}"
            reward = float(number % 3 == 0)
            row = make_session(session_id(number), group_id=group, task_id=group, reward=reward)
            writer.add_session(row)
            writer.end_session()
    return run
