"""How a model is run: in what sizes."""

from contextlib import nullcontext

import pytest

from rolltap.trainer.training.forward.sizes import measure
from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.grpo.forward import Forward
from tests.trainer.training.forward.test_sizes import hybrid, session


def fitted(model, rows, memory_gib, folder):
    args = TraceGRPOConfig(output_dir=str(folder), use_cpu=True, memory_gib=memory_gib)
    forward = Forward(model, nullcontext, args)
    forward.fit([rows, session(2)], None)
    return forward.scorer


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_sessions_with_branches_are_run_in_parts_where_their_states_do_not_fit(tmp_path):
    model, branches = hybrid(), 300
    states = branches * measure(model, nullcontext).state_per_segment
    line = session(branches)[:1]
    alone = fitted(model, line, states / 2**30, tmp_path)
    assert alone.tokens_in_memory is None
    scorer = fitted(model, session(branches), states / 2**30, tmp_path)
    assert scorer.tokens_in_memory is not None
    assert scorer.tokens_per_branch > 1000
