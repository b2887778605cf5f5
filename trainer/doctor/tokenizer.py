"""A tokenizer made on the spot, for a scripted model: byte-level BPE with the special tokens of Qwen3."""

import sysconfig
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

RENDERER = "qwen3"
"""The renderer of its conversations (`rolltap_renderer`). There is no chat template: the renderer needs none."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_VOCABULARY = 4096
_SOURCES = 20
"""Files of the standard library that its pairs of bytes are counted in. More would shorten prompts little."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, in half a second. It has about three characters a token, and every text is encodable."""
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
