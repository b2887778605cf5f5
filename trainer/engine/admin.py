"""Client of vLLM's HTTP API for its operator: models, endpoints, weight updates and scoring.

Weight updates use vLLM's development routes. An engine of `rolltap serve` asks for its key on them;
vLLM's own `--api-key` does not guard them.
"""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rolltap.addons.engine.key import authorization, key_refused, read_key
from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.options import NEUTRAL_SAMPLING, engine_urls
from rolltap.trainer.engine.in_vllm.rolltap_owner import PATH as OWNER
from rolltap.trainer.engine.in_vllm.rolltap_scores import HEADER

if TYPE_CHECKING:
    from rolltap.addons.engine.own_model import OwnModel

T = TypeVar("T")

_HEALTH_SECONDS = 5.0
_GET_SECONDS = 30.0
_POST_SECONDS = 600.0
"""Timeout of a POST. A pause waits for the calls in flight, and loading a large checkpoint takes
minutes."""
_CONNECT_SECONDS = 10.0
_REGISTER_SECONDS = 10.0
"""Timeout of the owner's register, which answers from memory: an ending training must not wait for
a stuck engine."""

_REQUIRED_PATHS = {
    "/inference/v1/generate": "token-in/token-out generation",
    "/weight_info": "weight versions",
    "/collective_rpc": "weight updates",
}


@dataclass(frozen=True, slots=True)
class Models:
    """The models that an engine serves."""

    base: str
    """The base model's name in requests."""
    root: str
    """Folder or full name of the base model."""
    max_model_len: int
    """Context window in tokens."""
    adapters: frozenset[str]
    """Names of the loaded LoRA adapters."""


class Sampled(NamedTuple):
    """Tokens that an engine sampled, and their log-probabilities at temperature 1 in nats, each of
    shape (C,)."""

    ids: list[int]
    logprobs: list[float]


class Load(NamedTuple):
    """The load of an engine: requests that it runs and that wait, the share of its cache that is
    used, and the number of preemptions since its start."""

    running: int
    waiting: int
    cache: float
    preemptions: int


_LOAD = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:kv_cache_usage_perc", "vllm:num_preemptions"),
)
"""Names of vLLM's metrics (`vllm.v1.metrics.loggers`)."""


class EngineAdmin:
    """Client of one vLLM server (0.32 or newer). Every method except `healthy` may raise
    `EngineError`.

    `key_file` holds the engine's key; by default it is the one that `ROLLTAP_ENGINE_KEY_FILE`
    names, if any. Raises `InputError` when the file cannot be read, and for a text that is no URL
    of an engine.
    """

    def __init__(self, url: str, key_file: str | Path | None = None) -> None:
        try:
            engine_urls(url)
        except ValueError as error:
            raise InputError(f"the engine's URL {error}") from None
        self.url = url.rstrip("/")
        self._key = read_key(key_file)
        # No keep-alive: vLLM closes connections after some errors without announcing it. No
        # environment: the engine is reached directly, not through the caller's HTTP proxy.
        self._client = httpx.Client(
            headers=authorization(self._key),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def healthy(self) -> bool:
        """Return True when the engine answers its health check with 200."""
        try:
            return (
                self._client.get(f"{self.url}/health", timeout=_HEALTH_SECONDS).status_code == 200
            )
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    def require_key(self) -> None:
        """Raise `EngineError` when the engine answers requests without a key."""
        try:
            status = httpx.get(
                f"{self.url}/version", timeout=_GET_SECONDS, trust_env=False
            ).status_code
        except httpx.HTTPError as error:
            raise EngineError(
                f"GET {self.url}/version: no engine answers ({error!r}); see its log"
            ) from error
        if status != 401:
            raise EngineError(
                f"vLLM at {self.url} answers without its key: it ignores --middleware"
                " (VLLM_USE_RUST_FRONTEND does)"
            )

    def require_endpoints(self) -> None:
        """Raise `EngineError` when the engine lacks an endpoint that recording or publishing
        needs."""
        paths = self._ask("GET", "/openapi.json", lambda answer: answer["paths"].keys())
        version = self._ask("GET", "/version", lambda answer: answer["version"])
        missing = [
            f"{path} ({what})" for path, what in _REQUIRED_PATHS.items() if path not in paths
        ]
        if missing:
            raise EngineError(
                f"vLLM {version} at {self.url} lacks {', '.join(missing)}: rolltap needs vLLM 0.32"
                " or newer, started by `rolltap serve` or with --enable-scale-out and"
                " VLLM_SERVER_DEV_MODE=1"
            )

    def models(self) -> Models:
        """Return the models that the engine serves."""

        def read(answer: Any) -> Models:
            base = next(card for card in answer["data"] if not card.get("parent"))
            adapters = frozenset(str(card["id"]) for card in answer["data"] if card.get("parent"))
            return Models(
                str(base["id"]),
                str(base.get("root") or base["id"]),
                int(base["max_model_len"]),
                adapters,
            )

        return self._ask("GET", "/v1/models", read)

    def weight_version(self) -> str:
        """Return the version of the base model's weights, which vLLM also reports with sampled
        tokens."""
        return self._ask("GET", "/weight_info", lambda answer: str(answer["weight_version"]))

    def set_weight_version(self, version: str) -> None:
        """Set the version of the base model's weights, and raise `EngineError` unless the engine
        then reports it."""
        self._send("POST", "/update_weight_version", {"new_version": version})
        served = self.weight_version()
        if served != version:
            raise EngineError(
                f"vLLM reports that it serves version {served!r} after {version!r} was published"
            )

    def load(self) -> Load:
        """Return the engine's load, of all its replicas together."""
        text = self._send("GET", "/metrics").text
        try:
            found = {family.name: family for family in text_string_to_metric_families(text)}
            running, waiting, cache, preemptions = (
                [each.value for each in found[name].samples] for name in _LOAD
            )
            return Load(int(sum(running)), int(sum(waiting)), max(cache), int(sum(preemptions)))
        except (KeyError, ValueError) as error:
            raise EngineError(
                f"GET {self.url}/metrics: the engine does not tell its load ({error!r})"
            ) from error

    def runs_on_cpu(self) -> bool:
        """Return True when the printed form of vLLM's model names the CPU attention backend."""
        body = {"method": "get_model_inspection"}
        return self._ask(
            "POST", "/collective_rpc", lambda answer: "backend=CPU" in answer["results"][0], body
        )

    def dtype(self) -> str | None:
        """Return the type in which the engine computes; None when it does not tell, or for one of
        no recipe."""
        response = self._send("GET", "/server_info", expected=(404,))
        found = re.search(r"\bdtype=torch\.(bfloat16|float32)\b", response.text)
        return None if found is None else found[1]

    def require_scores(self) -> None:
        """Raise `EngineError` for an engine that may end when it computes scores beside other
        calls.

        An engine of `rolltap serve` lets them wait for each other (`in_vllm.rolltap_scores`).
        """
        text = self._send("GET", "/server_info?config_format=json", expected=(404,)).text
        takes_adapters = '"lora_config":{' in text.replace(" ", "")
        if takes_adapters and self.register("GET")[0] == 404:
            raise EngineError(
                f"the engine at {self.url} takes LoRA adapters, and vLLM ends when it computes"
                " scores beside other calls then: start it with `rolltap serve`, or without"
                " --enable-lora"
            )

    def require_adapters(self, max_staleness: int, adapters: int) -> None:
        """Raise `EngineError` when the engine has too few places for the adapters of a training:
        see a recipe's keys.

        Sessions with adapters that do not fit into a batch would wait for each other.
        """

        def read(answer: Any) -> tuple[int, int]:
            config = answer["vllm_config"]["lora_config"] or {"max_loras": 0, "max_cpu_loras": 0}
            return int(config["max_loras"]), int(config["max_cpu_loras"])

        batch, memory = self._ask("GET", "/server_info?config_format=json", read)
        if batch < max_staleness + 2 or memory <= adapters:
            has = (
                f"{batch} adapters in a batch (--max-loras) and {memory} in memory"
                " (--max-cpu-loras)"
            )
            asked = f"max_staleness = {max_staleness} and adapters = {adapters}"
            start = f"rolltap serve --lora-rank RANK --max-staleness {max_staleness}"
            raise EngineError(
                f"the engine at {self.url} has places for {has}: {asked} need {max_staleness + 2}"
                f" and {adapters + 1}; start it with `{start}`"
            )

    def require_processed(self) -> None:
        """Raise `EngineError` when the log-probabilities are not those of the sampling
        temperature."""

        def read(answer: Any) -> str:
            return str(answer["vllm_config"]["model_config"]["logprobs_mode"])

        mode = self._ask("GET", "/server_info?config_format=json", read)
        if mode != "processed_logprobs":
            raise EngineError(
                f"the engine at {self.url} reports {mode}, which are those of temperature 1: start"
                " it with `rolltap serve` or --logprobs-mode processed_logprobs, or remove"
                " grpo.temperature"
            )

    def is_paused(self) -> bool:
        """Return True after `pause`, until `resume`."""
        return self._ask("GET", "/is_paused", lambda answer: bool(answer["is_paused"]))

    def pause(self, *, keep: bool = False) -> None:
        """Return when the calls in flight have ended, or with `keep` stand still.

        New calls wait until `resume`. vLLM 0.33 refuses them without `keep` (503): recorders ask
        again, others fail.
        """
        self._send("POST", f"/pause?mode={'keep' if keep else 'wait'}")

    def resume(self) -> None:
        """Let calls go on."""
        self._send("POST", "/resume")

    def serve(self, checkpoint: Path, version: str, *, keep: bool = False) -> None:
        """Pause, load the base model's weights from a folder, name them, and resume; on an error it
        stays paused."""
        self.pause(keep=keep)
        self.install(checkpoint, version)
        self.resume()

    def install(self, checkpoint: Path, version: str) -> None:
        """Load the base model's weights from a folder into the paused engine, and name them."""
        self.reload_weights(checkpoint)
        self.reset_prefix_cache()
        self.set_weight_version(version)

    def register(self, method: str, **asked: Any) -> tuple[int, Any]:
        """Ask the register of the engine's owner (`in_vllm.rolltap_owner`). Return the status and
        the answer.

        The status is 200, 404 when the engine has no register, or 409 when another training owns
        the engine.
        """
        response = self._send(
            method, OWNER, asked or None, expected=(404, 409), seconds=_REGISTER_SECONDS
        )
        try:
            return response.status_code, response.json()
        except ValueError as error:
            raise EngineError(
                f"{self.url}{OWNER} answers {response.text[:200]!r}: it is not vLLM"
            ) from error

    def reload_weights(self, checkpoint: Path) -> None:
        """Load the base model's weights from a folder, which the engine must see under the same
        path."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self._send("POST", "/collective_rpc", body)

    def reset_prefix_cache(self) -> None:
        """Drop the KV cache, which was computed with the old weights. Calls that stand still
        compute theirs again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not self._ask("POST", path, lambda answer: bool(answer["success"])):
            raise EngineError(
                "vLLM kept its prefix cache, which was computed with the old weights: restart it"
            )

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load the LoRA adapter in a folder as `name`. The engine must see the folder under the
        same path."""
        self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""
        self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def sample(self, model: str, prompt_ids: Sequence[int], tokens: int) -> Sampled:
        """Let `model` sample so many tokens after a prompt at temperature 1, also after the end of
        a text.

        In contrast to `score`, it disturbs no other call, and their log-probabilities come from the
        kernels that sample.
        """
        sampling = {**NEUTRAL_SAMPLING, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True}
        body = {"model": model, "token_ids": [*prompt_ids], "sampling_params": sampling}

        def read(answer: Any) -> Sampled:
            choice = answer["choices"][0]
            logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
            sampled = Sampled([int(token) for token in choice["token_ids"]], logprobs)
            if not len(sampled.ids) == len(logprobs) == tokens:
                raise ValueError("not every token has a log-probability")
            return sampled

        return self._ask("POST", "/inference/v1/generate", read, body)

    def score(
        self, model: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> list[float]:
        """Return the natural-log probability of each completion token under `model` at temperature
        1, shape (C,)."""
        entries = self.score_tokens(model, prompt_ids, completion_ids, 0)
        return [entry[token] for entry, token in zip(entries, completion_ids, strict=True)]

    def score_tokens(
        self, model: str, prompt: Sequence[int], sampled: Sequence[int], top: int
    ) -> list[dict[int, float]]:
        """Return for each sampled token a map of ids to log-probabilities: its own, and the `top`
        likeliest.

        An engine that takes adapters has no other call meanwhile: see `in_vllm.rolltap_scores`.
        """
        body = {
            "model": model,
            "prompt": [*prompt, *sampled],
            "max_tokens": 1,
            "prompt_logprobs": top,
        }

        def read(answer: Any) -> list[dict[int, float]]:
            entries = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
            found = [
                {int(token): float(of["logprob"]) for token, of in entry.items()}
                for entry in entries
            ]
            if any(
                token not in entry or len(entry) < top
                for entry, token in zip(found, sampled, strict=True)
            ):
                raise ValueError("a token has no log-probability")
            return found

        return self._ask("POST", "/v1/completions", read, body, headers={HEADER: "1"})

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around them."""
        return self._ask(
            "POST",
            "/tokenize",
            lambda a: list(a["tokens"]),
            {"prompt": text, "add_special_tokens": False},
        )

    def has_tokenizer_of(self, own: "OwnModel") -> bool:
        """Return True if the engine splits a text as `own`, and each of its token ids has the text
        that `own` has."""
        for path, body, key, expected in own.questions:
            if self._ask("POST", path, itemgetter(key), body) != expected:
                return False
        return True

    def _ask(
        self,
        method: str,
        path: str,
        read: Callable[[Any], T],
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> T:
        """Send a request, and return what `read` extracts from the JSON of the response."""
        response = self._send(method, path, body, headers=headers)
        try:
            return read(response.json())
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            answered = f"{self.url}{path} answers {response.text[:200]!r} ({error!r})"
            raise EngineError(f"{answered}: it is not vLLM 0.32 or newer") from error

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        expected: Collection[int] = (),
        seconds: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request. Raises `EngineError` for a status that is neither a success nor
        `expected`."""
        request = f"{method} {self.url}{path}"
        seconds = seconds or (_GET_SECONDS if method == "GET" else _POST_SECONDS)
        timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        try:
            url = self.url + path
            response = self._client.request(
                method, url, json=body, timeout=timeout, headers=headers
            )
        except httpx.TimeoutException as error:
            raise EngineError(
                f"{request}: the engine did not answer in time ({error!r}); see its log"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            advice = "start it with `rolltap serve`, or give its URL (--engine, engine=)"
            advice = (
                "it speaks no TLS: give its URL with http://"
                if "WRONG_VERSION_NUMBER" in str(error)
                else advice
            )
            raise EngineError(f"{request}: no engine answers ({error!r}); {advice}") from error
        if refused := key_refused(self.url, response.status_code, self._key):
            raise EngineError(f"{request}: {refused}")
        if not response.is_success and response.status_code not in expected:
            raise EngineError(
                f"{request}: {response.status_code} {response.text[:1000]};"
                f" {_advice(path, response)}"
            )
        return response


def _advice(path: str, response: httpx.Response) -> str:
    """Return what the user can do about an error response."""
    missing = response.status_code == 404
    if (
        missing and '"error"' not in response.text
    ):  # an unknown route: errors of vLLM's own routes have that key
        if "lora_adapter" in path:
            flags = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            return f"start vLLM with `rolltap serve --lora-rank`, or with {flags}"
        return "is it vLLM? start it with `rolltap serve`, or with VLLM_SERVER_DEV_MODE=1"
    if missing and path == "/v1/completions":
        return "the adapter was unloaded while it was checked: check again"
    if missing and path == "/v1/load_lora_adapter":
        return "the engine must see the publisher's folder under the same path"
    if "max_lora_rank" in response.text:
        return (
            "start the engine with `rolltap serve --lora-rank` of that rank or more, or set a"
            " smaller lora.r"
        )
    if "out of vocabulary" in response.text:
        return (
            "the engine serves a model with another tokenizer: start it with the model that"
            " run.json names"
        )
    return "see the engine's log"


_log = logging.getLogger(__name__)

STOP_SECONDS = 20.0
"""Longest that an interruption waits for the engines. `torchrun` kills after 30 seconds."""


class Unanswered(KeyboardInterrupt):
    """An interruption while engines were asked, which have not answered since."""


def ask_all(engines: Sequence[EngineAdmin], ask: Callable[[EngineAdmin], T]) -> list[T]:
    """Call `ask` with every engine, all at the same time. Return the results in the order of the
    engines.

    Raises one `EngineError` with the messages of all engines that failed, after all calls have
    ended. An interruption waits for that too: otherwise going back would race with a call that is
    still under way. It waits `STOP_SECONDS`, or until the next interruption, and then raises
    `Unanswered`.
    """
    calls: dict[EngineAdmin, Future[T]] = {engine: Future() for engine in engines}
    try:
        for engine, call in calls.items():
            # not of a pool: Python waits for its threads at the end
            Thread(target=_answer, args=(call, ask, engine), daemon=True).start()
        wait(calls.values())
    except KeyboardInterrupt as interruption:
        _log.warning("stopping: waiting for the engines")
        with suppress(KeyboardInterrupt):
            wait(calls.values(), STOP_SECONDS)
        if left := [engine.url for engine, call in calls.items() if not call.done()]:
            advice = "left as it is: the next start of the training restores it"
            _log.warning("the engine at %s has not answered, and is %s", ", ".join(left), advice)
            raise Unanswered from interruption
        raise
    failures = [error for call in calls.values() if (error := call.exception())]
    for failure in failures:
        if not isinstance(failure, EngineError):
            raise failure
    if failures:
        raise EngineError("; ".join(map(str, failures))) from failures[0]
    return [call.result() for call in calls.values()]


def _answer(call: Future[T], ask: Callable[[EngineAdmin], T], engine: EngineAdmin) -> None:
    try:
        call.set_result(ask(engine))
    except BaseException as error:
        call.set_exception(error)
