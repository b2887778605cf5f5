import pytest
from tokenizers import Tokenizer, decoders, models

from rolltap.trainer.runs.views.text import UNKNOWN, TokenText, load_text
from tests.factories import write_run


@pytest.fixture(scope="module")
def byte_level(tokenizer):
    return TokenText(tokenizer.backend_tokenizer)


@pytest.fixture
def ids(tokenizer):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return ids


@pytest.mark.parametrize(
    "text", ["plain words\n\ttab", "café", "emoji 🙂 and 日本", "  ", "a\u200bb", ""]
)
def test_the_pieces_are_the_text_of_the_tokens(byte_level, ids, text):
    pieces = byte_level.pieces(ids(text))
    assert "".join(piece[0] for piece in pieces) == text
    assert sum(piece[1] for piece in pieces) == len(ids(text))
    for shown, _, *written in pieces:
        assert not written or bytes.fromhex(written[0]).decode() == shown


def test_a_character_of_several_tokens_is_one_piece_with_its_bytes(byte_level, ids):
    face = ids("🙂")
    assert len(face) > 1
    assert byte_level.pieces(face) == [["🙂", len(face), "f09f9982"]]


def test_a_character_that_stays_incomplete_is_marked_and_what_follows_is_read(
    byte_level, ids, tokenizer
):
    *begun, last = ids("🙂")
    cut = [UNKNOWN, len(begun), "f09f9982"[: 2 * len(begun)]]
    assert byte_level.pieces([*begun, *ids("a")]) == [cut, ["a", 1]]
    special = [tokenizer.eos_token, 1, "special"]
    assert byte_level.pieces([*begun, tokenizer.eos_token_id]) == [cut, special]
    assert byte_level.pieces(begun) == [cut]
    assert byte_level.pieces([last]) == [[UNKNOWN, 1, "82"]]


def test_a_whole_character_before_one_that_stays_incomplete_is_kept():
    tokenizer = Tokenizer(models.BPE({"Ġð": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    text = TokenText(tokenizer)
    assert text.pieces([0, 1]) == [[f" {UNKNOWN}", 1, "20f0"], ["b", 1]]
    assert text.pieces([0]) == [[f" {UNKNOWN}", 1, "20f0"]]


def test_ids_that_the_tokenizer_does_not_have_are_shown_as_ids(byte_level):
    unknown = [["<2147483647>", 1, "special"], ["<-1>", 1, "special"]]
    assert byte_level.pieces([2**31 - 1, -1]) == unknown


def test_bytes_of_a_fallback_are_joined_to_characters():
    """A tokenizer in the manner of SentencePiece has words, and bytes for all else."""
    words = ["<s>", "▁a", "▁caf", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>"])
    ids = [0, 1, 2, *(4 + byte for byte in "é🙂".encode()), 3]
    assert TokenText(tokenizer).pieces(ids) == [
        ["<s>", 1, "special"],
        [" a", 1],
        [" caf", 1],
        ["é", 2, "c3a9"],
        ["🙂", 4, "f09f9982"],
        ["b", 1],
    ]


def test_the_tokenizer_of_the_run_is_loaded_and_without_one_it_says_why(
    tmp_path, tokenizer_folder, ids
):
    text = load_text(write_run(tmp_path / "run", model=str(tokenizer_folder)))
    assert text.text(ids("a word")) == "a word"
    (tmp_path / "tokenizer.json").write_text("{")  # damaged
    for model in ("/nowhere/model", str(tmp_path)):
        assert "is not on this machine" in load_text(write_run(tmp_path / "none", model=model))
