"""The sharded optimizer against the optimizer that it wraps, on gloo ranks."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter
from transformers.optimization import Adafactor

from rolltap.trainer.training.grpo.optimizer import ShardedOptimizer, shares
from tests.trainer.training.grpo.gloo import run_ranks

KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": False}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Adafactor": (Adafactor, {"lr": 1e-2, "scale_parameter": False, "relative_step": False}),
}
SHAPES = [(4, 3), (3,), (2, 2), (5,), (1,)]


def weights(dtype=torch.float32, shapes=SHAPES) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter((1 + torch.rand(shape)).to(dtype)) for shape in shapes]


def groups(parameters):
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def sharded(parameters, kind="fused AdamW", **more):
    made, options = KINDS[kind]
    names = {parameter: f"weight {i}" for i, parameter in enumerate(parameters)}
    return ShardedOptimizer(groups(parameters), kind=made, names=names, **options | more)


def steps(optimizer, parameters, begin, end, without=()):
    """Take the steps whose gradients are random numbers of the step."""
    for step in range(begin, end):
        torch.manual_seed(step)
        for i, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape)
            parameter.grad = None if i in without else gradient
        if step == 1:
            optimizer.param_groups[0]["lr"] = 2e-2  # as a scheduler does
        optimizer.step()


def values(parameters):
    return [parameter.detach().flatten().tolist() for parameter in parameters]


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_each_parameter_has_one_owner_and_nobody_owns_much_more_than_another(sizes, ranks):
    owners = shares(sizes, ranks)
    assert len(owners) == len(sizes)
    owned = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(owned) == sum(sizes)
    assert max(owned) - min(owned) <= max(sizes, default=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_two_processes_are_those_of_the_optimizer_alone(kind):
    made, options = KINDS[kind]
    alone = weights()
    steps(made(groups(alone), **options), alone, 0, 3, without=[3])

    def train(rank):
        parameters = weights()
        optimizer = sharded(parameters, kind)
        steps(optimizer, parameters, 0, 3, without=[3])
        return values(parameters), len(optimizer.state)

    for found, states in run_ranks(train):
        assert found == values(alone)
        assert 0 < states < len(alone)


def test_a_process_may_own_nothing():
    def train(rank):
        parameters = weights(shapes=[(2, 2)])
        steps(sharded(parameters), parameters, 0, 2)
        return values(parameters)

    first, second = run_ranks(train)
    assert first == second != values(weights(shapes=[(2, 2)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_processes_step_weights_of_16_bits_as_one_does(dtype):
    def train(rank=0):
        parameters = weights(dtype)
        steps(sharded(parameters), parameters, 0, 5)
        return values(parameters)

    assert run_ranks(train) == [train()] * 2


def test_steps_too_small_for_bfloat16_add_up():
    parameters = weights(torch.bfloat16)
    begun = copy.deepcopy(parameters)
    optimizer = sharded(parameters, lr=1e-6)
    masters = [master.detach().clone() for group in optimizer.param_groups for master in group["params"]]

    def step():
        for parameter in parameters:
            parameter.grad = torch.ones(parameter.shape)
        optimizer.step()

    for _ in range(20):
        step()
    assert values(parameters) == values(begun)
    moved = [master for group in optimizer.param_groups for master in group["params"]]
    for before, after in zip(masters, moved, strict=True):
        torch.testing.assert_close(before - after, torch.full_like(before, 20e-6), rtol=0.2, atol=0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for _ in range(20):
        step()
    assert all((after < before).all() for before, after in zip(begun, parameters, strict=True))


def test_small_gradients_of_bfloat16_weights_add_up():
    (parameter,) = parameters = [Parameter(torch.ones(1, dtype=torch.bfloat16))]
    sharded(parameters)
    (256 * parameter).sum().backward()
    for _ in range(64):
        parameter.sum().backward()
    assert parameter.grad.item() == 256 + 64


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks"),
    [(kind, torch.bfloat16, (2, 1)) for kind in KINDS]
    + [("fused AdamW", torch.bfloat16, ranks) for ranks in [(2, 2), (1, 2), (3, 2)]]
    + [("fused AdamW", torch.float32, ranks) for ranks in [(2, 2), (2, 1), (1, 2)]],
)
def test_any_number_of_processes_goes_on_from_the_shares_of_another(tmp_path, dtype, kind, ranks):
    def begin(rank):
        parameters = weights(dtype)
        optimizer = sharded(parameters, kind)
        steps(optimizer, parameters, 0, 3)
        optimizer.save(tmp_path)
        return values(parameters), optimizer.state_dict()

    def go_on(rank):
        parameters = weights(dtype)
        with torch.no_grad():
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.copy_(torch.tensor(value).view_as(parameter))
        optimizer = sharded(parameters, kind)
        optimizer.load_state_dict(state)
        optimizer.load(tmp_path)
        steps(optimizer, parameters, 3, 6)
        return values(parameters)

    whole = weights(dtype)
    steps(sharded(whole, kind), whole, 0, 6)
    saved, state = run_ranks(begin, ranks[0])[0]
    assert run_ranks(go_on, ranks[1]) == [values(whole)] * ranks[1]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_weights_of_float32_take_the_copies_that_were_saved_of_weights_of_16_bits(tmp_path, ranks):
    def begin(rank):
        parameters = weights(torch.bfloat16)
        optimizer = sharded(parameters)
        steps(optimizer, parameters, 0, 3)
        optimizer.save(tmp_path)
        return values(parameters), {name: master.tolist() for name, master in masters_of(optimizer).items()}

    def go_on(rank):
        parameters = weights()
        with torch.no_grad():
            for parameter, value in zip(parameters, rounded, strict=True):
                parameter.copy_(torch.tensor(value).view_as(parameter))
        sharded(parameters).load(tmp_path)
        return [parameter.tolist() for parameter in parameters]

    began = run_ranks(begin, ranks[0])
    rounded = began[0][0]
    exact = {name: value for _, saved in began for name, value in saved.items()}
    for found in run_ranks(go_on, ranks[1]):
        assert found == [exact[f"weight {i}"] for i in range(len(SHAPES))]


def masters_of(optimizer):
    """Return the copies in float32 that this process has: name -> value."""
    return {optimizer._names[parameter]: master.detach() for parameter, master in optimizer._masters.items()}


def test_shares_that_are_missing_or_of_others_are_refused(tmp_path):
    optimizer = sharded(weights())
    sharded(weights(shapes=SHAPES[:2])).save(tmp_path / "2")
    with pytest.raises(ValueError, match=r"Missing key in checkpoint state_dict: weight 2"):
        optimizer.load(tmp_path / "2")
    with pytest.raises(ValueError, match=r"the checkpoint lacks .*3"):
        optimizer.load(tmp_path / "3")
    file = next((tmp_path / "2").glob("*.distcp"))
    file.unlink()
    with pytest.raises(ValueError, match=r"cannot be written or read.* all processes must write to"):
        sharded(weights(shapes=SHAPES[:2])).load(tmp_path / "2")
    with pytest.raises(ValueError, match="not one of full weights"):
        optimizer.load_state_dict(torch.optim.AdamW(weights()).state_dict())


def test_gradients_are_dropped_from_all_parameters():
    parameters = weights(torch.bfloat16)
    optimizer = sharded(parameters)
    steps(optimizer, parameters, 0, 1)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)
