"""Sharded weights (FSDP2): each process keeps a part of every decoder layer, and has a layer whole while it runs.

Embeddings, the last norm and the head stay whole, because the head runs outside of the model's own forward pass, and so
do adapters, which are small. All processes must run the layers equally often (`forward.decoder.idle`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rolltap.addons.errors import InputError
from rolltap.trainer.training.forward.decoder import unwrapped
from rolltap.trainer.training.grpo.ranks import is_main, send_weights, several

Gather = Callable[[Sequence[str]], list[Tensor]]
"""Returns weights, by name, whole and in the type of the model, on the main process only. Collective."""


def shard(model: Any, device: torch.device, gathered: Counter[str]) -> Gather | None:
    """Shard the decoder layers of a model or of the `PeftModel` around it, and move it to `device`. Collective.

    All processes get the layers of rank 0. Trained weights of 16 bits become float32, and are gathered in their own
    type. One layer is whole on the device at a time. `gathered` counts the bytes that a process receives. The result
    gathers weights; it is None with one process, which has all. Raises `InputError` for a model of unknown layers.
    """
    if not several():
        return None
    inner = unwrapped(model)
    body = inner.get_decoder()
    if not (layers := layers_of(body)):
        raise InputError(f'sharding="full" does not know the layers of {type(body).__name__}: set it to "optimizer"')
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    dtype, size = inner.get_input_embeddings().weight.dtype, 0
    inner.enable_input_require_grads()  # each layer then has a backward pass, whatever of it is trained
    for layer in layers:
        layer.to(device)
        send_weights((weight, 0) for weight in layer.parameters())
        adapters = {weight for weight in layer.parameters() if weight.requires_grad and isinstance(model, PeftModel)}
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        for weight in set(layer.parameters()) - adapters:
            size += weight.nbytes
            if weight.requires_grad and weight.itemsize < torch.float32.itemsize:
                weight.data = weight.data.float()
                policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=adapters)
        layer.set_reduce_scatter_unused_params(True)  # of experts that no token of a process has chosen
    unsharded = {weight for weight in body.parameters() if not isinstance(weight, DTensor)}
    fully_shard(body, mesh=mesh, ignored_params=unsharded)
    model.to(device)
    size = size * (mesh.size() - 1) // mesh.size()
    # the backward pass gathers again
    body.register_forward_pre_hook(lambda *_: gathered.update(bytes=size * (1 + torch.is_grad_enabled())))

    def gather(names: Sequence[str]) -> list[Tensor]:
        whole = (inner.get_parameter(name).detach().to(dtype).full_tensor() for name in names)
        return [weight for weight in whole if is_main()]

    return gather


def layers_of(body: Any) -> list[Any]:
    """Return the layers of a decoder."""
    return [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
