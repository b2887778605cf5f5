"""The experts that an engine chose for the tokens of a call: a row of the table `routing`.

A row has the tokens from the last one of its parent call on, because the parent's row has those
before. The last sampled token has none: no engine has computed it.
"""

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltap.addons.store.records import Call, schema_of, values_of


@dataclass(slots=True, kw_only=True)
class Routing:
    """Experts of a call's tokens, layer by layer; a row of `ROUTING_SCHEMA`.

    Attributes:
        first: Position of the first token, in prompt and completion.
        layers: All of the model's layers; those without experts are zeros.
        experts: Numbers of experts, an array (tokens, layers, top_k) in C order, little-endian.
        expert_bytes: Bytes of a number: 1 or 2.
        missing: Why there are none; None if there are.
    """

    session_id: str
    call_id: str
    first: int = 0
    layers: int = 0
    top_k: int = 0
    expert_bytes: int = 1
    experts: bytes = field(default=b"", repr=False)
    missing: str | None = None

    def to_row(self) -> dict[str, Any]:
        """Return the routing as a row of `ROUTING_SCHEMA` without its digest."""
        return values_of(self)


ROUTING_SCHEMA = schema_of(Routing)


def first_routed(call: Call) -> int:
    """Return the position of the first token whose experts no row of an earlier call has."""
    return max(0, call.prefix_length - 1)


def make_routing(call: Call, encoded: str | None) -> Routing:
    """Return the routing of a finished call, from vLLM's `routed_experts`.

    That is a base64 text of an `.npy` file. What does not have the call's number of tokens is left
    out, with the reason in `missing`.
    """
    first = first_routed(call)
    routing = Routing(session_id=call.session_id, call_id=call.call_id, first=first)
    if encoded is None:
        fix = "start it with --enable-return-routed-experts"
        routing.missing = f"the engine returned none: {fix}"
        return routing
    tokens = len(call.prompt_ids) + len(call.completion_ids) - 1 - first
    try:
        file = io.BytesIO(base64.b64decode(encoded, validate=True))
        experts: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        if experts.ndim != 3 or experts.dtype.kind not in "iu" or len(experts) != tokens:
            raise ValueError(f"{experts.dtype} of shape {experts.shape} for {tokens} tokens")
        if experts.size and not 0 <= experts.min() <= experts.max() < 2**15:
            raise ValueError(f"numbers of experts from {experts.min()} to {experts.max()}")
    except Exception as error:  # whatever NumPy raises: a call must not be lost for its experts
        routing.missing = f"the engine returned what is none: {error}"
        return routing
    routing.expert_bytes = 1 if experts.max(initial=0) < 256 else 2
    routing.experts = experts.astype(f"<u{routing.expert_bytes}").tobytes()
    _, routing.layers, routing.top_k = experts.shape
    return routing
