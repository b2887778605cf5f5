"""A training on a machine with a GPU: it does not fall to the CPU, and its memory grows in
place."""

import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset

from rolltap.addons.errors import InputError
from rolltap.trainer.models import devices
from rolltap.trainer.models.devices import require_gpu
from rolltap.trainer.training import loop
from rolltap.trainer.training.step.config import TraceGRPOConfig
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.deep import cases
from tests.trainer.training.step.tiny import tiny_model
from tests.trainer.training.trainings import RECIPE, Training

OLD = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine with a GPU and a driver of CUDA 12, where torch is for CUDA 13. Returns its
    /dev."""
    (tmp_path / "version").write_text(OLD)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()

    def start():
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(devices, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(devices, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", start)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "dev"


def refusal() -> str:
    with pytest.raises(InputError) as refused:
        require_gpu(use_cpu=False)
    return str(refused.value)


def test_a_driver_that_is_too_old_is_named_with_what_torch_was_built_for(gpu):
    said = refusal()
    assert "driver 550.54.15" in said
    assert f"torch {torch.__version__}, built for CUDA 13.0, cannot use it: {TOO_OLD}" in said
    assert "use_cpu = true" in said
    assert "CUDA_VISIBLE_DEVICES" not in said


def test_gpus_that_the_user_has_hidden_are_refused_with_the_variable(gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "with CUDA_VISIBLE_DEVICES='' torch" in refusal()


def test_torch_without_cuda_is_refused_where_there_is_a_gpu(gpu, monkeypatch):
    monkeypatch.undo()
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    monkeypatch.setattr(devices, "DRIVER", gpu.parent / "version")
    monkeypatch.setattr(devices, "DEVICES", gpu)
    assert "built without CUDA, cannot use it: Torch not compiled with CUDA enabled" in refusal()
    (gpu / "nvidia0").unlink()  # a container that was given none, and a torch for the CPU
    require_gpu(use_cpu=False)


def test_a_driver_without_a_file_is_found_by_its_program(gpu, monkeypatch):
    devices.DRIVER.unlink()
    program = gpu.parent / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 560.94\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(gpu.parent))
    assert "driver 560.94" in refusal()
    program.unlink()
    require_gpu(use_cpu=False)  # no driver, no GPU


def test_a_gpu_that_torch_uses_and_a_training_on_the_cpu_are_left_alone(gpu, monkeypatch):
    require_gpu(use_cpu=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_gpu(use_cpu=False)


def test_one_process_that_sees_several_gpus_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    said = refusal()
    assert "sees 4 GPUs" in said
    assert "CUDA_VISIBLE_DEVICES" in said
    assert "--nproc-per-node 4" in said
    require_gpu(use_cpu=True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    require_gpu(use_cpu=False)


def test_a_training_is_refused_before_it_claims_an_engine(gpu, tmp_path, monkeypatch):
    training = Training(tmp_path)
    assert "driver 550.54.15" in str(training.here(monkeypatch).exception)
    assert training.owners() == []
    training.recipe(f"{RECIPE}use_cpu = true\n")
    assert training.here(monkeypatch).exit_code == 0


def test_a_trainer_in_python_is_refused_too(gpu, tmp_path):
    rows = Dataset.from_dict({"task_id": ["a"]})
    args = TraceGRPOConfig(output_dir=str(tmp_path), max_steps=1)
    with pytest.raises(InputError, match=r"driver 550\.54\.15"):
        TraceGRPOTrainer(tiny_model(), args, rows, trace_source=list, groups_per_step=1)


VARIABLES = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
SETTINGS = """
import torch
from rolltap.trainer.models.devices import use_expandable_segments
use_expandable_segments()
assert not torch.cuda.is_initialized()
print(f"settings: {torch._C._accelerator_getAllocatorSettings()}\\n", end="", flush=True)
"""
JOINED = SETTINGS.replace(
    "models.devices import use_expandable_segments\nuse_expandable_segments()",
    "training.loop import join_processes\njoin_processes(None)",
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def settings(folder, program, *launcher, **variables) -> list[str]:
    """Return what torch's memory of each process is set to when CUDA may start."""
    script = folder / "settings.py"
    script.write_text(program)
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    ended = subprocess.run(
        [sys.executable, *launcher, script],
        env=environment | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [line.removeprefix("settings: ") for line in ended.stdout.splitlines()]


def test_the_memory_of_a_process_grows_in_place_when_it_joins_the_others(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(loop, "use_expandable_segments", lambda: called.append("first"))
    monkeypatch.setattr(loop, "on_main", lambda function: called.append("joined"))
    loop.join_processes(None)
    assert called == ["first", "joined"]
    assert settings(tmp_path, SETTINGS) == ["expandable_segments:True"]


@pytest.mark.deep  # short, the test above
def test_the_memory_of_every_process_grows_in_place(tmp_path):
    assert settings(tmp_path, JOINED, *TORCHRUN) == ["expandable_segments:True"] * 2


@pytest.mark.parametrize("variable", cases(VARIABLES))
def test_memory_is_as_the_user_has_set_it(tmp_path, variable):
    mine = "max_split_size_mb:64"
    assert settings(tmp_path, SETTINGS, **{variable: mine}) == [mine]
