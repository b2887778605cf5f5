"""The planner's numbers of an engine, by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rolltap.trainer.training.plan.engine import Blocks, sequence_bytes, sequences_of
from rolltap.trainer.training.plan.memory import GIB
from rolltap.trainer.training.recipe import Recipe


def numbers(attention, linear, token=4096, state=2_162_688, **others):
    """Layers of both kinds, with the bytes of a token and of a state in one, of Qwen3.5-4B."""
    sizes = {"token": token * attention, "state": state * linear}
    return SimpleNamespace(attention_layers=attention, linear_layers=linear, **sizes, **others)


def test_a_block_of_a_hybrid_holds_a_state_or_as_many_tokens_as_take_no_less():
    blocks = Blocks.of(numbers(8, 24))
    assert blocks == Blocks(bytes=8 * 2_162_688, tokens=528, attention=1, linear=3)
    assert 1024 * blocks.bytes == 16.5 * GIB
    assert blocks.session_bytes(528) == (1 + 2 * 3) * blocks.bytes
    assert blocks.session_bytes(529) == (2 + 2 * 3) * blocks.bytes
    assert Blocks.of(numbers(8, 24, state=2_162_689)).tokens == 544


@pytest.mark.parametrize(
    ("attention", "linear", "groups"),
    [(8, 24, (1, 3)), (8, 10, (1, 1)), (8, 12, (1, 2)), (10, 4, (3, 1))],
)
def test_layers_are_in_groups_of_as_many(attention, linear, groups):
    blocks = Blocks.of(numbers(attention, linear))
    assert (blocks.attention, blocks.linear) == groups


def test_without_linear_attention_blocks_have_sixteen_tokens():
    expected = Blocks(bytes=16 * 36 * 4096, tokens=16, attention=1, linear=0)
    assert Blocks.of(numbers(36, 0)) == expected


def test_without_attention_a_session_is_its_states():
    assert Blocks.of(numbers(0, 4)).session_bytes(100_000) == 2 * 4 * 2_162_688


@pytest.mark.parametrize(
    ("concurrency", "engines", "expected"),
    [(1, 1, 16), (8, 4, 16), (64, 4, 32), (65, 4, 34)],
)
def test_an_engine_has_twice_as_many_calls_as_sessions(concurrency, engines, expected):
    recipe = Recipe(model=Path("model"), steps=1, concurrency=concurrency)
    assert sequences_of(recipe, engines) == expected


def test_a_sequence_has_counts_and_logits_over_the_vocabulary():
    qwen = numbers(8, 24, vocabulary=248_320, item=2)
    # the counts of 1,024 sequences take 0.98 GiB, and their logits 1.42
    assert 1024 * sequence_bytes(qwen) == pytest.approx(2.4 * GIB, rel=0.01)
