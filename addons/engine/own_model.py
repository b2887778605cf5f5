"""The recorder's model, and the questions that compare the tokenizer of an engine with its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rolltap.addons.errors import EngineError

TEXT = (
    "The quick brown fox jumps over 13 lazy dogs, 2026-11-22 at 10:58; internationalisation isn't "
    "antidisestablishmentarianism.\n"
    "\tdef f(x):\n        return {'a': x ** 2, \"b\": [1, 22, 333, 4444]}  # naïve café\n\n"
    "Größe, Ελληνικά, русский, עברית, 日本語, 中文分词, 한국어, 👩‍💻 → ∑∫√\r\n    "
    "<|endoftext|><|im_start|>user<|im_end|><think></think><tool_call></tool_call>"
    "<tool_response></tool_response><|begin_of_text|><|eot_id|><bos><start_of_turn>[INST]</s>"
)
"""The text whose tokens are compared: words, numbers, code, scripts, and the special tokens of
common models. A model that is a later version of another one often has its vocabulary and more
special tokens."""
_PIECE = 1 << 14
"""Tokens whose text is asked for at once: an answer stays below `client.MOST_BYTES`."""


class WrongModel(EngineError):
    """The engine serves a model with another tokenizer than the recorder's."""


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The recorder's model: its name or folder, and the questions about an engine's tokenizer.

    A question is a path, a body, the key of the answer, and the right answer.
    """

    name: str
    questions: list[tuple[str, dict[str, Any], str, Any]]

    @classmethod
    def of(cls, name: str, tokenizer: Any) -> Self:
        """Return the model of a name or folder.

        The tokens of a text show how it is split. The texts of all tokens show that none has the
        place of another one. A model may have more ids than its tokenizer has tokens: they are not
        compared.
        """
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        questions = [("/tokenize", {"prompt": TEXT, "add_special_tokens": False}, "tokens", ids)]
        vocabulary = sorted(set(tokenizer.get_vocab().values()))
        for start in range(0, len(vocabulary), _PIECE):
            piece = vocabulary[start : start + _PIECE]
            questions.append(("/detokenize", {"tokens": piece}, "prompt", tokenizer.decode(piece)))
        return cls(name, questions)

    def is_named(self, *names: str) -> bool:
        """Return True if one of an engine's names or folders is that of the recorder's model."""
        if self.name in names:
            return True
        own = Path(self.name).resolve()
        return any(Path(name).is_dir() and Path(name).resolve() == own for name in names)
