"""The text of recorded token ids: pieces that are whole characters, by the bytes that each token
stands for."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from rolltap.addons.errors import install_command
from rolltap.addons.store.metadata import read_metadata

Piece = list[Any]
"""Text, number of tokens, and for some a third entry: the hex of the bytes of a character that is
split over tokens or is incomplete; "special" for a token that is no text, such as an end of turn.
"""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

_CUT = "unexpected end of data"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(_OTHERS)
}
"""The alphabet in which byte-level BPE writes its tokens: character -> byte (GPT-2's
`bytes_to_unicode`)."""


class TokenText:
    """Text of the tokens of one `tokenizers.Tokenizer`. Keeps the bytes of each token that it has
    seen."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = (
            tokenizer.decoder is not None and b"ByteLevel" in tokenizer.decoder.__getstate__()
        )
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, tuple[bytes, str | None, bool]] = {}
        """Id -> its bytes, their text if they are whole characters, True for a special token."""

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """Return the text of token ids, shape (N,), as pieces of N tokens in all."""
        for token in {*ids} - self._known.keys():
            self._known[token] = self._meaning(token)
        pieces: list[Piece] = []
        held, tokens = b"", 0  # the begin of a character, and the tokens that it has so far
        for token in ids:
            data, text, special = self._known[token]
            if held and (special or _fault(held + data) not in (None, _CUT)):
                pieces.append([UNKNOWN, tokens, held.hex()])
                held, tokens = b"", 0
            if text is not None and not held:
                pieces.append([text, 1, "special"] if special else [text, 1])
                continue
            held, tokens = held + data, tokens + 1
            if _fault(held) != _CUT:
                pieces.append([held.decode(errors="replace"), tokens, held.hex()])
                held, tokens = b"", 0
        if held:
            pieces.append([UNKNOWN, tokens, held.hex()])
        return pieces

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return "".join(piece[0] for piece in self.pieces(ids))

    def _meaning(self, token: int) -> tuple[bytes, str | None, bool]:
        name = self._tokenizer.id_to_token(token) if token >= 0 else None
        if name is None:
            return b"", f"<{token}>", True
        if added := self._added.get(token):
            return added.content.encode(), added.content, bool(added.special)
        if self._byte_level and _BYTES.keys() >= {*name}:
            data = bytes(_BYTES[character] for character in name)
        elif byte := _BYTE.fullmatch(name):
            data = bytes.fromhex(byte[1])
        else:
            data = name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return data, None if _fault(data) else data.decode(), False


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
    try:
        from tokenizers import Tokenizer

        file = Path(model, "tokenizer.json")
        found = str(file) if file.is_file() else try_to_load_from_cache(model, "tokenizer.json")
        if isinstance(found, str):
            return TokenText(Tokenizer.from_file(found))
        # of another form; it takes seconds to import
        from transformers import AutoTokenizer

        return TokenText(
            AutoTokenizer.from_pretrained(model, local_files_only=True).backend_tokenizer
        )
    except ImportError as error:
        return (
            f"token text needs packages that are not installed ({error}):"
            f" {install_command('record')}"
        )
    except (
        Exception
    ) as error:  # of the libraries, which raise whatever they like for a damaged file
        return (
            f"the tokenizer of {model!r} is not on this machine"
            f" ({str(error).partition(chr(10))[0]})"
        )
