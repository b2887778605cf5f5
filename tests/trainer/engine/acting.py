"""A server that acts as vLLM does when weights are published: it pauses, loads folders, and may
refuse a step."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rolltap.trainer.engine.in_vllm.rolltap_owner import PATH, OneOwner
from rolltap.trainer.engine.weights import COMPARED, Score
from tests.trainer.engine.answering import HEALTHY, Answering, serving

BASE = [-1.0, -2.0, -3.0]
"""Log-probabilities by the weights of the folder that it was started with. Those of sampled tokens
begin again and again."""
IDS = [7, 8, 9, 10]
UNKNOWN = (404, '{"error":{"message":"cannot be found","type":"NotFoundError"}}')
ROUTES = (
    "/pause",
    "/resume",
    "/is_paused",
    "/weight_info",
    "/update_weight_version",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/v1/models",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/completions",
    "/inference/v1/generate",
    "/tokenize",
    PATH,
)


def agreed(name: str | None) -> None:
    """Stand in for the comparison of the engines with the trainer: they agree."""


def trainer(logprobs: Sequence[float]) -> Score:
    """Return a trainer that scores sampled tokens as `Acting` does that has these
    log-probabilities."""

    def score(ids: Sequence[int]) -> list[float]:
        assert list(ids[:-COMPARED]) == IDS
        return [0.0] * (len(IDS) - 1) + list(islice(cycle(logprobs), COMPARED))

    return score


def ask_register(register: OneOwner, method: str, body: bytes = b"") -> tuple[int, Any]:
    """Return the status and the answer to a request whose body arrives in two parts."""
    parts = [{"body": body[:3], "more_body": True}, {"body": body[3:]}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(register({"type": "http", "path": PATH, "method": method}, receive, send))
    start, end = sent
    return start["status"], json.loads(end["body"])


class Acting(Answering):
    """`refuses` are the paths that answer 500, and `scores` the log-probabilities by name of a
    folder or adapter."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.scores: dict[str, Sequence[float]] = {root.name: BASE}
        self.refuses: dict[str | None, int] = {}
        """Path -> how often it is still refused; -1 is always."""
        self.start()
        self.answers = HEALTHY | {path: self.route(path) for path in ROUTES}

    def start(self) -> None:
        """Forget everything, as an engine does that is started again."""
        self.paused = False
        self.version = "default"
        self.weights = self.root.name
        self.adapters: dict[str, str] = {}
        self.register = OneOwner(None)

    def route(self, path: str) -> Any:
        def answer(method: str, body: Any) -> Any:
            if left := self.refuses.get(path, 0):
                self.refuses[path] = left - 1
                return (500, '{"error": "refused"}')
            return self.act(path, method, body or {})

        return answer

    def act(self, path: str, method: str, body: dict[str, Any]) -> Any:
        state = {"is_paused": self.paused, "weight_version": self.version, "success": True}
        match path:
            case "/pause":
                self.paused = True
            case "/resume":
                assert self.weights, "an engine without weights crashes"
                self.paused = False
            case "/collective_rpc" if body["method"] == "reload_weights":
                return self.reload(Path(body["kwargs"]["weights_path"]))
            case "/collective_rpc":
                return {"results": ["backend=FLASH"]}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/v1/load_lora_adapter":
                if not Path(body["lora_path"]).is_dir():
                    return UNKNOWN
                self.adapters[body["lora_name"]] = body["lora_path"]
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    return UNKNOWN
            case "/v1/models":
                cards = [{"id": "tiny", "root": str(self.root), "parent": None}]
                cards += [{"id": name, "root": "", "parent": "tiny"} for name in self.adapters]
                cards[0]["max_model_len"] = 99
                return {"data": cards}
            case "/tokenize":
                return {"tokens": IDS}
            case "/v1/completions" | "/inference/v1/generate":
                return self.compute(body)
            case _ if path == PATH:
                status, answer = ask_register(self.register, method, json.dumps(body).encode())
                return (status, json.dumps(answer))
        return state

    def reload(self, folder: Path) -> Any:
        assert self.paused, "weights change only between calls"
        self.weights = ""
        if not (folder / "config.json").exists():
            return (500, "no such folder")
        self.weights = folder.name
        return {"results": [None]}

    def compute(self, body: dict[str, Any]) -> Any:
        assert not self.paused, "a call waits until the engine is resumed"
        name = self.weights if body["model"] == "tiny" else body["model"]
        logprobs = cycle(self.scores[name])
        if "prompt" in body:
            entries: list[Any] = [None]
            for token in body["prompt"][1:]:
                entries.append({str(token): {"logprob": next(logprobs)}})
            return {"choices": [{"prompt_logprobs": entries}]}
        number = body["sampling_params"]["max_tokens"]
        ids = [5 + i % 3 for i in range(number)]
        content = [{"logprob": next(logprobs)} for _ in ids]
        return {"choices": [{"token_ids": ids, "logprobs": {"content": content}}]}

    @property
    def served(self) -> tuple[str, str, bool]:
        """The folder of the weights, their version, and whether it is paused."""
        return self.weights, self.version, self.paused

    @property
    def owner(self) -> str | None:
        _, answer = ask_register(self.register, "GET")
        owner: str | None = answer["owner"]
        return owner

    @property
    def paths(self) -> list[str]:
        """The paths that were asked, in order, without their queries."""
        return [path.partition("?")[0] for path, _ in self.requests]


def acting(root: Path) -> AbstractContextManager[Acting]:
    """Run an `Acting` that was started with the model in `root`."""
    return serving(Acting(root))
