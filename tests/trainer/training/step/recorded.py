"""A training whose steps are recorded, and the program that two ranks run."""

import random
import sys
from functools import partial
from pathlib import Path

import torch

from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import TraceOptions, make_batch, trace_session
from rolltap.trainer.traces.trained import write_step
from tests.factories import make_call
from tests.trainer.training.step.tiny import make_trainer, record_session, tiny_model

REWARDS = {"a": [0.0, 1.0, 0.5], "b": [1.0, 1.0], "c": [0.0, 1.0, None]}
"""The third session of a has the advantage 0, group b has no signal, the last session is a fault.
"""
CORRECTED = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 1.5}
SHIFT = 0.5
"""The engine's log-probabilities are lower than the trainer's."""


def sessions():
    """Return recorded sessions of the tiny model. Each has a call of a role that is not trained."""
    model = tiny_model()
    rng = random.Random(3)
    found = []
    torch.manual_seed(3)
    for group, rewards in REWARDS.items():
        for number, reward in enumerate(rewards):
            name = f"{group}{number}"
            calls = record_session(model, rng, name, [2, 3, 4 + number])
            for call in calls:
                call.logprobs = [logprob - SHIFT for logprob in call.logprobs]
            side = {"session_id": name, "call_id": f"{name}-side", "role": "auxiliary"}
            calls.append(make_call(2, [9, 9], [5, 6], **side))
            status = "infrastructure" if reward is None else "completed"
            row = Session(session_id=name, group_id=group, status=status, reward=reward)
            found.append(RecordedSession(session_id=name, session=row, calls=calls))
    return found


def train(out: Path, accumulation: int, **config):
    """Train and record two optimizer steps of one batch into the folder `out`."""
    options = TraceOptions("prefix_merging", max_tokens=14)
    batch = make_batch(trace_session(session, options) for session in sessions())
    trainer = make_trainer(
        tiny_model(),
        out,
        batch,
        gradient_accumulation_steps=accumulation,
        num_iterations=2,
        max_steps=2,
        **(config or {"loss_type": "grpo", **CORRECTED}),
    )
    with RunWriter(out) as writer:
        trainer.record = partial(write_step, writer, "run.{}.0".format)
        trainer.train()
    return trainer


if __name__ == "__main__":
    train(Path(sys.argv[1]), 1)
