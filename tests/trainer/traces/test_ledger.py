import pytest

from rolltap.addons.errors import LedgerError
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, cached_prompts, cached_shares
from tests.factories import make_call


def test_ledgers_can_be_added():
    first = Ledger(sampled=5, trained=2, left_out={"failed": 3})
    second = Ledger(sampled=4, trained=1, left_out={"failed": 1, "aborted": 2})
    total = first + second + Ledger()
    assert total == Ledger(sampled=9, trained=3, left_out={"failed": 4, "aborted": 2})
    total.check()


def test_tokens_are_left_out_of_those_to_train():
    ledger = Ledger(sampled=5, trained=5).leave_out("no_signal", 2)
    assert ledger == Ledger(sampled=5, trained=3, left_out={"no_signal": 2})
    left_out = {"no_signal": 2, "no_reward": 3}
    assert ledger.leave_out("no_reward") == Ledger(sampled=5, left_out=left_out)


@pytest.mark.parametrize(
    ("sampled", "trained", "left_out"),
    [(5, 4, {}), (5, 5, {"failed": 1}), (0, 1, {})],
)
def test_a_ledger_that_does_not_add_up_is_an_error(sampled, trained, left_out):
    ledger = Ledger(sampled=sampled, trained=trained, left_out=left_out)
    with pytest.raises(LedgerError, match=f"does not add up: {sampled}: {trained} to train"):
        ledger.check()


def call(kind, prompt, prefix, cached):
    return make_call("c", [0] * prompt, kind=kind, prefix_length=prefix, cached_tokens=cached)


def prompts(calls, prompt, known, cached):
    return CachedPrompts(
        calls=calls,
        prompt_tokens=prompt,
        known_tokens=known,
        cached_tokens=cached,
    )


@pytest.mark.parametrize(
    ("calls", "counted"),
    [
        ([], {}),
        ([call("bridged", 100, 90, None)], {}),  # the engine did not say
        ([call("bridged", 100, 90, 0)], {"bridged": prompts(1, 100, 90, 0)}),
        (
            [call("bridged", 100, 90, 80), call("root", 50, 0, 16), call("bridged", 200, 150, 144)],
            {"bridged": prompts(2, 300, 240, 224), "root": prompts(1, 50, 0, 16)},
        ),
    ],
)
def test_prompts_are_counted_by_kind(calls, counted):
    assert cached_prompts(calls) == counted


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
    assert prompts(*counted).share == share
    assert prompts(*counted).unused == unused


HALF = prompts(1, 100, 90, 50)


@pytest.mark.parametrize(
    ("continued", "shares"),
    [
        ({}, {}),
        ({"codex": prompts(1, 0, 0, 0)}, {}),
        ({"codex": HALF}, {"": 0.5}),
        ({"codex": HALF, "pi": prompts(2, 300, 290, 300)}, {"": 0.875, "codex": 0.5, "pi": 1.0}),
        ({"codex": HALF, "": prompts(1, 100, 90, 0)}, {"": 0.25, "codex": 0.5}),
    ],
)
def test_several_harnesses_have_a_share_each(continued, shares):
    assert cached_shares(continued) == shares
