"""The fields and rules of `TrainingTrace`, copied from openenv 0.10.0 (`openenv.core.harness.training` and
`capture.validate`), which needs an environment of its own."""

import math

from rolltap.trainer.runs.exports.openenv import SCHEMA_VERSION, training_turns

TURN_FIELDS = {
    "node_id": str,
    "prompt_token_ids": list,
    "completion_token_ids": list,
    "per_token_logps": list,
    "loss_mask": list,
    "request": dict,
    "response": dict,
    "metadata": dict,
}


def training_trace(recorded):
    """Return the trace of a session as it is written to the files."""
    turns, refused = training_turns(recorded)
    trace = {"schema_version": SCHEMA_VERSION, "turns": list(turns)}
    assert len(trace["turns"]) == len(recorded.calls) - len(refused)
    return trace


def check_trace(trace):
    """Raise AssertionError for a trace that OpenEnv's strict models refuse."""
    assert set(trace) == {"schema_version", "turns"}
    assert trace["schema_version"] == 1
    ids = {turn["node_id"] for turn in trace["turns"]} - {""}
    assert len(ids) == len(trace["turns"])
    for turn in trace["turns"]:
        assert {name: type(value) for name, value in turn.items()} == TURN_FIELDS
        prompt, sampled = turn["prompt_token_ids"], turn["completion_token_ids"]
        logprobs, mask = turn["per_token_logps"], turn["loss_mask"]
        assert prompt
        assert all(type(token) is int and token >= 0 for token in prompt + sampled)
        assert len(logprobs) == len(sampled)
        assert all(type(logprob) is float and math.isfinite(logprob) and logprob <= 0 for logprob in logprobs)
        assert len(mask) == len(prompt) + len(sampled)
        assert all(type(bit) is int and bit in (0, 1) for bit in mask)
        assert not any(mask[: len(prompt)])
