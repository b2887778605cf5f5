"""The text of recorded token ids: pieces that are whole characters, by the bytes that each token
stands for."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from rolltap.addons.errors import install_command
from rolltap.addons.store.metadata import read_metadata

Piece = list[Any]
"""Text, number of tokens, and for some a third entry: the hex of the bytes of a character that is
split over tokens or is incomplete; "special" for a token that is no text, such as an end of turn.
"""
Decoder = Callable[[list[int]], str]
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

_CUT = "unexpected end of data"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet in which byte-level BPE writes its tokens: character -> byte (GPT-2's
    `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {}
    others = 256
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(others)] = byte
            others += 1
    return alphabet


_BYTES = _byte_alphabet()


class TokenText:
    """Text of the tokens of one `tokenizers.Tokenizer`. Keeps the bytes of each token that it has
    seen."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, tuple[bytes, bool]] = {}
        """Id -> its bytes, and True for a special token."""

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """Return the text of token ids, shape (N,), as pieces of N tokens in all."""
        for token in {*ids} - self._known.keys():
            self._known[token] = self._meaning(token)
        pieces: list[Piece] = []
        held = b""  # bytes whose last character is not whole
        tokens = 0  # the tokens that they are of
        for token in ids:
            data, special = self._known[token]
            if held and (special or _fault(held + data) not in (None, _CUT)):
                pieces.append(_piece(held, tokens))
                held = b""
                tokens = 0
            if special:
                pieces.append([data.decode(), 1, "special"])
                continue
            held += data
            tokens += 1
            if _fault(held) != _CUT:
                pieces.append(_piece(held, tokens))
                held = b""
                tokens = 0
        if held:
            pieces.append(_piece(held, tokens))
        return pieces

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return "".join(piece[0] for piece in self.pieces(ids))

    def _meaning(self, token: int) -> tuple[bytes, bool]:
        name = None
        if token >= 0:
            name = self._tokenizer.id_to_token(token)
        if name is None:
            return f"<{token}>".encode(), True
        added = self._added.get(token)
        if added is not None:
            return added.content.encode(), added.special
        if self._byte_level and _BYTES.keys() >= {*name}:
            return bytes(map(_BYTES.__getitem__, name)), False
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            return bytes.fromhex(byte[1]), False
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode(), False


def _piece(data: bytes, tokens: int) -> Piece:
    if tokens == 1 and _fault(data) is None:
        return [data.decode(), 1]
    return [data.decode(errors="replace"), tokens, data.hex()]


def _fault(data: bytes) -> str | None:
    """Return why bytes are not whole characters, as Python says it; None when they are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason
    return None


def load_text(run: Path) -> TokenText | str:
    """Return the text of a run's tokens, or in words why it is not known. Nothing is downloaded.

    Raises `RunError` when the folder cannot be read.
    """
    model = str(read_metadata(run).get("model", ""))
    file: Any = Path(model, "tokenizer.json")
    try:
        from tokenizers import Tokenizer

        if not file.is_file():
            file = try_to_load_from_cache(model, "tokenizer.json")
        if isinstance(file, str | Path):
            return TokenText(Tokenizer.from_file(str(file)))
        # of another form; it takes seconds to import
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(model, local_files_only=True)
        return TokenText(loaded.backend_tokenizer)
    except ImportError as error:
        remedy = install_command("record")
        return f"token text needs packages that are not installed ({error}): {remedy}"
    # the libraries raise whatever they like for a damaged file
    except Exception as error:
        why = str(error).partition("\n")[0]
        return f"the tokenizer of {model!r} is not on this machine ({why})"


def load_decoder(run: Path) -> Decoder | None:
    """Return a function from token ids to text; None as `load_text`, whose errors it raises."""
    text = load_text(run)
    if isinstance(text, str):
        return None
    return text.text
