"""The real parts that tests share. What is not installed is skipped by name; tests/run.sh installs all of it."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rolltap.trainer.engine.serve import EngineServer
from tests.scripted_engine import ScriptedEngine

CONTEXT = 65536
"""Tokens; the first prompt of some harnesses has 30,000."""
ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A folder with the tokenizer of the quickstart's model and nothing else: all that a recorder needs."""
    sys.path.insert(0, str(QUICKSTART))
    try:
        import words
    finally:
        sys.path.remove(str(QUICKSTART))
    folder = tmp_path_factory.mktemp("tokenizer")
    words.make_tokenizer(words.filler_text()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the quickstart's model, which takes a minute to teach on first use."""
    folder = ROOT / "runs" / "quickstart" / "model"
    subprocess.run([sys.executable, QUICKSTART / "make_model.py", folder], check=True)
    return folder


class RunningEngine:
    """A real vLLM server and the model that it serves."""

    def __init__(self, url: str, model_dir: Path) -> None:
        self.url = url
        self.model_dir = model_dir


@pytest.fixture(scope="session")
def engine(tiny_model, tmp_path_factory) -> Iterator[RunningEngine]:
    """A real vLLM server with the tiny model, LoRA loading on. Tests that publish must restore its weights."""
    vllm = os.environ.get("ROLLTAP_VLLM", "vllm")
    if shutil.which(vllm) is None:
        pytest.skip(f"vLLM is not installed ({vllm}): tests/run.sh installs it, or set ROLLTAP_VLLM")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    server = EngineServer(str(tiny_model), vllm=vllm, port=port, max_model_len=CONTEXT, lora_rank=8, log=log)
    with server:
        yield RunningEngine(server.url, tiny_model)


@pytest.fixture
def scripted_engine(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        yield engine
