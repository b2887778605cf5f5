"""A tokenizer made on the spot, for a scripted model: byte-level BPE with the special tokens of Qwen3."""

import json
import sysconfig
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

RENDERER = "qwen3"
"""The renderer of its conversations (`rolltap_renderer`). There is no chat template: the renderer needs none."""
_END, _PAD = "<|im_end|>", "<|endoftext|>"
_SPECIAL = (_PAD, "<|im_start|>", _END)
_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_VOCABULARY = 4096
_SOURCES = 20
"""Files of the standard library that its pairs of bytes are counted in. More would shorten prompts little."""


class MadeTokenizer:
    """The part of a Transformers tokenizer that `ScriptedEngine` uses, without that package: it takes long to import.

    Making it takes a second at most. It has about three characters a token, and every text can be encoded. Its files
    are written to `folder`, from which Transformers loads it.
    """

    def __init__(self, folder: Path) -> None:
        self.name_or_path = str(folder)
        self._tokenizer = _trained()
        self.eos_token_id = self._tokenizer.token_to_id(_END)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _PAD}
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "clean_up_tokenization_spaces": False}))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text. Special tokens in it are found; none are ever added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = islice(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), _SOURCES)
    tokenizer.train_from_iterator(
        (file.read_text(encoding="utf-8", errors="ignore") for file in files),
        trainers.BpeTrainer(
            vocab_size=_VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _MARKUP])
    return tokenizer
