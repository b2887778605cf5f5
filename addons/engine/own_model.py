"""The model of an engine, and the questions that compare its tokenizer with the recorder's."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rolltap.addons.engine.key import key_refused
from rolltap.addons.errors import EngineError

Ask = Callable[[str, dict[str, Any] | None], Awaitable[tuple[int, dict[str, Any]]]]
"""Gets a path of an engine, or posts a body to it; returns the status and the JSON object."""

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
_WEIGHTS_SECONDS = 5.0
"""Time limit for the name of the weights: vLLM does not answer in time while it loads them."""
_PIECE = 1 << 14
"""Tokens whose text is asked for at once: an answer stays below `client.MOST_BYTES`."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model and the weights of an engine."""

    model: str
    max_model_len: int
    """Context window in tokens."""
    weight_version: str | None
    """Name of the base weights (vLLM's `/weight_info`), None when the engine does not say."""


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

    async def compare(
        self,
        ask: Ask,
        url: str,
        root: str,
        model: str,
    ) -> str | None:
        """Return a warning if an engine's model has another name or folder (`root`), or cannot be
        compared. Raises `WrongModel`."""
        serves = f"the engine at {url} serves {root}"
        for path, body, key, expected in self.questions:
            status, answer = await ask(path, body)
            if status in (404, 501):
                why = f"it has no route {path} ({status})"
                return f"{serves} (as {model}), which was not compared with {self.name}: {why}"
            if key not in answer:
                why = f"the {key}, by which the engine's model is compared with rolltap_model"
                raise _no_vllm(url + path, why, status)
            if answer[key] != expected:
                why = f"whose tokenizer is not that of {self.name}"
                advice = (
                    "give the model that the engine serves (--model, rolltap_model), or start the "
                    f"engine with {self.name}"
                )
                shown = f"the engine at {url} serves another model than the recorder's"
                raise WrongModel(f"{serves}, {why}: {advice}", status=502, for_harness=shown)
        if self.is_named(root, model):
            return None
        rest = "their tokenizers agree; weights and chat templates were not compared"
        return f"{serves} (as {model}), not {self.name}: {rest}"


async def look_up(
    ask: Ask,
    url: str,
    key: str | None,
    own: OwnModel | None,
) -> tuple[Served, str | None]:
    """Return what the engine at `url` serves, and the warning of its comparison with `own`.

    Raises `WrongModel`, and `EngineError` when it does not answer, refuses the key, or is no vLLM.
    """
    status, models = await ask("/v1/models", None)
    advice = key_refused(url, status, key)
    if advice is not None:
        raise EngineError(advice, status=502)
    try:
        bases = [model for model in models["data"] if not model.get("parent")]
        model = str(bases[0]["id"])
        root = str(bases[0].get("root") or model)
        max_model_len = int(bases[0]["max_model_len"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"a model with max_model_len ({type(error).__name__})"
        raise _no_vllm(f"{url}/v1/models", why, status) from error
    warning = None
    if own is not None:
        warning = await own.compare(ask, url, root, model)
    version = None
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_WEIGHTS_SECONDS):
            _, answer = await ask("/weight_info", None)
            version = answer.get("weight_version")
    if not isinstance(version, str):
        version = None
    return Served(model, max_model_len, version), warning


def _no_vllm(what: str, missing: str, status: int) -> EngineError:
    message = f"{what} did not return {missing} (status {status})"
    advice = "check that rolltap_engine is a vLLM server"
    return EngineError(f"{message}: {advice}", status=502, retryable=status >= 500)
