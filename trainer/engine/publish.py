"""New weights into a running vLLM over HTTP: as a checkpoint that it reloads, or as a LoRA adapter that it adds.

The engine reads the weights from disk: it must see the publisher's folder under the same path. The routes for
checkpoints are vLLM's development routes, which ask for no credentials: keep the engine on a private network.
"""

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.errors import UserError

TIMEOUT = httpx.Timeout(600, connect=10)
"""Seconds. Pausing waits until the calls in flight are complete, and reading a large checkpoint takes minutes."""


class PublishError(UserError):
    """The engine does not serve the new weights; the message says what it answered and what to do."""


class Publisher(Protocol):
    """Brings a model's weights into the engine."""

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """Returns when every call that starts from now on is sampled by `model`, under the name `version`.

        `model` is the unwrapped model with whole parameters; call it on the main process only. Raises `PublishError`.
        """


class CheckpointPublisher:
    """Saves the whole model and has the engine reload it; an adapter is merged into the saved copy.

    The engine finishes the calls in flight first, and holds new ones back, so that no call mixes versions. `folder`
    holds the newest checkpoint, which is a complete model when `processing_class` is given.
    """

    def __init__(
        self, engine_url: str, folder: Path, run: Path, processing_class: PreTrainedTokenizerBase | None = None
    ) -> None:
        self._engine = _Engine(engine_url)
        self._folder = folder.absolute()
        self._run = run
        self._processing_class = processing_class
        self._previous: Path | None = None

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """See `Publisher.publish`. A failure after the engine began to reload leaves it without a usable model."""
        if model.config.tie_word_embeddings and self._engine.runs_on_cpu():
            raise PublishError(
                "the model ties its input and output embeddings, and vLLM on CPU keeps the old output embeddings on a "
                "reload: untie them before the engine is started (tie_word_embeddings=false and a saved lm_head), or "
                "publish LoRA adapters"
            )
        checkpoint = self._folder / f"policy-{version}"
        _save(checkpoint, lambda folder: self._write(model, folder))
        # a reload that fails leaves vLLM 0.32 without weights, and the next call ends it
        if not (checkpoint / "config.json").is_file() or not any(checkpoint.glob("*.safetensors")):
            raise PublishError(
                f"{checkpoint} is not a checkpoint: it needs config.json and *.safetensors; the engine was not touched"
            )
        with self._engine.paused():
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
            self._engine.post("/collective_rpc", reload)
            if not self._engine.post("/reset_prefix_cache").json()["success"]:
                raise PublishError("vLLM kept its prefix cache, which holds states of the old weights: restart it")
            self._engine.post("/update_weight_version", {"new_version": version})
            served = self._engine.get("/weight_info").json()["weight_version"]
            if served != version:
                raise PublishError(f"vLLM says that it serves version {served!r} after {version!r} was published")
        _write_policy(self._run, None, version)
        if self._previous not in (None, checkpoint):
            shutil.rmtree(self._previous)
        self._previous = checkpoint

    def _write(self, model: PreTrainedModel | PeftModel, folder: Path) -> None:
        # a copy, because merge_adapter and unmerge_adapter leave rounding errors in the weights that are trained
        whole = copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model
        whole.save_pretrained(folder)
        if self._processing_class is not None:
            self._processing_class.save_pretrained(folder)


class LoraPublisher:
    """Saves the adapter and adds it to the engine under a name of its own, `policy-<version>`.

    Nothing waits: a call keeps the adapter that it started with. The newest two stay loaded, so the engine needs
    `--max-cpu-loras` 3 or more.
    """

    def __init__(self, engine_url: str, folder: Path, run: Path) -> None:
        self._engine = _Engine(engine_url)
        self._folder = folder.absolute()
        self._run = run
        self._kept: list[tuple[str, Path]] = []

    def publish(self, model: PreTrainedModel | PeftModel, version: str) -> None:
        """See `Publisher.publish`."""
        if not isinstance(model, PeftModel):
            raise PublishError("the model has no LoRA adapter: train with a peft_config, or publish checkpoints")
        name = f"policy-{version}"
        # vLLM's prefix cache knows an adapter by name and path, and a resumed run publishes a version again
        adapter = self._folder / f"{name}-{time.time_ns():x}"
        _save(adapter, lambda folder: model.save_pretrained(folder, save_embedding_layers=False))
        loaded = {served["id"] for served in self._engine.get("/v1/models").json()["data"]}
        if name in loaded:
            self._engine.post("/v1/unload_lora_adapter", {"lora_name": name})
        self._engine.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter)})
        _write_policy(self._run, name, version)

        self._kept.append((name, adapter))
        dropped, self._kept = self._kept[:-2], self._kept[-2:]
        for old in loaded - {name for name, _ in self._kept}:
            if old.startswith("policy-"):
                self._engine.post("/v1/unload_lora_adapter", {"lora_name": old})
        for _, folder in dropped:
            shutil.rmtree(folder)


class _Engine:
    """vLLM's HTTP API; every failure is a `PublishError`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # vLLM closes the connection after some errors without saying so, and is never behind the recorder's proxy
        self._client = httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)

    def get(self, path: str) -> httpx.Response:
        """The answer to a GET."""
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The answer to a POST of JSON."""
        return self._send("POST", path, body)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No call runs inside the block; new ones wait. The engine is resumed whatever happens."""
        try:
            self.post("/pause?mode=wait")
            yield
        except BaseException:
            with suppress(PublishError):  # the first error says more
                self.post("/resume")
            raise
        self.post("/resume")

    def runs_on_cpu(self) -> bool:
        """Whether vLLM's model attends with its CPU backend, which the model's printed form names."""
        model = self.post("/collective_rpc", {"method": "get_model_inspection"}).json()["results"][0]
        return "backend=CPU" in model

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        request = f"{method} {self._url}{path}"
        try:
            response = self._client.request(method, self._url + path, json=body)
        except httpx.TimeoutException as error:
            raise PublishError(f"{request}: no answer from the engine in time ({error!r}); see its log") from error
        except httpx.HTTPError as error:
            raise PublishError(f"{request}: no engine answers ({error!r}); is vLLM running there?") from error
        if response.is_error:
            raise PublishError(f"{request}: {response.status_code} {response.text[:1000]}; {_advice(path, response)}")
        return response


def _advice(path: str, response: httpx.Response) -> str:
    no_route = response.status_code == 404 and response.text == '{"detail":"Not Found"}'
    if no_route and "lora_adapter" in path:
        return "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    if no_route:
        return "start vLLM with VLLM_SERVER_DEV_MODE=1"
    if response.status_code == 404:
        return "the engine must see the publisher's folder under the same path"
    if path == "/collective_rpc":
        return "the engine may hold no usable weights now: restart it, its log says why"
    return "see the engine's log"


def _save(target: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder that appears as `target`, in the place of an older one, when it is complete."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise PublishError(f"{target} could not be written: {error}; the engine was not touched") from error


def _write_policy(run: Path, model: str | None, version: str) -> None:
    """Tell the recorder which weights are the policy now, and under which model name the engine serves them."""
    write_atomically(run / POLICY_FILE, json.dumps({"model": model, "version": version}) + "\n")
