"""A tiny model, sessions that it sampled, and trainers on them."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from rolltap.addons.store.records import Call
from rolltap.trainer.traces.build import GroupReward, Strategy, Trace, TraceBatch, build_traces
from rolltap.trainer.training.step.config import TraceGRPOConfig
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.factories import make_call

VOCABULARY = 32
GROUPS = Dataset.from_dict({"task_id": ["a", "b"]})
SETTINGS = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "activation_checkpointing": False,
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-2,
    "max_grad_norm": 0.0,
}
"""Settings of trainings, TRL's own too."""

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def tiny_model(**fields) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    words = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    weights = {"initializer_range": 0.2, "tie_word_embeddings": False}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | HEADS | words | weights | fields)).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


@torch.no_grad()
def sample(model, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return `count` tokens sampled at temperature 1, and their log-probabilities."""
    ids = list(prompt)
    logprobs = []
    for _ in range(count):
        distribution = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(torch.multinomial(distribution.exp(), 1)))
        logprobs.append(float(distribution[ids[-1]]))
    return ids[len(prompt) :], logprobs


def record_session(model, rng: random.Random, session: str, prompt: list[int]) -> list[Call]:
    """Return the calls of two turns with three tokens of tool output between them."""
    calls: list[Call] = []
    for turn in range(2):
        if calls:
            output = [rng.randrange(2, VOCABULARY) for _ in range(3)]
            prompt = calls[0].prompt_ids + calls[0].completion_ids + output
        ids, logprobs = sample(model, prompt, rng.randrange(2, 6))
        fields = {"session_id": session, "call_id": f"{session}-{turn}", "logprobs": logprobs}
        calls.append(make_call(turn, prompt, ids, version="0", **fields))
    return calls


@dataclass(frozen=True)
class Recorded:
    """A session of a group, with its reward."""

    calls: list[Call]
    group: str
    reward: float

    def traces(self, strategy: Strategy) -> list[Trace]:
        traces, _ = build_traces(self.calls, strategy)
        return [replace(trace, group_id=self.group, reward=self.reward) for trace in traces]


def record_groups(model, rng: random.Random, sessions: int = 3) -> list[Recorded]:
    """Return the sessions of two groups, with random rewards."""
    torch.manual_seed(rng.randrange(1000))
    recorded = []
    for group in ("a", "b"):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(3, 7))]
        for i in range(sessions):
            calls = record_session(model, rng, f"{group}{i}", prompt)
            recorded.append(Recorded(calls, group, rng.random()))
    return recorded


def traces_of(recorded: Sequence[Recorded], strategy: Strategy = "prefix_merging") -> list[Trace]:
    return [trace for session in recorded for trace in session.traces(strategy)]


def record(model, rng: random.Random, sessions: int = 3) -> list[Trace]:
    """Return the traces of `record_groups`."""
    return traces_of(record_groups(model, rng, sessions))


def make_trace(
    session: str, mask: Sequence[int] = (1,), prompt: Sequence[int] = (1,), **fields
) -> Trace:
    """Return a trace whose completion has as many tokens as the mask."""
    defaults = {
        "trace_id": f"{session}/0",
        "call_ids": ["0"],
        "prompt_ids": list(prompt),
        "completion_ids": [2] * len(mask),
        "completion_mask": list(mask),
        "logprobs": [-0.5] * len(mask),
        "weight_versions": [],
    }
    return Trace(session_id=session, **defaults | fields)


class Spy(TrainerCallback):
    """A callback that keeps the gradients before each optimizer step and the weights after it."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        found = {}
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                found[name] = whole(weight.grad)
        self.gradients.append(found)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = {name: whole(weight.detach()) for name, weight in model.named_parameters()}
        self.weights.append(weights)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor. One that is sharded is gathered, which is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def batch_of(traces: list[Trace], **fields) -> TraceBatch:
    """Return a batch of the traces, with the rewards of their labels."""
    rewards = {}
    for trace in traces:
        if trace.reward is not None:
            label = GroupReward(group_id=trace.group_id, reward=trace.reward)
            rewards[trace.session_id] = label
    return TraceBatch(**{"traces": traces, "rewards": rewards, "on_policy": True, **fields})


def make_trainer(
    model,
    out: Path,
    source: Callable[[list[dict]], list[Trace]] | list[Trace] | TraceBatch,
    *,
    groups_per_step: int = 2,
    peft_config: LoraConfig | None = None,
    before_batch: Callable[[], None] | None = None,
    **config,
) -> TraceGRPOTrainer:
    """Return a trainer on a copy of `model`, with a `spy`. `source`: every batch, its traces, or
    what returns them."""
    spy = Spy()

    def trace_source(rows: list[dict]) -> TraceBatch:
        given = source(rows) if callable(source) else source
        return given if isinstance(given, TraceBatch) else batch_of(given)

    settings = SETTINGS | {
        "output_dir": str(out),
        "logging_steps": 1,
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
    }
    trainer = TraceGRPOTrainer(
        copy.deepcopy(model),
        TraceGRPOConfig(**settings | config),
        GROUPS,
        trace_source=trace_source,
        groups_per_step=groups_per_step,
        before_batch=before_batch,
        processing_class=tokenizer(),
        peft_config=copy.deepcopy(peft_config),  # PEFT writes the names of the modules into it
        callbacks=[spy],
    )
    trainer.spy = spy
    return trainer


def trained(*args, **config) -> TraceGRPOTrainer:
    """Return `make_trainer(...)` after its training."""
    trainer = make_trainer(*args, **config)
    trainer.train()
    return trainer


def gradients(model, out: Path, traces: list[Trace], **config) -> dict[str, torch.Tensor]:
    """Return the gradients of one step on `traces`."""
    return trained(model, out, traces, **config).spy.gradients[0]


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def relative_difference(wanted: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """Return |wanted - got| / |wanted| over all parameters together."""
    assert wanted.keys() == got.keys()
    apart = 0.0
    size = 0.0
    for name, gradient in wanted.items():
        apart += float((gradient - got[name]).double().square().sum())
        size += float(gradient.double().square().sum())
    return (apart / size) ** 0.5
