"""A policy gradient in plain PyTorch on groups of a rollout service. README.md has the commands."""

import sys
from statistics import mean

from peft import LoraConfig, get_peft_model
from torch import nn, optim, tensor
from transformers import AutoModelForCausalLM

import rolltap


def train(url: str, token_file: str, out: str, steps: int = 3, sessions: int = 16) -> None:
    """Train an adapter on the tasks of a service, and publish it there after each step."""
    client = rolltap.Client(url, token_file=token_file)
    service, publisher = client.service(), rolltap.AdapterPublisher(client, out)
    model = AutoModelForCausalLM.from_pretrained(service["model"])
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=64, target_modules="all-linear"))
    sgd = optim.SGD(weights := [each for each in model.parameters() if each.requires_grad], lr=60)
    for step in range(1, steps + 1):
        groups = [client.submit(task, sessions=sessions) for task in service["tasks"]]
        views = [client.wait(group.id) for group in groups]
        ended = [session.session_id for view in views for session in view.sessions]
        batch = rolltap.open_run(service["run"]).traces().batch(ended)
        for trace in batch.traces:
            group = [r.reward for r in batch.rewards.values() if r.group_id == trace.group_id]
            ids = tensor(trace.prompt_ids + trace.completion_ids)
            logits = model(ids[None, :-1]).logits[0]
            logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            ratios = (logprobs[len(trace.prompt_ids) - 1 :] - tensor(trace.logprobs)).exp()
            trained = (ratios * tensor(trace.completion_mask)).sum()
            (-trained * (trace.reward - mean(group)) / batch.ledger.trained).backward()
        nn.utils.clip_grad_norm_(weights, 0.005), sgd.step(), sgd.zero_grad()
        publisher.publish(model, f"loop.{step}")


if __name__ == "__main__":
    train(*sys.argv[1:])
