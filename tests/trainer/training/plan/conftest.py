"""Plans of small models, on a machine without a GPU."""

from types import SimpleNamespace

import pytest

from rolltap.trainer.training.plan import model, plan, traced_step

TRACED = (512, 1024)
"""Tokens of the rows that are traced."""


@pytest.fixture(scope="package", autouse=True)
def small():
    """Let rows and the tiles of the head be small. A step is traced once for all plans."""
    steps = {}

    def fake_step(recipe, numbers, dtype, *, sharded):
        key = (numbers, dtype, sharded, repr(recipe.lora))
        if key not in steps:
            steps[key] = model.fake_step(recipe, numbers, dtype, sharded=sharded).memory()
        return SimpleNamespace(memory=lambda: steps[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)
        patch.setattr(traced_step, "LENGTHS", TRACED)
        patch.setattr(traced_step, "FEW", 128)
        patch.setattr(plan, "fake_step", fake_step)
        yield
