"""vLLM's HTTP API as its operator uses it: what it serves, which endpoints it has, and new weights.

The routes for weights are vLLM's development routes, which ask for no credentials: keep the engine on a private
network.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rolltap.addons.errors import EngineError

T = TypeVar("T")

_HEALTH_SECONDS = 5.0
_GET_SECONDS = 30.0
_POST_SECONDS = 600.0
"""Pausing waits until the calls in flight are complete; reading a large checkpoint or a long prompt takes minutes."""
_CONNECT_SECONDS = 10.0

_REQUIRED_PATHS = {
    "/inference/v1/generate": "token-in/token-out generation",
    "/weight_info": "weight versions",
    "/collective_rpc": "weight updates",
}


@dataclass(frozen=True, slots=True)
class Models:
    """The models of an engine: the base model's name in requests, its folder or full name, its context window in
    tokens, and the names of the LoRA adapters that are loaded."""

    base: str
    root: str
    max_model_len: int
    adapters: frozenset[str]


class EngineAdmin:
    """One vLLM server (0.32 or newer). Every method but `healthy` raises `EngineError`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # vLLM closes a connection after some errors without saying so; the engine is never behind the caller's proxy
        self._client = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)

    def healthy(self) -> bool:
        """Whether the engine answers and can generate."""
        try:
            return self._client.get(f"{self.url}/health", timeout=_HEALTH_SECONDS).status_code == 200
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    def require_endpoints(self) -> None:
        """Raise `EngineError` unless the engine has the endpoints that recording and publishing need."""
        paths = self._ask("GET", "/openapi.json", lambda answer: answer["paths"].keys())
        version = self._ask("GET", "/version", lambda answer: answer["version"])
        missing = [f"{path} ({what})" for path, what in _REQUIRED_PATHS.items() if path not in paths]
        if missing:
            raise EngineError(
                f"vLLM {version} at {self.url} lacks {', '.join(missing)}: rolltap needs vLLM 0.32 or newer, started "
                "by `rolltap serve` or with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"
            )

    def models(self) -> Models:
        """The models that the engine serves."""

        def read(answer: Any) -> Models:
            base = next(card for card in answer["data"] if not card.get("parent"))
            adapters = frozenset(str(card["id"]) for card in answer["data"] if card.get("parent"))
            return Models(str(base["id"]), str(base.get("root") or base["id"]), int(base["max_model_len"]), adapters)

        return self._ask("GET", "/v1/models", read)

    def weight_version(self) -> str:
        """The name of the base model's weights, as vLLM reports it with what it samples."""
        return self._ask("GET", "/weight_info", lambda answer: str(answer["weight_version"]))

    def set_weight_version(self, version: str) -> None:
        """Name the base model's weights, and see that the engine reports the name."""
        self._send("POST", "/update_weight_version", {"new_version": version})
        served = self.weight_version()
        if served != version:
            raise EngineError(f"vLLM says that it serves version {served!r} after {version!r} was published")

    def runs_on_cpu(self) -> bool:
        """Whether vLLM's model attends with its CPU backend, which the model's printed form names."""
        body = {"method": "get_model_inspection"}
        return self._ask("POST", "/collective_rpc", lambda answer: "backend=CPU" in answer["results"][0], body)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No call runs inside the block; new ones wait. The engine is resumed whatever happens."""
        try:
            self._send("POST", "/pause?mode=wait")
            yield
        except BaseException:
            with suppress(EngineError):  # the first error says more
                self._send("POST", "/resume")
            raise
        self._send("POST", "/resume")

    def reload_weights(self, checkpoint: Path) -> None:
        """Read the base model's weights from a folder, which the engine must see under the same path."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self._send("POST", "/collective_rpc", body)

    def reset_prefix_cache(self) -> None:
        """Drop the states that were computed for the prompts so far."""
        if not self._ask("POST", "/reset_prefix_cache", lambda answer: bool(answer["success"])):
            raise EngineError("vLLM kept its prefix cache, which holds states of the old weights: restart it")

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the LoRA adapter in a folder, which the engine must see under the same path, as `name`."""
        self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter."""
        self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def score(self, model: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """The log-probability of each completion token under `model`, at temperature 1."""
        body = {"model": model, "prompt": [*prompt_ids, *completion_ids], "max_tokens": 1, "prompt_logprobs": 0}

        def read(answer: Any) -> list[float]:
            entries = answer["choices"][0]["prompt_logprobs"][len(prompt_ids) :]
            return [entry[str(token)]["logprob"] for entry, token in zip(entries, completion_ids, strict=True)]

        return self._ask("POST", "/v1/completions", read, body)

    def _ask(self, method: str, path: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """The engine's answer, read by `read` from its JSON."""
        response = self._send(method, path, body)
        try:
            return read(response.json())
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            answered = f"{self.url}{path} answers {response.text[:200]!r} ({error!r})"
            raise EngineError(f"{answered}: it is not vLLM 0.32 or newer") from error

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        request = f"{method} {self.url}{path}"
        timeout = httpx.Timeout(_GET_SECONDS if method == "GET" else _POST_SECONDS, connect=_CONNECT_SECONDS)
        try:
            response = self._client.request(method, self.url + path, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise EngineError(f"{request}: no answer from the engine in time ({error!r}); see its log") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            advice = "start it with `rolltap serve`, or see --engine"
            raise EngineError(f"{request}: no engine answers ({error!r}); {advice}") from error
        if not response.is_success:
            raise EngineError(f"{request}: {response.status_code} {response.text[:1000]}; {_advice(path, response)}")
        return response


def _advice(path: str, response: httpx.Response) -> str:
    """Advice for an error."""
    missing = response.status_code == 404
    if missing and '"error"' not in response.text:  # a route that is not there; vLLM's own errors have that key
        if "lora_adapter" in path:
            flags = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            return f"start vLLM with `rolltap serve --lora-rank`, or with {flags}"
        return "is it vLLM? start it with `rolltap serve`, or with VLLM_SERVER_DEV_MODE=1"
    if missing and path == "/v1/completions":
        return "the adapter was unloaded while it was checked: check again"
    if missing and path == "/v1/load_lora_adapter":
        return "the engine must see the publisher's folder under the same path"
    if "out of vocabulary" in response.text:
        return "the engine serves a model with another tokenizer: start it with the model that run.json names"
    if path == "/collective_rpc":
        return "the engine may hold no usable weights now: restart it, its log says why"
    return "see the engine's log"
