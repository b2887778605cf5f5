import pytest

from rolltap.addons.errors import LedgerError
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, cached_prompts, cached_shares
from tests.factories import make_call


def test_ledgers_can_be_added():
    first = Ledger(sampled=5, trained=2, left_out={"failed": 3})
    total = first + Ledger(sampled=4, trained=1, left_out={"failed": 1, "aborted": 2}) + Ledger()
    assert total == Ledger(sampled=9, trained=3, left_out={"failed": 4, "aborted": 2})
    total.check()


def test_tokens_are_left_out_of_those_to_train():
    ledger = Ledger(sampled=5, trained=5).leave_out("no_signal", 2)
    assert ledger == Ledger(sampled=5, trained=3, left_out={"no_signal": 2})
    assert ledger.leave_out("no_reward") == Ledger(
        sampled=5, left_out={"no_signal": 2, "no_reward": 3}
    )


@pytest.mark.parametrize(
    "ledger",
    [
        Ledger(sampled=5, trained=4),
        Ledger(sampled=5, trained=5, left_out={"failed": 1}),
        Ledger(sampled=0, trained=1),
    ],
)
def test_a_ledger_that_does_not_add_up_is_an_error(ledger):
    with pytest.raises(
        LedgerError, match=f"does not add up: {ledger.sampled}: {ledger.trained} to train"
    ):
        ledger.check()


def call(kind, prompt, prefix, cached):
    return make_call("c", [0] * prompt, kind=kind, prefix_length=prefix, cached_tokens=cached)


def prompts(*counts):
    return CachedPrompts(
        **dict(
            zip(("calls", "prompt_tokens", "known_tokens", "cached_tokens"), counts, strict=True)
        )
    )


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], {}),
        ([call("bridged", 100, 90, None)], {}),  # the engine did not say
        ([call("bridged", 100, 90, 0)], {"bridged": (1, 100, 90, 0)}),
        (
            [call("bridged", 100, 90, 80), call("root", 50, 0, 16), call("bridged", 200, 150, 144)],
            {"bridged": (2, 300, 240, 224), "root": (1, 50, 0, 16)},
        ),
    ],
)
def test_prompts_are_counted_by_kind(calls, expected):
    assert cached_prompts(calls) == {kind: prompts(*counts) for kind, counts in expected.items()}


@pytest.mark.parametrize(
    ("counted", "share", "unused"),
    [
        ((0, 0, 0, 0), None, False),
        ((1, 100, 90, 45), 0.45, False),
        ((1, 1100, 1000, 0), 0.0, True),
        ((1, 1100, 999, 0), 0.0, False),  # too little to say
        ((2, 2000, 1000, 49), 0.0245, True),
        ((2, 2000, 1000, 50), 0.025, False),  # long new messages are no fault of the cache
    ],
)
def test_a_cache_is_unused_when_next_to_nothing_of_what_it_could_have_came_from_it(
    counted, share, unused
):
    assert (prompts(*counted).share, prompts(*counted).unused) == (share, unused)


@pytest.mark.parametrize(
    ("continued", "shares"),
    [
        ({}, {}),
        ({"codex": prompts(1, 0, 0, 0)}, {}),
        ({"codex": prompts(1, 100, 90, 50)}, {"": 0.5}),
        (
            {"codex": prompts(1, 100, 90, 50), "pi": prompts(2, 300, 290, 300)},
            {"": 0.875, "codex": 0.5, "pi": 1.0},
        ),
        ({"codex": prompts(1, 100, 90, 50), "": prompts(1, 100, 90, 0)}, {"": 0.25, "codex": 0.5}),
    ],
)
def test_several_harnesses_have_a_share_each(continued, shares):
    assert cached_shares(continued) == shares
