"""Whether an engine serves the recorder's model: the same token ids for a fixed text."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rolltap.addons.errors import EngineError

TEXT = (
    "The quick brown fox jumps over 13 lazy dogs, 2026-11-22 at 10:58; internationalisation isn't antidisestablish"
    "mentarianism.\n\tdef f(x):\n        return {'a': x ** 2, \"b\": [1, 22, 333, 4444]}  # naïve café\n\n"
    "Größe, Ελληνικά, русский, עברית, 日本語, 中文分词, 한국어, 👩‍💻 → ∑∫√\r\n    "
    "<|endoftext|><|im_start|>user<|im_end|><think></think><tool_call></tool_call><tool_response></tool_response><|begin_of_text|><|eot_id|><bos><start_of_turn>[INST]</s>"
)
"""The text whose tokens are compared: words, numbers, code, scripts, and the special tokens of common models. A model
that is a later version of another one often has its vocabulary and more special tokens."""


class WrongModel(EngineError):
    """The engine serves a model with another tokenizer than the recorder's."""


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The recorder's model: its name or folder, and the token ids of `TEXT` without special tokens added to it."""

    name: str
    ids: list[int]

    @classmethod
    def of(cls, name: str, encode: Callable[[str], list[int]]) -> Self:
        """Return the model of a name or folder. `encode` returns the tokens of a text."""
        return cls(name, encode(TEXT))

    def require(self, url: str, served: str, ids: Any) -> None:
        """Raise `WrongModel` unless `ids` are the tokens. `served` names the model of the engine at `url`."""
        if ids != self.ids:
            raise WrongModel(
                f"the engine at {url} serves {served}, whose tokenizer is not that of {self.name}: give the model that "
                f"the engine serves (--model, rolltap_model), or start the engine with {self.name}",
                status=502,
                told=f"the engine at {url} serves another model than the recorder's",
            )

    def is_named(self, *names: str) -> bool:
        """Return True when one of the names or folders, as the engine has them, is the recorder's model."""
        own = Path(self.name).resolve()
        return any(name == self.name or (Path(name).is_dir() and Path(name).resolve() == own) for name in names)
