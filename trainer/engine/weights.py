"""The weights of one engine: does it serve those of the trainer, and whose are they?

They agree when the trainer scores tokens as the engine did that sampled them, after a fixed text.
The owner of an engine is the training that publishes weights to it; the engine keeps it in a
register (`in_vllm.rolltap_owner`), which ends with the engine, as the published weights do. An
engine that does not serve the base weights of a training loads them again. Published weights have
names, folders, and a policy file that tells the recorder of them.
"""

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

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
    return mean if isfinite(mean) else float("inf")


class Owner(NamedTuple):
    """A training. `run` is its id, which its restarts share. `about` says where it runs, for
    people."""

    run: str
    about: str


class StolenError(EngineError):
    """Another training owns the engine."""


def claim(engine: EngineAdmin, owner: Owner, *, steal: bool = False) -> bool:
    """Take an engine for a training, from any other one only with `steal`.

    Returns False for a vLLM that `rolltap serve` did not start: it knows no owner. Raises
    `StolenError`, which names the present owner, and `EngineError`.
    """
    status, answer = engine.register("PUT", owner=owner.run, about=owner.about, steal=steal)
    if status == 409:
        raise StolenError(
            f"another training owns the engine at {engine.url}: {answer['owner']}"
            f" ({answer['about']}). Wait until it has ended; if it was killed, take the engine from"
            " it (--steal, steal=True)"
        )
    return status == 200


def release(engine: EngineAdmin, owner: Owner) -> None:
    """Give an engine back, if the training still owns it. Raises `EngineError`."""
    engine.register("DELETE", owner=owner.run)


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
        served, own = Version.parse(version), Version.parse(self.version)
        if served is None or own is None:
            return version == LOADED
        return (served.run, served.step) == (own.run, 0)


Score = Callable[[Sequence[int]], Sequence[float]]
"""The trainer: token ids, shape (T,), -> its log-probabilities of `ids[1:]`, shape (T - 1,), at
temperature 1 in nats."""


def difference(ids: Sequence[int], sampled: Sampled, score: Score) -> float:
    """Return the mean difference of an engine's log-probabilities from the trainer's, in nats.

    The tokens `sampled` came after `ids`.
    """
    own = score([*ids, *sampled.ids])
    return mean_difference(own[-len(sampled.ids) :], sampled.logprobs)


def doubts(engine: EngineAdmin, base: Base) -> str | None:
    """Return why an engine cannot serve the base model as it is, by its state; None if its tokens
    can tell."""
    if engine.is_paused():
        return "is paused, as a killed training leaves it"
    version = engine.weight_version()
    return None if base.names(version) else f"serves the published weights {version}"


def load_base(engine: EngineAdmin, base: Base, why: str) -> None:
    """Let an engine load the base model again. Raises `EngineError` where its own model may be
    another one."""
    root = engine.models().root
    status, noted = engine.register("GET")
    own = (
        root,
        noted.get("base") if status == 200 else None,
    )  # or the folder as which a training has verified it
    if not any(_same_model(name, base.model) for name in own):
        raise EngineError(
            f"the engine at {engine.url} {why}, and cannot load {base.model}: its own model is"
            f" {root}, and there is no sign here that it is the same; start it again with `rolltap"
            f" serve {base.model}`"
        )
    engine.serve(base.model, base.version)


def differs_still(engine: EngineAdmin, differs: float, base: Base) -> str:
    """Return the message about an engine that has loaded the base model, and does not agree with
    the trainer."""
    return (
        f"the engine at {engine.url} (model {engine.models().root}, weights"
        f" {engine.weight_version()}) has loaded {base.model}, and still differs from the trainer"
        f" by {differs:.2g} nats (limit {base.limit:g}): is its --dtype the recipe's, and the"
        f" folder the same on both sides? Then start it again with `rolltap serve {base.model}`, or"
        " raise max_difference"
    )


def _same_model(root: str | None, model: Path) -> bool:
    """Return True when an engine's model has the shape of a folder's: loading other shapes destroys
    the engine."""
    return root is not None and (
        same_folder(root, str(model)) or _config(Path(root)) == _config(model) is not None
    )


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
    return (
        Version.parse(name.removeprefix(prefix))
        if name.startswith(prefix := published_name(""))
        else None
    )


def names_of_run(version: str) -> str:
    """Return how the names of all weights begin that the training of a version publishes."""
    return published_name(version.partition(".")[0]) + "."


def base_version(version: str) -> str:
    """Return the version of base weights in the attempt that publishes a version."""
    parsed = Version.parse(version)
    return LOADED if parsed is None else str(Version(parsed.run, 0, parsed.attempt))


def save(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a hidden folder, then rename it to `target`. Raises `RunError`."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
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
    try:
        write_atomically(run / POLICY_FILE, json.dumps({"model": model, "version": version}) + "\n")
    except OSError as error:
        raise RunError(
            f"{run / POLICY_FILE} could not be written: {error}; the policy is the previous one"
        ) from error
