"""A process in which a CPU build of torch has tensors on "cuda:0": with a shape and a type, without
data.

    python -m tests.trainer.training.step.fake_cuda LIBRARY

The library is that of `build`. torch must be imported after it is loaded. The process runs
`cuda_cases.CASES` and prints a JSON object: case -> the traceback of its error, or None.
"""

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

TORCH = Path(importlib.util.find_spec("torch").origin).parent
SOURCE = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """Return the library, which takes five seconds. Raises `RuntimeError` without a compiler."""
    if shutil.which("g++") is None:
        raise RuntimeError("there is no g++: apt-get install build-essential")
    library = folder / "fake_cuda.so"
    headers = ["-I", TORCH / "include"]
    libraries = ["-L", TORCH / "lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]
    command = ["g++", "-shared", "-fPIC", "-std=c++20", *headers, SOURCE, "-o", library, *libraries]
    subprocess.run(command, check=True)
    return library


def run(library: str) -> dict[str, str | None]:
    """Return the errors of all cases."""
    # as `import torch` begins
    ctypes.CDLL(str(TORCH / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch

    from tests.trainer.training.step.cuda_cases import CASES

    with (
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda: True),
        patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        # tensors without data cannot be pinned
        patch.object(torch.Tensor, "pin_memory", lambda self: self),
    ):
        return {name: _error(case) for name, case in CASES.items()}


def _error(case: Callable[[], None]) -> str | None:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])), flush=True)
    # torch's thread for the device may be running, and would abort the end of the process
    os._exit(0)
