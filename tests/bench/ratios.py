"""Ratios of single tokens between a trainer and the engine that sampled them, by the type of both.

    python -m tests.bench.ratios RUN MODEL bfloat16

RUN was recorded from an engine that serves MODEL in this type. Each recorded call is scored by the
model as it is trained, in one piece. Prints how far the ratios exp(trainer's log-probability -
engine's) are from 1.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from rolltap.trainer.models.loading import load_policy
from rolltap.trainer.traces.reader import RecordedCalls

QUANTILES = (0.5, 0.9, 0.99, 1.0)


@torch.no_grad()
def ratios(run: Path, folder: Path, dtype: str) -> np.ndarray:
    """Return the ratio of each sampled token of a run, shape (N,)."""
    model = load_policy(folder, dtype).eval()
    found = []
    for _, calls in RecordedCalls(run).items():
        for call in calls:
            prompt = len(call.prompt_ids)
            ids = torch.tensor([[*call.prompt_ids, *call.completion_ids]])
            with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
                logits = model(ids).logits[0, prompt - 1 : -1].float()
            own = logits.log_softmax(-1).gather(-1, ids[0, prompt:, None])[:, 0]
            found.append((own.double() - torch.tensor(call.logprobs).double()).exp().numpy())
    return np.concatenate(found)


def main(run: str, folder: str, dtype: str) -> None:
    off = np.abs(ratios(Path(run), Path(folder), dtype) - 1)
    print(f"{dtype}, {len(off):,} tokens, |ratio - 1|:")
    for quantile in QUANTILES:
        print(f"{quantile:.0%} within {np.quantile(off, quantile):.2g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
