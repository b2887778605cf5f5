"""Traces as the model sees them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one trace, and which of them are scored.

    Attributes:
        ids: Prompt and completion, shape (T,).
        scored: Ascending positions of the n trained tokens, each at least 1, shape (n,). The token `ids[p]` is
            scored given `ids[:p]`.
    """

    ids: NDArray[np.int32]
    scored: NDArray[np.int64]
