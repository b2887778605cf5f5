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
from rolltap.trainer.training.step.config import TraceGRPOConfig
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.deep import cases
from tests.trainer.training.step.tiny import tiny_model
from tests.trainer.training.trainings import RECIPE, Training

OLD = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
INIT = torch.cuda.init
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


class Machine:
    """A machine with a GPU and a driver of CUDA 12, where torch is for CUDA 13."""

    def __init__(self, folder, patch):
        self.driver = folder / "version"
        self.driver.write_text(OLD)
        self.device = folder / "dev" / "nvidia0"
        self.device.parent.mkdir()
        self.device.touch()
        self._patch = patch
        self.set(devices, DRIVER=self.driver, DEVICES=self.device.parent)
        self.set(torch.version, cuda="13.0")
        self.set(torch.cuda, init=self._start)
        self.torch_sees(0)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.delenv("LOCAL_RANK", raising=False)

    def set(self, owner, **values):
        for name, value in values.items():
            self._patch.setattr(owner, name, value)

    def set_variables(self, **variables):
        for name, value in variables.items():
            self._patch.setenv(name, value)

    def torch_sees(self, gpus):
        self.set(torch.cuda, is_available=lambda: gpus > 0, device_count=lambda: gpus)

    def refusal(self):
        with pytest.raises(InputError) as refused:
            require_gpu(use_cpu=False)
        return str(refused.value)

    @staticmethod
    def _start():
        raise RuntimeError(TOO_OLD)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_a_driver_that_is_too_old_is_named_with_what_torch_was_built_for(machine):
    said = machine.refusal()
    assert "driver 550.54.15" in said
    assert f"torch {torch.__version__}, built for CUDA 13.0, cannot use it: {TOO_OLD}" in said
    assert "use_cpu = true" in said
    assert "CUDA_VISIBLE_DEVICES" not in said
    require_gpu(use_cpu=True)
    machine.torch_sees(1)
    require_gpu(use_cpu=False)


def test_gpus_that_the_user_has_hidden_are_refused_with_the_variable(machine):
    machine.set_variables(CUDA_VISIBLE_DEVICES="")
    assert "with CUDA_VISIBLE_DEVICES='' torch" in machine.refusal()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_torch_without_cuda_is_refused_where_there_is_a_gpu(machine):
    machine.set(torch.version, cuda=None)
    machine.set(torch.cuda, init=INIT)
    said = "built without CUDA, cannot use it: Torch not compiled with CUDA enabled"
    assert said in machine.refusal()
    machine.device.unlink()  # a container that was given none, and a torch for the CPU
    require_gpu(use_cpu=False)


def test_a_driver_without_a_file_is_found_by_its_program(machine):
    machine.driver.unlink()
    program = machine.driver.with_name("nvidia-smi")
    program.write_text("#!/bin/sh\necho 560.94\n")
    program.chmod(0o755)
    machine.set_variables(PATH=str(program.parent))
    assert "driver 560.94" in machine.refusal()
    program.unlink()
    require_gpu(use_cpu=False)  # no driver, no GPU


def test_one_process_that_sees_several_gpus_is_refused(machine):
    machine.torch_sees(4)
    said = machine.refusal()
    assert "sees 4 GPUs" in said
    assert "CUDA_VISIBLE_DEVICES" in said
    assert "--nproc-per-node 4" in said
    require_gpu(use_cpu=True)
    machine.set_variables(LOCAL_RANK="0")
    require_gpu(use_cpu=False)


def test_a_training_is_refused_before_it_claims_an_engine(machine, tmp_path, monkeypatch):
    training = Training(tmp_path)
    assert "driver 550.54.15" in str(training.here(monkeypatch).exception)
    assert training.owners() == []
    training.recipe(f"{RECIPE}use_cpu = true\n")
    assert training.here(monkeypatch).exit_code == 0


def test_a_trainer_in_python_is_refused_too(machine, tmp_path):
    rows = Dataset.from_dict({"task_id": ["a"]})
    args = TraceGRPOConfig(output_dir=str(tmp_path), max_steps=1)
    with pytest.raises(InputError, match=r"driver 550\.54\.15"):
        TraceGRPOTrainer(tiny_model(), args, rows, trace_source=list, groups_per_step=1)


VARIABLES = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
JOINED = """
import torch
from rolltap.trainer.training.loop import join_processes
join_processes(None)
assert not torch.cuda.is_initialized()
print(f"settings: {torch._C._accelerator_getAllocatorSettings()}\\n", end="", flush=True)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def settings(folder, *launcher, **variables) -> list[str]:
    """Return what torch's memory of each process is set to when CUDA may start."""
    script = folder / "settings.py"
    script.write_text(JOINED)
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    ended = subprocess.run(
        [sys.executable, *launcher, script],
        env=environment | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [line.removeprefix("settings: ") for line in ended.stdout.splitlines()]


def test_the_memory_of_a_process_grows_in_place_when_it_joins_the_others(tmp_path):
    assert settings(tmp_path) == ["expandable_segments:True"]


@pytest.mark.deep  # short, the test above
def test_the_memory_of_every_process_grows_in_place(tmp_path):
    assert settings(tmp_path, *TORCHRUN) == ["expandable_segments:True"] * 2


@pytest.mark.parametrize("variable", cases(VARIABLES))
def test_memory_is_as_the_user_has_set_it(tmp_path, variable):
    mine = "max_split_size_mb:64"
    assert settings(tmp_path, **{variable: mine}) == [mine]
