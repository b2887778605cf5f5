"""Client of vLLM's HTTP API for its operator: models, endpoints, weight updates and scoring.

Weight updates use vLLM's development routes. An engine of `rolltap serve` asks for its key on them;
vLLM's own `--api-key` does not guard them.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rolltap.addons.engine.key import authorization, key_refused, read_key
from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.options import NEUTRAL_SAMPLING, engine_urls
from rolltap.trainer.engine.in_vllm.rolltap_owner import PATH as OWNER
from rolltap.trainer.engine.in_vllm.rolltap_scores import HEADER

if TYPE_CHECKING:
    from rolltap.addons.engine.own_model import OwnModel

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
_CONFIG = "/server_info?config_format=json"


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
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
)
"""Names of vLLM's metrics (`vllm.v1.metrics.loggers`), in the order of `Load`."""


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
            response = self._client.get(f"{self.url}/health", timeout=_HEALTH_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
        return response.status_code == 200

    def require_key(self) -> None:
        """Raise `EngineError` when the engine answers requests without a key."""
        url = f"{self.url}/version"
        try:
            response = httpx.get(url, timeout=_GET_SECONDS, trust_env=False)
        except httpx.HTTPError as error:
            raise EngineError(f"GET {url}: no engine answers ({error!r}); see its log") from error
        if response.status_code != 401:
            raise EngineError(
                f"vLLM at {self.url} answers without its key: it ignores --middleware"
                " (VLLM_USE_RUST_FRONTEND does)"
            )

    def require_endpoints(self) -> None:
        """Raise `EngineError` when the engine lacks an endpoint that recording or publishing
        needs."""
        with self._answer("GET", "/openapi.json") as answer:
            paths = answer["paths"].keys()
        with self._answer("GET", "/version") as answer:
            version = answer["version"]
        missing = []
        for path, what in _REQUIRED_PATHS.items():
            if path not in paths:
                missing.append(f"{path} ({what})")
        if missing:
            raise EngineError(
                f"vLLM {version} at {self.url} lacks {', '.join(missing)}: rolltap needs vLLM 0.32"
                " or newer, started by `rolltap serve` or with --enable-scale-out and"
                " VLLM_SERVER_DEV_MODE=1"
            )

    def models(self) -> Models:
        """Return the models that the engine serves."""
        with self._answer("GET", "/v1/models") as answer:
            base = next(card for card in answer["data"] if not card.get("parent"))
            adapters = [str(card["id"]) for card in answer["data"] if card.get("parent")]
            return Models(
                base=str(base["id"]),
                root=str(base.get("root") or base["id"]),
                max_model_len=int(base["max_model_len"]),
                adapters=frozenset(adapters),
            )

    def weight_version(self) -> str:
        """Return the version of the base model's weights, which vLLM also reports with sampled
        tokens."""
        with self._answer("GET", "/weight_info") as answer:
            return str(answer["weight_version"])

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
        values: dict[str, list[float]] = {}
        try:
            for family in text_string_to_metric_families(text):
                values[family.name] = [sample.value for sample in family.samples]
            running, waiting, cache, preemptions = (values[name] for name in _LOAD)
            return Load(
                running=int(sum(running)),
                waiting=int(sum(waiting)),
                cache=max(cache),
                preemptions=int(sum(preemptions)),
            )
        except (KeyError, ValueError) as error:
            raise EngineError(
                f"GET {self.url}/metrics: the engine does not tell its load ({error!r})"
            ) from error

    def runs_on_cpu(self) -> bool:
        """Return True when the printed form of vLLM's model names the CPU attention backend."""
        body = {"method": "get_model_inspection"}
        with self._answer("POST", "/collective_rpc", body) as answer:
            return "backend=CPU" in answer["results"][0]

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
        text = self._send("GET", _CONFIG, expected=(404,)).text
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
        batch = memory = 0
        with self._answer("GET", _CONFIG) as answer:
            config = answer["vllm_config"]["lora_config"]
            if config:
                batch = int(config["max_loras"])
                memory = int(config["max_cpu_loras"])
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
        with self._answer("GET", _CONFIG) as answer:
            mode = answer["vllm_config"]["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise EngineError(
                f"the engine at {self.url} reports {mode}, which are those of temperature 1: start"
                " it with `rolltap serve` or --logprobs-mode processed_logprobs, or remove"
                " grpo.temperature"
            )

    def is_paused(self) -> bool:
        """Return True after `pause`, until `resume`."""
        with self._answer("GET", "/is_paused") as answer:
            return bool(answer["is_paused"])

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
        with self._answer("POST", "/reset_prefix_cache?reset_running_requests=true") as answer:
            is_empty = bool(answer["success"])
        if not is_empty:
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
        sampling = {
            **NEUTRAL_SAMPLING,
            "max_tokens": tokens,
            "logprobs": 0,
            "ignore_eos": True,
        }
        body = {"model": model, "token_ids": list(prompt_ids), "sampling_params": sampling}
        with self._answer("POST", "/inference/v1/generate", body) as answer:
            choice = answer["choices"][0]
            logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
            ids = [int(token) for token in choice["token_ids"]]
            if not len(ids) == len(logprobs) == tokens:
                raise ValueError("not every token has a log-probability")
            return Sampled(ids, logprobs)

    def score(
        self, model: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> list[float]:
        """Return the natural-log probability of each completion token under `model` at temperature
        1, shape (C,)."""
        entries = self.score_tokens(model, prompt_ids, completion_ids, 0)
        return [entry[token] for entry, token in zip(entries, completion_ids, strict=True)]

    def score_tokens(
        self,
        model: str,
        prompt: Sequence[int],
        sampled: Sequence[int],
        top: int,
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
        found = []
        with self._answer("POST", "/v1/completions", body, headers={HEADER: "1"}) as answer:
            entries = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
            for token, entry in zip(sampled, entries, strict=True):
                logprobs = {int(each): float(of["logprob"]) for each, of in entry.items()}
                if token not in logprobs or len(logprobs) < top:
                    raise ValueError("a token has no log-probability")
                found.append(logprobs)
        return found

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around them."""
        body = {"prompt": text, "add_special_tokens": False}
        with self._answer("POST", "/tokenize", body) as answer:
            return list(answer["tokens"])

    def has_tokenizer_of(self, own: "OwnModel") -> bool:
        """Return True if the engine splits a text as `own`, and each of its token ids has the text
        that `own` has."""
        for path, body, key, expected in own.questions:
            with self._answer("POST", path, body) as answer:
                is_same = answer[key] == expected
            if not is_same:
                return False
        return True

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Iterator[Any]:
        """Send a request, and yield the JSON of the response to a block that reads it.

        Raises `EngineError` when the block does not find what it looks for.
        """
        response = self._send(method, path, body, headers=headers)
        try:
            yield response.json()
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
        if seconds is None:
            seconds = _GET_SECONDS if method == "GET" else _POST_SECONDS
        try:
            response = self._client.request(
                method,
                self.url + path,
                json=body,
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=_CONNECT_SECONDS),
            )
        except httpx.TimeoutException as error:
            raise EngineError(
                f"{request}: the engine did not answer in time ({error!r}); see its log"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            advice = "start it with `rolltap serve`, or give its URL (--engine, engine=)"
            if "WRONG_VERSION_NUMBER" in str(error):
                advice = "it speaks no TLS: give its URL with http://"
            raise EngineError(f"{request}: no engine answers ({error!r}); {advice}") from error
        refused = key_refused(self.url, response.status_code, self._key)
        if refused:
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
    has_route = '"error"' in response.text  # errors of vLLM's own routes have that key
    if missing and not has_route:
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
