"""The GPUs of this machine, before a training uses them."""

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from rolltap.addons.errors import InputError

DRIVER = Path("/proc/driver/nvidia/version")
"""File of the NVIDIA driver with its version. Containers have it too, but WSL does not."""
DEVICES = Path("/dev")
_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_SMI_SECONDS = 30.0


def require_gpu(use_cpu: bool) -> None:
    """Raise `InputError` on a machine with a GPU that torch cannot use, unless the CPU is asked
    for.

    The error has the versions of the driver and of torch, and the reason that torch gives. A
    process without a launcher that sees several GPUs is refused too: transformers would train on
    all of them with `DataParallel`, which TRL does not support.
    """
    if use_cpu:
        return
    if torch.cuda.is_available():
        visible = torch.cuda.device_count()
        if visible > 1 and "LOCAL_RANK" not in os.environ:
            raise InputError(
                f"a training process uses one GPU, and this one sees {visible} GPUs: set "
                "CUDA_VISIBLE_DEVICES to one that no engine uses, or train on several with "
                f"`torchrun --standalone --nproc-per-node {visible} -m rolltap train ...`"
            )
        return
    driver = _driver_version()
    built = "without CUDA"
    has_device = any(DEVICES.glob("nvidia[0-9]*"))
    if torch.version.cuda is not None:
        built = f"for CUDA {torch.version.cuda}"
        has_device = True  # WSL has no files of devices
    if driver is None or not has_device:
        return
    why = "it finds none"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = str(error)
    given = ""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        given = f"with CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} "
    raise InputError(
        f"this machine has an NVIDIA GPU with driver {driver}, and {given}torch "
        f"{torch.__version__}, built {built}, cannot use it: {why} To train on the CPU, set "
        "use_cpu = true in [grpo]"
    )


def _driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    said = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        if DRIVER.is_file():
            said = DRIVER.read_text()
        else:
            smi = subprocess.run(_SMI, stdout=subprocess.PIPE, text=True, timeout=_SMI_SECONDS)
            said = smi.stdout
    version = re.search(r"\d+\.\d+[.\d]*", said)
    if version is None:
        return None
    return version[0]


def use_expandable_segments() -> None:
    """Let the memory of tensors grow in place, unless torch's variables say otherwise.

    Batches have another size each: memory would be cut into pieces. Call it before CUDA starts.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
