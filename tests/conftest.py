"""The real parts that tests share. What is not installed is skipped by name; tests/run.sh installs all of it."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolltap.trainer.engine.serve import EngineServer
from tests.scripted_engine import ScriptedEngine

CONTEXT = 65536
"""Tokens; the first prompt of some harnesses has 30,000."""
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the quickstart's model, made on first use."""
    folder = ROOT / "runs" / "quickstart" / "model"
    subprocess.run([sys.executable, ROOT / "recipes" / "quickstart" / "make_model.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


class RunningEngine:
    """A real vLLM server and the model that it serves."""

    def __init__(self, url: str, model_dir: Path) -> None:
        self.url = url
        self.model_dir = model_dir


@contextmanager
def real_engine(model_dir, log):
    """A vLLM server of `model_dir`, or a skipped test."""
    vllm = os.environ.get("ROLLTAP_VLLM", "vllm")
    if shutil.which(vllm) is None:
        pytest.skip(f"vLLM is not installed ({vllm}): tests/run.sh installs it, or set ROLLTAP_VLLM")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = EngineServer(str(model_dir), vllm=vllm, port=port, max_model_len=CONTEXT, lora_rank=8, log=log)
    server.start()
    with server:
        yield RunningEngine(server.url, model_dir)


@pytest.fixture(scope="session")
def engine(tiny_model, tmp_path_factory):
    """A real vLLM server with the tiny model, LoRA loading on. Tests that publish must restore its weights."""
    with real_engine(tiny_model, tmp_path_factory.mktemp("vllm") / "vllm.log") as engine:
        yield engine


@pytest.fixture
def scripted_engine(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        yield engine
