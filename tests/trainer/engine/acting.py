"""A server that acts as vLLM does when weights are published: it pauses, loads folders, and may
refuse a step."""

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


def agreed(name: str | None) -> None:
    """Stand in for the comparison of the engines with the trainer: they agree."""


def trainer(logprobs: Sequence[float]) -> Score:
    """Return a trainer that scores sampled tokens as `Acting` does that has these
    log-probabilities."""

    def score(ids: Sequence[int]) -> list[float]:
        assert list(ids[:-COMPARED]) == IDS
        return [0.0] * (len(IDS) - 1) + list(islice(cycle(logprobs), COMPARED))

    return score


class Acting(Answering):
    """`refuses` are the paths that answer 500, and `scores` the log-probabilities by name of a
    folder or adapter."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.scores: dict[str, Sequence[float]] = {root.name: BASE}
        self.refuses: dict[str, int] = {}
        """Path -> how often it is still refused; -1 is always."""
        self.start()
        routes = [
            "/pause",
            "/resume",
            "/is_paused",
            "/weight_info",
            "/update_weight_version",
            "/collective_rpc",
        ]
        routes += [
            "/reset_prefix_cache",
            "/v1/models",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ]
        routes += ["/v1/completions", "/inference/v1/generate", "/tokenize", PATH]
        self.answers = HEALTHY | {path: self.route(path) for path in routes}

    def start(self) -> None:
        """Forget everything, as an engine does that is started again."""
        self.paused, self.version, self.weights = False, "default", self.root.name
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
        if path == PATH:
            status = self.register._answer(method, json.dumps(body).encode())
            return (
                status,
                json.dumps(
                    {
                        "owner": self.register._owner,
                        "about": self.register._about,
                        "base": self.register._base,
                    }
                ),
            )
        if path == "/pause":
            self.paused = True
        if path == "/resume":
            assert self.weights, "an engine without weights crashes"
            self.paused = False
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            assert self.paused, "weights change only between calls"
            self.weights = ""
            folder = Path(body["kwargs"]["weights_path"])
            if not (folder / "config.json").exists():
                return (500, "no such folder")
            self.weights = folder.name
        if path == "/collective_rpc" and body["method"] == "get_model_inspection":
            return {"results": ["backend=FLASH"]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/v1/load_lora_adapter":
            if not Path(body["lora_path"]).is_dir():
                return UNKNOWN
            self.adapters[body["lora_name"]] = body["lora_path"]
        if path == "/v1/unload_lora_adapter" and self.adapters.pop(body["lora_name"], None) is None:
            return UNKNOWN
        if path == "/v1/models":
            base = {"id": "tiny", "root": str(self.root), "parent": None, "max_model_len": 99}
            return {
                "data": [
                    base,
                    *({"id": name, "root": "", "parent": "tiny"} for name in self.adapters),
                ]
            }
        if path == "/tokenize":
            return {"tokens": IDS}
        if path in ("/v1/completions", "/inference/v1/generate"):
            assert not self.paused, "a call waits until the engine is resumed"
            scores = self.scores[self.weights if body["model"] == "tiny" else body["model"]]
        if path == "/inference/v1/generate":
            entries = [
                {"logprob": each}
                for each in islice(cycle(scores), body["sampling_params"]["max_tokens"])
            ]
            ids = [5 + i % 3 for i in range(len(entries))]
            return {"choices": [{"token_ids": ids, "logprobs": {"content": entries}}]}
        if path == "/v1/completions":
            entries = zip(
                body["prompt"][1:], islice(cycle(scores), len(body["prompt"]) - 1), strict=True
            )
            return {
                "choices": [
                    {"prompt_logprobs": [None, *({str(t): {"logprob": lp}} for t, lp in entries)]}
                ]
            }
        return {"is_paused": self.paused, "weight_version": self.version, "success": True}

    @property
    def paths(self) -> list[str]:
        """The paths that were asked, in order, without their queries."""
        return [path.partition("?")[0] for path, _ in self.requests]


def acting(root: Path) -> AbstractContextManager[Acting]:
    """Run an `Acting` that was started with the model in `root`."""
    return serving(Acting(root))
