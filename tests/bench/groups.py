"""Generated groups of sessions: shared prompts, turns of sampled tokens and results, compactions
and sub-agents.

The numbers of tokens are those of coding agents, divided by a scale. The token ids are random, but
the same for the same seed.
"""

from dataclasses import dataclass, replace

import numpy as np

from rolltap.addons.store.records import Call, CallRole, VersionSpan
from rolltap.trainer.traces.build import GroupReward, Trace, TraceBatch, build_traces
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.training.step.pack import TraceRow, trace_row
from tests.factories import make_call

SAMPLED = (40, 200)
RESULT = (40, 520)
"""Least and largest number of tokens that a turn samples, and of the result that follows."""
SUMMARY = 600
TASK = 400
"""Tokens of a compaction's summary, and of a sub-agent's task."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the sessions of one group, before they are scaled."""

    prompt: int
    """Tokens of the prompt that all sessions share."""
    turns: tuple[int, int]
    """Least and largest number of turns."""
    sessions: int = 8
    compactions: tuple[int, ...] = (2, 6)
    """Sessions that are compacted after 60 % of their turns: they go on with the shared prompt and
    a summary."""
    subagents: tuple[int, ...] = (4,)
    """Sessions with a sub-agent of a quarter of their turns. It has the first half of the shared
    prompt."""


LONG = Shape(20_000, (60, 120))
SHAPES = {"8k, 20 to 40": Shape(8_000, (20, 40)), "20k, 60 to 120": LONG}
"""Shapes by tokens of the shared prompt and numbers of turns."""
SHORT = Shape(600, (2, 3), compactions=(), subagents=())
SHORT_SCALE = 6
"""Sessions of about 200 tokens, as those of the quickstart, and their scale."""


class _Session:
    def __init__(self, name: str, rng: np.random.Generator, scale: float, vocabulary: int) -> None:
        self.name = name
        self.calls: list[Call] = []
        self._rng = rng
        self._scale = scale
        self._vocabulary = vocabulary

    def ids(self, tokens: float) -> list[int]:
        """Return random ids, as many as `tokens` divided by the scale, and at least 1."""
        size = max(1, round(tokens / self._scale))
        # 0 and 1 are the padding and the end token
        return self._rng.integers(2, self._vocabulary, size=size).tolist()

    def play(self, prompt: list[int], turns: int, role: CallRole = "agent") -> list[int]:
        """Add the calls of one conversation. Return the tokens of the last."""
        ids = prompt
        for turn in range(turns):
            if turn:
                ids = ids + self.ids(self._rng.integers(*RESULT))
            ids = ids + self.call(ids, self._rng.integers(*SAMPLED), role)
        return ids

    def call(self, prompt: list[int], tokens: float, role: CallRole) -> list[int]:
        """Add a call. Return the tokens that it sampled."""
        ids = self.ids(tokens)
        logprobs = [-float(np.log(self._vocabulary))] * len(ids)
        fields = {"session_id": self.name, "role": role, "logprobs": logprobs}
        self.calls.append(make_call(len(self.calls), prompt, ids, **fields))
        return ids


def generate(
    shape: Shape, *, scale: float, vocabulary: int, seed: int, group: str = "group"
) -> TraceBatch:
    """Return the labelled `prefix_merging` traces of one group, all numbers of tokens divided by
    `scale`.

    Every second session has reward 1, the others 0. The log-probabilities are those of a model that
    knows nothing.
    """
    rng = np.random.default_rng([seed, *group.encode()])
    shared = _Session("", rng, scale, vocabulary).ids(shape.prompt)
    batch = TraceBatch(ledger=Ledger())
    for number in range(shape.sessions):
        session = _Session(f"{group}-{number}", rng, scale, vocabulary)
        turns = int(rng.integers(shape.turns[0], shape.turns[1] + 1))
        if number in shape.compactions:
            first = round(0.6 * turns)
            summary = session.call(session.play(shared, first), SUMMARY, "compaction")
            session.play(shared + summary, turns - first)
        else:
            session.play(shared, turns)
        if number in shape.subagents:
            prompt = shared[: len(shared) // 2] + session.ids(TASK)
            session.play(prompt, turns // 4, "subagent")
        traces, ledger = build_traces(session.calls, "prefix_merging")
        batch.traces += [replace(trace, group_id=group) for trace in traces]
        batch.rewards[session.name] = GroupReward(group_id=group, reward=float(number % 2))
        batch.ledger += ledger
    return batch


def single(length: int, *, vocabulary: int) -> TraceBatch:
    """Return one trace of `length` tokens: a prompt of a quarter of them, then turns that sample 16
    of 64 tokens.

    Its session has reward 1, and another without a trace has 0, so that it has an advantage.
    """
    rng = np.random.default_rng(length)
    prompt = length // 4
    count = length - prompt
    mask = [int(i % 64 < 16) for i in range(count)]
    trace = Trace(
        session_id="long",
        trace_id="long/0",
        call_ids=["0"],
        prompt_ids=rng.integers(2, vocabulary, size=prompt).tolist(),
        completion_ids=rng.integers(2, vocabulary, size=count).tolist(),
        completion_mask=mask,
        logprobs=[-float(np.log(vocabulary)) * trained for trained in mask],
        weight_versions=[VersionSpan(version="0", start=0, end=count)],
        group_id="group",
    )
    rewards = {}
    for name, reward in (("long", 1.0), ("other", 0.0)):
        rewards[name] = GroupReward(group_id="group", reward=reward)
    return TraceBatch(traces=[trace], rewards=rewards)


def rows_of(batch: TraceBatch) -> list[TraceRow]:
    return [trace_row(trace) for trace in batch.traces]


def sessions_of(batch: TraceBatch) -> list[list[TraceRow]]:
    """Return the rows of each session that has traces."""
    found: dict[str, list[TraceRow]] = {}
    for trace in batch.traces:
        found.setdefault(trace.session_id, []).append(trace_row(trace))
    return [*found.values()]
