"""The lines about the machine.

check.sh prints them before it installs anything, so they need nothing but Python.

python3 recipes/gpu/machine.py [--cpu]

The exit status is 1 when a line failed.
"""

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lines import Line, at_least, fact, failed

ROOT = Path(__file__).resolve().parents[2]
DRIVER = 580
"""First NVIDIA driver for CUDA 13, which PyPI's torch is built for."""
COMPILER = "apt-get install build-essential python3-dev: Triton compiles its launchers with them"


@dataclass(frozen=True)
class Gpu:
    """A GPU, as nvidia-smi names it."""

    index: str
    name: str
    memory_mib: float
    driver: str


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine; none without a driver."""
    columns = "index,name,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = csv.reader(printed.splitlines(), skipinitialspace=True)
    return [Gpu(index, name, float(memory), driver) for index, name, memory, driver in rows]


def visible(found: list[Gpu]) -> list[str]:
    """Return the GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    return [gpu.index for gpu in found]


def machine_lines(cpu: bool) -> Iterator[Line]:
    """Yield the lines: driver, GPUs, compilers, disk. With `cpu` nothing is required."""
    found = gpus()
    if found:
        yield from _of_gpus(found)
    elif cpu:
        yield fact("machine: GPUs", 0)
    else:
        why = f"nvidia-smi shows no GPU: install NVIDIA's driver, {DRIVER} or newer"
        yield failed("machine: driver", why)
    nvcc = shutil.which("nvcc")
    yield fact("machine: nvcc", note=nvcc or "none; it is needed for nothing here")
    yield from _of_compiler(required=not cpu)
    yield fact("machine: GB free on the disk", shutil.disk_usage(ROOT).free / 1e9)
    shared = Path("/dev/shm")
    if shared.is_dir():
        note = "weights are published through it where they fit"
        yield fact("machine: GiB free in /dev/shm", shutil.disk_usage(shared).free / 2**30, note)


def _of_gpus(found: list[Gpu]) -> Iterator[Line]:
    driver = found[0].driver
    major = float(driver.partition(".")[0])
    note = driver
    if major < DRIVER:
        note += f": torch for CUDA 13 would see no GPU: install the driver {DRIVER} or newer"
    yield at_least("machine: driver", major, DRIVER, note)
    for gpu in found:
        yield fact(f"machine: GiB of GPU {gpu.index}", gpu.memory_mib / 1024, gpu.name)
    yield fact(
        "machine: GPUs that are used",
        len(visible(found)[:2]),
        "one, or two for the checks of several",
    )


def _of_compiler(*, required: bool) -> Iterator[Line]:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    for what, there in (("C compiler", compiler), ("Python headers", header.exists() and header)):
        if there:
            yield fact(f"machine: {what}", note=str(there))
        elif required:
            yield failed(f"machine: {what}", COMPILER)
        else:
            yield fact(f"machine: {what}", note="none; a GPU needs them")


def main() -> None:
    """Print the lines."""
    status = 0
    for line in machine_lines("--cpu" in sys.argv):
        columns = [column for column in line.cells() if column]
        print("  ".join(columns))
        if line.result == "failed":
            status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
