"""Publication by a transfer between GPUs, over NCCL, with vLLM's own trainer side. No weights are written to disk.

The engines need `--weight-transfer-config '{"backend": "nccl"}'`.
"""

import importlib
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from rolltap.addons.errors import InputError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines, Weights
from rolltap.trainer.engine.weights import OTHER_BASE, Agrees, base_version, write_policy
from rolltap.trainer.models.loading import stored_weights
from rolltap.trainer.models.merging import MergedWeights
from rolltap.trainer.models.saving import NamedWeights

BASE_MODULE = "vllm.distributed.weight_transfer.base"
NCCL_MODULE = "vllm.distributed.weight_transfer.nccl_engine"


def require_transfer() -> None:
    """Raise `InputError` when this process has no GPU, or its environment no vLLM."""
    missing = [] if find_spec("vllm") else ["vLLM in the trainer's environment"]
    missing += [] if torch.cuda.is_available() else ["a CUDA GPU for the trainer"]
    if missing:
        raise InputError(f'publish = "nccl" needs {" and ".join(missing)}: or set publish = "checkpoint" or "lora"')


class TransferPublisher:
    """Broadcasts the weights from this process's GPU to all workers of all engines, which are paused meanwhile.

    When a transfer fails, the engines load the model in `base` again: nobody keeps a copy of the weights before it. An
    adapter is merged on the way, and those in the engines are unloaded. The constructor raises as `require_transfer`.
    """

    def __init__(self, engines: Engines, *, run: Path, base: Path) -> None:
        require_transfer()
        self._engines, self._run, self._base = engines, run, base
        self._source = _Source()
        self._sender: Any = None

    def publish(self, model: PreTrainedModel | PeftModel, version: str, agrees: Agrees) -> None:
        """See `Publisher.publish`."""
        self._engines.require_owned()
        self._source.weights = NamedWeights(MergedWeights(model), stored_weights(self._base))
        try:
            if self._sender is None:
                self._sender = self._connect()
            with self._engines.changed(Weights(self._base, base_version(version))) as change:
                self._engines.pause()
                self._engines.each(change)
                self._sender.send_weights()
                self._engines.each(EngineAdmin.reset_prefix_cache)
                self._engines.each(lambda engine: engine.set_weight_version(version))
                self._engines.resume()
                agrees(None)
                write_policy(self._run, None, version)
        finally:
            self._source.weights = None
        self._engines.unload(lambda _: True, OTHER_BASE)

    def _connect(self) -> Any:
        """Return vLLM's sender, once all workers have joined its NCCL group."""
        nccl = importlib.import_module(NCCL_MODULE)
        workers = self._engines.each(EngineAdmin.world_size)
        address = reachable_address([engine.url for engine in self._engines.admins])
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        info = nccl.NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=1 + sum(workers), rank=0)
        client = _Client(self._engines, workers)
        return nccl.NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=self._source)


def reachable_address(urls: Sequence[str]) -> str:
    """Return an address of this machine that all engines reach: loopback only when all of them are on it."""
    addresses = []
    for url in urls:
        host, family = urlsplit(url).hostname or "", socket.AF_INET6 if "[" in url else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((host, 9))  # sends nothing
            addresses.append(str(route.getsockname()[0]))
    return next((address for address in addresses if address not in ("127.0.0.1", "::1")), addresses[0])


class _Source:
    """A `WeightSource` of vLLM: what is sent. The sender reads `weights` again for each transfer."""

    weights: NamedWeights | None = None

    def metadata(self) -> list[Any]:
        meta = importlib.import_module(BASE_MODULE).ParamMeta
        return [meta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        weights = self.weights
        return iter(()) if weights is None else ((name, weights.on_device(name)) for name in weights)


class _Client:
    """A `VLLMWeightSyncClient` of vLLM for several engines. vLLM's own client is for one, and sends no key."""

    def __init__(self, engines: Engines, workers: Sequence[int]) -> None:
        self._engines = engines
        first = [1 + sum(workers[:index]) for index in range(len(workers))]  # rank 0 is the trainer
        self._first = dict(zip(engines.admins, first, strict=True))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def join(engine: EngineAdmin) -> None:
            engine.transfer("init_weight_transfer_engine", init_info={**init_info, "rank_offset": self._first[engine]})

        self._engines.each(join)

    def start_weight_update(self) -> None:
        self._engines.each(lambda engine: engine.transfer("start_weight_update"))

    def update_weights(self, update_info: Any) -> None:
        self._engines.each(lambda engine: engine.transfer("update_weights", update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engines.each(lambda engine: engine.transfer("finish_weight_update"))
