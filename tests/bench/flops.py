"""Floating-point operations of an optimizer step, counted from shapes. A multiply and an add are
two.

Counted are the matrices: linear layers and convolutions, attention and the delta rule, and the
head. Element-wise work is not.

- A linear layer takes 2 * inputs * outputs forward for each token. Its backward pass takes as much
  for the gradient of its input, and as much again for that of its weight, if it is trained.
- Attention takes 4 * heads * head size forward for each pair of a query and a key that it sees. The
  backward pass of flash attention takes 2.5 times that: five products instead of two.
- Checkpointing runs each layer forward again, except for its last linear layer: nothing needs that
  one's output.
- The head takes 4 times its forward pass for each scored token: logits are not kept, but computed
  again backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rolltap.trainer.training.step.pack import Pack, TraceRow
from tests.bench.networks import layers

ATTENTION_BACKWARD = 2.5
"""Backward over forward, of attention."""
_CHUNK = 64
"""Tokens of a chunk of the delta rule, as in Hugging Face's and FLA's kernels."""


@dataclass(frozen=True, slots=True)
class Costs:
    forward: float
    """Of a token, without attention and head."""
    backward: float
    """Of a token, likewise."""
    pair: float
    """Of a query and a key, forward."""
    head: float
    """Of a scored token, forward."""
    last: float
    """Of a token in the last linear layers of all layers, forward."""


@dataclass(frozen=True, slots=True)
class Work:
    """Numbers of what one pass over some rows computes."""

    tokens: int
    pairs: int
    scored: int


def costs(model: Any) -> Costs:
    """Return the costs of a Qwen3 or Qwen3.5 model, or of a `PeftModel` around one."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    forward = backward = last = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d) and module is not head:
            # a convolution runs over one channel at a time, so both take each weight once for a
            # token
            once = 2.0 * module.weight.numel()
            forward += once
            backward += once * (2 if module.weight.requires_grad else 1)
            # with an adapter it is not the last one
            last += once if name.endswith("down_proj") else 0.0
    if linear := layers(config, "linear_attention"):
        k, v = config.linear_key_head_dim, config.linear_value_head_dim
        # for a token and value head: products in its chunk, and with the state
        delta = (
            linear * config.linear_num_value_heads * (2.0 * _CHUNK * (3 * k + 2 * v) + 6.0 * k * v)
        )
        forward, backward = forward + delta, backward + 2 * delta
    pair = 4.0 * layers(config, "full_attention") * config.num_attention_heads * config.head_dim
    return Costs(forward, backward, pair, 2.0 * head.weight.numel(), last)


def of_padded(rows: Sequence[TraceRow], parts: Iterable[Sequence[int]]) -> Work:
    """Return the work of rows as batches, each as wide as its longest row. `parts` are the indices
    of each batch."""
    tokens = 0
    pairs = 0
    scored = 0
    for part in parts:
        batch = [rows[i] for i in part]
        width = max((len(row.ids) for row in batch), default=0)
        tokens += len(batch) * width
        pairs += len(batch) * width * (width + 1) // 2
        scored += sum(len(row.scored) for row in batch)
    return Work(tokens, pairs, scored)


def of_pack(pack: Pack) -> Work:
    """Return the work of a packed row. A token sees itself and all tokens before it on its path."""
    return Work(pack.tokens, int((pack.positions + 1).sum()), pack.labels.shape[1])


def step_flops(model: Costs, work: Work) -> float:
    """Return the operations of forward and backward, with checkpointing."""
    forward = work.tokens * model.forward + work.pairs * model.pair
    backward = work.tokens * model.backward + work.pairs * model.pair * ATTENTION_BACKWARD
    again = forward - work.tokens * model.last
    return forward + again + backward + 4 * work.scored * model.head
