"""The weights of one engine: does it serve those of the trainer, and by which names?

They agree when the trainer scores tokens as the engine did that sampled them, after a fixed text.
An engine that does not serve the base weights of a training loads them again. Published weights
have names, folders, and a policy file that tells the recorder of them.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.errors import EngineError, RunError
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.engine.admin import EngineAdmin, Sampled
from rolltap.trainer.names import Version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes a second to import

FIXED_TEXT = """\
The lighthouse keeper wrote down the weather every morning at six: the direction of the wind, the
height of the waves, and how far he could see across the bay. On clear days he counted 14 islands;
in fog he counted none. "A number that nobody checks", he used to say, "is only a wish." So each
evening his daughter climbed the 212 steps, looked at the same sea, and wrote a second column beside
his. When the two columns agreed they drank tea. When they did not, they went outside together and
looked again, because one of them had to be wrong, and the sea never was.

def agree(first: list[float], second: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(first, second)) < 0.001
"""
"""English prose, quoted speech, numbers and a line of code: 150 to 250 tokens of today's
tokenizers."""

COMPARED = 64
"""Tokens that an engine samples after the fixed text. Fewer tokens than these say nothing about an
engine."""
LIMITS: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "bfloat16": 0.1})
"""Type of the weights -> largest mean difference in nats that is agreement. Provisional: tiny
models on CPU were below 1e-4 in float32 and below 2e-3 in bfloat16. On GPUs 0.011 was reported for
Qwen3-4B in bfloat16."""


def expected_limit(limit: float, measured: float) -> float:
    """Return the mean difference in nats that rounding explains, and at most `limit`, the one that
    ends a training.

    `measured` is the difference of the base model. A difference depends on the text: three times as
    much is expected, and a tenth of `limit` in any case.
    """
    return min(limit, max(limit / 10, 3 * measured))


def fixed_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the token ids of the fixed text, without special tokens."""
    return list(tokenizer.encode(FIXED_TEXT, add_special_tokens=False))


def mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the mean absolute difference of two equally long rows of log-probabilities, in nats.

    It is infinite when a number is not finite, so that no comparison takes it for agreement. Raises
    `ValueError` for rows that are empty or differ in length.
    """
    if not first:
        raise ValueError("there is nothing to compare")
    mean = fmean(abs(a - b) for a, b in zip(first, second, strict=True))
    if not isfinite(mean):
        return inf
    return mean


LOADED = "default"
"""The version that vLLM reports for the weights that it loaded when it started."""


def is_base(version: str) -> bool:
    """Return True for a version of base weights, those that the engine started with or a training
    loaded again."""
    parsed = Version.parse(version)
    return version == LOADED or (parsed is not None and parsed.step == 0)


_DESCRIPTIVE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of a model's config.json that do not change which weights fit."""


@dataclass(frozen=True, slots=True)
class Base:
    """The base model, and how the trainer scores a fixed text by it."""

    model: Path
    """Folder of the base model."""
    version: str
    """Version of weights that are loaded from the folder: `<run>.0.<attempt>`."""
    ids: Sequence[int]
    """The fixed text's token ids."""
    score: "Score"
    """The trainer with the base model."""
    limit: float
    """Largest mean difference in nats that is agreement."""

    def names(self, version: str) -> bool:
        """Return True when a version that an engine reports is that of base weights, as far as a
        name tells."""
        served = Version.parse(version)
        own = Version.parse(self.version)
        if served is None or own is None:
            return version == LOADED
        return served.run == own.run and served.step == 0


Score = Callable[[Sequence[int]], Sequence[float]]
"""The trainer: token ids, shape (T,), -> its log-probabilities of `ids[1:]`, shape (T - 1,), at
temperature 1 in nats."""


def difference(ids: Sequence[int], sampled: Sampled, score: Score) -> float:
    """Return the mean difference of an engine's log-probabilities from the trainer's, in nats.

    The tokens `sampled` came after `ids`.
    """
    own = score([*ids, *sampled.ids])
    return mean_difference(own[-len(sampled.ids) :], sampled.logprobs)


def find_doubt(engine: EngineAdmin, base: Base) -> str | None:
    """Return why an engine cannot serve the base model as it is, by its state; None if its tokens
    can tell."""
    if engine.is_paused():
        return "is paused, as a killed training leaves it"
    version = engine.weight_version()
    if base.names(version):
        return None
    return f"serves the published weights {version}"


def load_base(engine: EngineAdmin, base: Base, why: str) -> None:
    """Let an engine load the base model again. Raises `EngineError` where its own model may be
    another one."""
    root = engine.models().root
    names = [root]
    status, noted = engine.register("GET")
    if status == 200 and noted.get("base") is not None:
        names.append(noted["base"])  # the folder as which a training has verified it
    if not any(_same_model(name, base.model) for name in names):
        raise EngineError(
            f"the engine at {engine.url} {why}, and cannot load {base.model}: its own model is"
            f" {root}, and there is no sign here that it is the same; start it again with `rolltap"
            f" serve {base.model}`"
        )
    engine.serve(base.model, base.version)


def still_differs(engine: EngineAdmin, nats: float, base: Base) -> str:
    """Return the message about an engine that has loaded the base model, and does not agree with
    the trainer."""
    return (
        f"the engine at {engine.url} (model {engine.models().root}, weights"
        f" {engine.weight_version()}) has loaded {base.model}, and still differs from the trainer"
        f" by {nats:.2g} nats (limit {base.limit:g}): is its --dtype the recipe's, and the"
        f" folder the same on both sides? Then start it again with `rolltap serve {base.model}`, or"
        " raise max_difference"
    )


def _same_model(root: str, model: Path) -> bool:
    """Return True when an engine's model has the shape of a folder's: loading other shapes destroys
    the engine."""
    if same_folder(root, str(model)):
        return True
    config = _config(model)
    return config is not None and config == _config(Path(root))


def same_folder(first: str, second: str) -> bool:
    """Return True for two names of one model, each of which is a folder or a name on the Hub."""
    return first == second or Path(first).resolve() == Path(second).resolve()


def _config(folder: Path) -> dict[str, Any] | None:
    """Return what decides the shapes of a model; None for a folder that cannot be read here."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return {key: value for key, value in config.items() if key not in _DESCRIPTIVE}
    except (OSError, ValueError, AttributeError):
        return None


Agrees = Callable[[str | None], None]
"""Compares what the engines serve with the trainer. The argument is the model's name in them, None
for the base."""
OTHER_BASE = "it was made for other weights of the base model"


def published_name(version: str) -> str:
    """Return the name of published weights: of their folder, and of an adapter in the engines."""
    return f"policy-{version}"


def published_version(name: str) -> Version | None:
    """Return the version of an adapter that a training published, by its name in the engines; None
    for other names."""
    prefix = published_name("")
    if not name.startswith(prefix):
        return None
    return Version.parse(name.removeprefix(prefix))


def names_of_run(version: str) -> str:
    """Return how the names of all weights begin that the training of a version publishes."""
    return published_name(version.partition(".")[0]) + "."


def base_version(version: str) -> str:
    """Return the version of base weights in the attempt that publishes a version."""
    parsed = Version.parse(version)
    if parsed is None:
        return LOADED
    return str(Version(parsed.run, 0, parsed.attempt))


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder to write to. It replaces `target` when the block ends. Raises
    `RunError` for an `OSError` of the block too."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise RunError(
            f"{target} could not be written: {error}; the engines are unchanged"
        ) from error


def keep_only(folder: Path, version: str, kept: Collection[Path]) -> None:
    """Remove other weights of a version's training: older ones, and those that a killed training
    left there."""
    names = names_of_run(version)
    for path in [*folder.glob(f"{names}*"), *folder.glob(f".{names}*")]:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def write_policy(run: Path, model: str | None, version: str) -> None:
    """Write the policy file for the recorder; `model` is None for the base model. Raises
    `RunError`."""
    path = run / POLICY_FILE
    policy = json.dumps({"model": model, "version": version})
    try:
        write_atomically(path, f"{policy}\n")
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error}; the policy is the previous one"
        ) from error
