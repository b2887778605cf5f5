"""Memory of an engine: its cache as vLLM divides it, and the memory that each sequence takes.

Sources: vLLM 0.32 and 0.33. A cache is cut into blocks. A hybrid model has blocks of one size for
both kinds of attention: its layers are in groups of as many layers, and a block holds tokens of a
group of attention layers, or a state of a group of linear ones (v1/core/kv_cache_utils.py, in 0.33
kv_cache_planning.py: `_get_kv_cache_groups_uniform_page_size`). Tests compare these numbers with
vLLM's own functions.
"""

from dataclasses import dataclass

from rolltap.trainer.training.plan.model import FLOAT32, ModelNumbers
from rolltap.trainer.training.recipe import Recipe

CALLS_PER_SESSION = 2
"""Sub-agents and side questions call beside their session. Calls beyond these wait in vLLM."""
LEAST_SEQUENCES = 16
"""Least `--max-num-seqs`: a lone session may have many sub-agents, and sequences cost little."""
KERNEL_TOKENS = 16
"""The tokens of a block are a multiple of these, on GPUs before Blackwell."""
STATES = 2
"""Blocks of a sequence in each group of linear attention: the state after its last whole block of
tokens, and the running one (v1/kv_cache_interface.py, `MambaSpec.max_memory_usage_bytes`,
`align`)."""
COUNTS = FLOAT32 + 1 / 8
"""Bytes of the counts that penalties would use, for each sequence and token of the vocabulary: an
int32 and a bit (v1/worker/gpu/sample/penalties.py)."""


def sequences_of(recipe: Recipe, engines: int) -> int:
    """Return the value of `--max-num-seqs`: how many calls each of the engines computes at once.

    vLLM's default is 1,024 on large GPUs, and a hybrid model does not start with fewer blocks.
    """
    sessions = -(-recipe.concurrency // engines)
    return max(LEAST_SEQUENCES, CALLS_PER_SESSION * sessions)


def sequence_bytes(numbers: ModelNumbers) -> int:
    """Return the bytes that a sequence takes besides the cache, for the tokens of the vocabulary.

    They are the counts of penalties, the logits in the type of the weights, and a copy of the
    logits in float32 (v1/worker/gpu/sample/sampler.py).
    """
    return int(numbers.vocabulary * (COUNTS + numbers.item + FLOAT32))


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of an engine's cache."""

    bytes: int
    """Size of a block."""
    tokens: int
    """Tokens that a block of attention holds."""
    attention: int
    """Groups of layers with attention. Each needs blocks for all tokens of a sequence."""
    linear: int
    """Groups of layers with linear attention."""

    @classmethod
    def of(cls, numbers: ModelNumbers) -> "Blocks":
        """Return the blocks of a model's cache."""
        if not numbers.linear_layers:
            return cls(numbers.token * KERNEL_TOKENS, KERNEL_TOKENS, 1, 0)
        if not numbers.attention_layers:
            return cls(numbers.state, KERNEL_TOKENS, 0, 1)
        token = numbers.token / numbers.attention_layers
        state = numbers.state / numbers.linear_layers
        # as few tokens as take at least as much as a state, which is padded
        tokens = KERNEL_TOKENS * int(-(-state // (token * KERNEL_TOKENS)))
        fewer, more = sorted((numbers.attention_layers, numbers.linear_layers))
        group = fewer
        if more < 1.5 * fewer:
            group = more
        return cls(
            bytes=int(group * token * tokens),
            tokens=tokens,
            attention=-(-numbers.attention_layers // group),
            linear=-(-numbers.linear_layers // group),
        )

    def session_bytes(self, tokens: int) -> int:
        """Return the bytes of the blocks of a session with `tokens` tokens."""
        for_tokens = self.attention * -(-tokens // self.tokens)
        return self.bytes * (for_tokens + STATES * self.linear)
