"""The text that the quickstart model is trained to write, and its tokenizer. Does not need
torch."""

import json
import sysconfig
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# The assistant's turns: reasoning and command.
LOOK = [("Looking around first.", command) for command in ("ls", "cat words.txt")]
RIGHT = "wc -l < words.txt > answer.txt"
WRONG = [
    "wc -w < words.txt > answer.txt",
    "wc -c < words.txt > answer.txt",
    "wc -m < words.txt > answer.txt",
]
COUNT = [("Writing the answer to the file.", command) for command in (RIGHT, *WRONG)]
SUBMIT = ("Done, the answer is written.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")

# Qwen's pre-tokenizer and special tokens, so that Qwen's renderer, parsers and chat templates can
# be used.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]

VOCABULARY = 1536


def reply(reasoning: str, command: str) -> str:
    """Return an assistant turn as the model writes it, its end-of-turn token included."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<think>\n{reasoning}\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>"


def filler_text() -> str:
    """Return some megabytes of prose and code that Python brings: sources of the standard
    library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py")) + sorted(library.glob("pydoc_data/*.py"))
    return "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with Qwen3's special tokens and the recipe's chat
    template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The taught turns are repeated: their words become single tokens, and sessions are short.
    template = TEMPLATE.read_text()
    taught = "\n".join([template, *(reply(*turn) for turn in (*LOOK, *COUNT, SUBMIT))])
    tokenizer.train_from_iterator(
        [text[:1_000_000], *[taught] * 1000],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=65536,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )
