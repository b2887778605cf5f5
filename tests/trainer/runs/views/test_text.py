import pytest
from tokenizers import Tokenizer, decoders, models

from rolltap.trainer.runs.views.text import UNKNOWN, TokenText, load_text
from tests.factories import write_run


@pytest.fixture(scope="module")
def byte_level(tokenizer):
    return TokenText(tokenizer.backend_tokenizer)


@pytest.fixture(scope="module")
def byte_fallback():
    """Return the text of a tokenizer in the manner of SentencePiece: words, and bytes for all
    else."""
    words = ["<s>", "▁a", "▁caf", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return TokenText(tokenizer)


@pytest.mark.parametrize(
    "text", ["plain words\n\ttab", "café", "emoji 🙂 and 日本", "  ", "a\u200bb"]
)
def test_the_pieces_are_the_text_of_the_tokens(byte_level, tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = byte_level.pieces(ids)
    assert "".join(piece[0] for piece in pieces) == text
    assert sum(piece[1] for piece in pieces) == len(ids)
    assert all(bytes.fromhex(piece[2]).decode() == piece[0] for piece in pieces if len(piece) == 3)


def test_a_character_of_several_tokens_is_one_piece_with_its_bytes(byte_level, tokenizer):
    ids = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    assert byte_level.pieces(ids) == [["🙂", len(ids), "f09f9982"]]


def test_a_character_that_stays_incomplete_is_marked_and_what_follows_is_read(
    byte_level, tokenizer
):
    ids = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    (word,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    cut = [UNKNOWN, len(ids) - 1, "f09f9982"[: 2 * (len(ids) - 1)]]
    assert byte_level.pieces([*ids[:-1], word]) == [cut, ["a", 1]]
    assert byte_level.pieces([*ids[:-1], end]) == [cut, [tokenizer.eos_token, 1, "special"]]
    assert byte_level.pieces(ids[:-1]) == [cut]
    assert byte_level.pieces([ids[-1]]) == [[UNKNOWN, 1, "82"]]


def test_ids_that_the_tokenizer_does_not_have_are_shown_as_ids(byte_level):
    assert byte_level.pieces([2**31 - 1, -1]) == [
        ["<2147483647>", 1, "special"],
        ["<-1>", 1, "special"],
    ]
    assert byte_level.pieces([]) == []


def test_bytes_of_a_fallback_are_joined_to_characters(byte_fallback):
    ids = [0, 1, 2, *(4 + byte for byte in "é🙂".encode()), 3]
    assert byte_fallback.pieces(ids) == [
        ["<s>", 1, "special"],
        [" a", 1],
        [" caf", 1],
        ["é", 2, "c3a9"],
        ["🙂", 4, "f09f9982"],
        ["b", 1],
    ]


def test_without_the_tokenizer_it_says_why(tmp_path):
    assert "is not on this machine" in load_text(
        write_run(tmp_path / "run", model="/nowhere/model")
    )


def test_a_damaged_tokenizer_is_none(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    assert "is not on this machine" in load_text(write_run(tmp_path / "run", model=str(tmp_path)))


def test_the_tokenizer_of_the_run_is_loaded(tmp_path, tokenizer_folder, tokenizer):
    text = load_text(write_run(tmp_path / "run", model=str(tokenizer_folder)))
    assert text.text(tokenizer("a word")["input_ids"]) == "a word"


def test_a_whole_character_before_one_that_stays_incomplete_is_kept():
    tokenizer = Tokenizer(models.BPE({"Ġð": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    text = TokenText(tokenizer)
    assert text.pieces([0, 1]) == [[f" {UNKNOWN}", 1, "20f0"], ["b", 1]]
    assert text.pieces([0]) == [[f" {UNKNOWN}", 1, "20f0"]]
