"""Traces as padded rows: for models that a packed row would change."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltap.trainer.training.step.pack import Row
from rolltap.trainer.training.step.routing import OWN


class PaddedRows:
    """The rows of sessions as one batch, padded on the right. It is used as a `Pack` is.

    There is no attention mask: under causal attention nothing on the right of a token changes it. A mask would make
    torch's attention build a matrix of T x T values for each row.
    """

    def __init__(self, sessions: Sequence[Sequence[Row]], device: torch.device) -> None:
        """Without a trained token there is one row of two tokens."""
        rows = [row for session in sessions for row in session if len(row.scored)]
        shape = (max(1, len(rows)), max([2, *(len(row.ids) for row in rows)]))
        ids = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, -100)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.from_numpy(row.ids)
            labels[i, row.scored] = torch.from_numpy(row.ids[row.scored]).long()
        self.tokens = ids.numel()
        self.experts = _experts(rows, shape)
        self._ids = ids.to(device)
        self._labels = labels.to(device)
        counts = [sum(len(row.scored) for row in session) for session in sessions]
        self.mask = torch.zeros(len(sessions), max([1, *counts]), dtype=torch.bool, device=device)
        for i, count in enumerate(counts):
            self.mask[i, :count] = True

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the model's forward pass."""
        return {"input_ids": self._ids, "labels": self._labels, "fused_lm_head": True, "use_cache": False}

    def unpack(self, values: Tensor) -> Tensor:
        """Return (B, S), a session's trained tokens row by row, then zeros, for the values of a pass (R, T - 1)."""
        scored = self._labels[:, 1:] != -100  # the value of position p is at p - 1
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values[scored])


def _experts(rows: Sequence[Row], shape: tuple[int, int]) -> np.ndarray[Any, Any] | None:
    """Return the experts of all positions (R * T, layers, k), or None if no row has any."""
    recorded = [row.experts for row in rows if row.experts is not None]
    if not recorded:
        return None
    experts = np.full((*shape, *recorded[0].shape[1:]), OWN, np.int16)
    for i, row in enumerate(rows):
        if row.experts is not None:
            experts[i, : len(row.experts)] = row.experts
    return experts.reshape(-1, *experts.shape[2:])
