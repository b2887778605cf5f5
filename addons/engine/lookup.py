"""The model that an engine serves: asked at first contact and in use, and compared with the recorder's by tokens."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rolltap.addons.engine import connections
from rolltap.addons.engine.connections import Connections, Shared
from rolltap.addons.engine.key import key_refused
from rolltap.addons.errors import EngineError

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""Seconds after which an engine that is in use is asked again what it serves: another one may have its URL by then."""
TEXT = (
    "The quick brown fox jumps over 13 lazy dogs, 2026-11-22 at 10:58; internationalisation isn't antidisestablish"
    "mentarianism.\n\tdef f(x):\n        return {'a': x ** 2, \"b\": [1, 22, 333, 4444]}  # naïve café\n\n"
    "Größe, Ελληνικά, русский, עברית, 日本語, 中文分词, 한국어, 👩‍💻 → ∑∫√\r\n    "
    "<|endoftext|><|im_start|>user<|im_end|><think></think><tool_call></tool_call><tool_response></tool_response><|begin_of_text|><|eot_id|><bos><start_of_turn>[INST]</s>"
)
"""The text whose tokens are compared: words, numbers, code, scripts, and the special tokens of common models. A model
that is a later version of another one often has its vocabulary and more special tokens."""


_PIECE = 1 << 14
"""Tokens whose text is asked for at once: an answer stays below `connections.MOST_BYTES`."""


class WrongModel(EngineError):
    """The engine serves a model with another tokenizer than the recorder's."""


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The recorder's model: its name or folder, and the questions that compare an engine's tokenizer with its own.

    A question is a path, a body, the key of the answer, and the right answer.
    """

    name: str
    questions: list[tuple[str, dict[str, Any], str, Any]]

    @classmethod
    def of(cls, name: str, tokenizer: Any) -> Self:
        """Return the model of a name or folder.

        The tokens of a text show how it is split. The texts of all tokens show that none has the place of another one.
        A model may have more ids than its tokenizer has tokens: they are not compared.
        """
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        questions = [("/tokenize", {"prompt": TEXT, "add_special_tokens": False}, "tokens", ids)]
        vocabulary = sorted(set(tokenizer.get_vocab().values()))
        for start in range(0, len(vocabulary), _PIECE):
            piece = vocabulary[start : start + _PIECE]
            questions.append(("/detokenize", {"tokens": piece}, "prompt", tokenizer.decode(piece)))
        return cls(name, questions)

    def wrong(self, url: str, served: str) -> WrongModel:
        """Return the error of the engine at `url`, which serves the model `served`."""
        return WrongModel(
            f"the engine at {url} serves {served}, whose tokenizer is not that of {self.name}: give the model that "
            f"the engine serves (--model, rolltap_model), or start the engine with {self.name}",
            status=502,
            for_harness=f"the engine at {url} serves another model than the recorder's",
        )

    def is_named(self, *names: str) -> bool:
        """Return True when one of the names or folders, as the engine has them, is the recorder's model."""
        own = Path(self.name).resolve()
        return any(name == self.name or (Path(name).is_dir() and Path(name).resolve() == own) for name in names)


@dataclass(frozen=True, slots=True)
class Served:
    """The model that an engine serves."""

    max_model_len: int
    """Its context window in tokens."""
    weight_version: str | None
    """Name of its base weights (vLLM's `/weight_info`), None when it does not say."""


class Lookup:
    """Asks an engine what it serves and, if `own` is given, compares that with it."""

    def __init__(self, asking: Connections, key: str | None, own: OwnModel | None) -> None:
        self.url, self._ask = asking.url, asking.ask
        self._key, self._own = key, own
        self._served: Served | None = None
        self._asked_at = 0.0
        self._forgotten = 0
        self.model = ""
        """Name of the served model, empty before the first answer."""
        self.warning: str | None = None
        """Difference to `own` that the last answer showed and that refuses nothing."""
        self._lookup = Shared(self._look_up)
        self.close = self._lookup.close

    async def served(self) -> Served:
        """Return what the engine serves. Cached for `AGAIN_SECONDS`.

        An engine that has answered before and now does not is taken to serve the same. Raises `WrongModel`, and
        `EngineError` when it does not answer and is not healthy, refuses the key, or its answer is not vLLM's.
        """
        clock = asyncio.get_running_loop().time
        while self._served is None or clock() - self._asked_at > AGAIN_SECONDS:
            try:
                await self._lookup()
            except WrongModel:
                raise
            except EngineError:
                if self._served is None:
                    raise
                self._asked_at = clock()  # a request finds out whether the engine is down
            if self._served is not None:
                break
        return self._served

    def forget(self) -> None:
        """Ask again, because another server may answer from now on. An answer that is under way is not kept."""
        self._served = None
        self._forgotten += 1

    async def _look_up(self) -> None:
        forgotten = self._forgotten
        status, models = await self._ask("/v1/models")
        if advice := key_refused(self.url, status, self._key):
            raise EngineError(advice, status=502)
        try:
            base = next(m for m in models["data"] if not m.get("parent"))
            model, max_model_len = str(base["id"]), int(base["max_model_len"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, StopIteration) as error:
            what = f"a model with max_model_len (status {status}, {type(error).__name__})"
            raise self._no_vllm("/v1/models", what, status) from error
        warning = await self._compare(self._own, str(base.get("root") or model), model) if self._own else None
        if warning and warning != self.warning:
            logger.warning("%s", warning)
        self.model, self.warning = model, warning
        served = Served(max_model_len, await self._weight_version())
        if forgotten == self._forgotten:
            self._served, self._asked_at = served, asyncio.get_running_loop().time()

    async def _compare(self, own: OwnModel, root: str, model: str) -> str | None:
        """Return a warning if the engine's model has another name, or folder (`root`), or cannot be compared."""
        serves = f"the engine at {self.url} serves {root} (as {model})"
        for path, body, key, expected in own.questions:
            status, answer = await self._ask(path, body)
            if status in (404, 501):
                return f"{serves}, which was not compared with {own.name}: it has no route {path} ({status})"
            if key not in answer:
                what = f"the {key} (status {status}), by which the engine's model is compared with rolltap_model"
                raise self._no_vllm(path, what, status)
            if answer[key] != expected:
                raise own.wrong(self.url, root)
        if own.is_named(root, model):
            return None
        return f"{serves}, not {own.name}: their tokenizers agree; weights and chat templates were not compared"

    def _no_vllm(self, path: str, what: str, status: int) -> EngineError:
        message = f"{self.url}{path} did not return {what}: check that rolltap_engine is a vLLM server"
        return EngineError(message, status=502, retryable=status >= 500)

    async def _weight_version(self) -> str | None:
        """Return the name of the base weights, or None: vLLM does not answer in time while it loads weights."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(connections.HEALTH_SECONDS):
                _, answer = await self._ask("/weight_info")
            return version if isinstance(version := answer.get("weight_version"), str) else None
        return None
