"""The branch of CUDA, by tensors without data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.training.step import fake_cuda
from tests.trainer.training.step.cuda_cases import CASES

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, str | None]:
    if torch.version.cuda:
        pytest.skip("torch is its build for CUDA: recipes/gpu/check.sh runs its kernels on a GPU")
    try:
        library = fake_cuda.build(tmp_path_factory.mktemp("library"))
    except RuntimeError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-W", "ignore", "-m", fake_cuda.__name__, library]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_pack_runs_on_cuda_and_gives_each_trained_parameter_its_gradient(case, errors):
    assert errors[case] is None, errors[case]
