"""TRL's own trainer on padded rows: what the losses of recorded traces must be."""

import copy
from collections import defaultdict
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rolltap.trainer.training.step.advantages import session_advantages
from tests.trainer.training.step.tiny import SETTINGS, Spy, batch_of, tokenizer


@torch.no_grad()
def logprobs_of(model, inputs, temperature):
    """Return the log-probabilities of the completions, (B, T), by a plain forward pass."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
    every = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return every[:, -inputs["completion_ids"].shape[1] :]


def padded(traces, scale):
    """Return TRL's inputs for traces, one of each session: prompts are padded on the left,
    completions on the right."""
    before = max(len(trace.prompt_ids) for trace in traces)
    after = max(len(trace.completion_ids) for trace in traces)
    rows = defaultdict(list)
    for trace in traces:
        missing = [0] * (before - len(trace.prompt_ids))
        rows["prompt_ids"].append(missing + trace.prompt_ids)
        rows["prompt_mask"].append(missing + [1] * len(trace.prompt_ids))
        missing = [0] * (after - len(trace.completion_ids))
        rows["completion_ids"].append(trace.completion_ids + missing)
        rows["completion_mask"].append([1] * len(trace.completion_ids) + missing)
        rows["tool_mask"].append(trace.completion_mask + missing)
        rows["logprobs"].append([*trace.logprobs, *map(float, missing)])
    inputs = {name: torch.tensor(values) for name, values in rows.items()}
    advantages = session_advantages(batch_of(traces).rewards, scale)
    inputs["advantages"] = torch.tensor([advantages[trace.session_id] for trace in traces])
    inputs["num_items_in_batch"] = inputs["tool_mask"].sum()
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"] = inputs.pop("logprobs")
    return inputs


def no_reward(**_):
    return [0.0]


class StockTrainer(GRPOTrainer):
    """TRL's trainer, whose batch is given."""

    def _prepare_inputs(self, generation_batch):
        return self.given


def gradients(
    model, reference, traces, out: Path, *, num_iterations=1, **options
) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step of a batch. `reference` is the model whose weights a
    divergence is from."""
    settings = SETTINGS | {
        "output_dir": str(out),
        "bf16": False,
        "optim": "sgd",
        "router_aux_loss_coef": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        "per_device_train_batch_size": len(traces),
        "num_generations": len(traces),
        "max_steps": num_iterations,
        "num_iterations": num_iterations,
    }
    spy = Spy()
    corrects = options.get("vllm_importance_sampling_correction", False)
    beta = options.pop("beta", 0.0)
    trainer = StockTrainer(
        copy.deepcopy(model),
        no_reward,
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * len(traces)}),
        processing_class=tokenizer(),
        callbacks=[spy],
    )
    inputs = padded(traces, trainer.scale_rewards)
    if beta:
        # TRL would load the reference from the disk
        trainer.beta = beta
        inputs["ref_per_token_logps"] = logprobs_of(reference, inputs, trainer.temperature)
    trainer.use_vllm = corrects
    if corrects:
        own = logprobs_of(model, inputs, trainer.temperature)
        inputs["old_per_token_logps"] = own
        apart = (own - inputs["sampling_per_token_logps"]) * inputs["tool_mask"]
        inputs["importance_sampling_ratio"] = importance(trainer, apart)
    trainer.given = inputs
    trainer.train()
    return spy.gradients[-1]


def importance(trainer, difference):
    """Return the weights as the documentation of GRPOConfig has them."""
    if "sequence" in trainer.vllm_importance_sampling_mode:
        difference = difference.sum(-1, keepdim=True)
    weights = difference.exp()
    low = trainer.vllm_importance_sampling_clip_min or 0.0
    high = trainer.vllm_importance_sampling_clip_max
    if "truncate" in trainer.vllm_importance_sampling_mode:
        return weights.clip(low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)
