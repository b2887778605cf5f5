"""The real parts that tests share. A part that is not installed skips its tests by name;
tests/run.sh installs them."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rolltap.trainer.engine.serve import EngineServer
from tests import deep
from tests.boxes import docker_daemon
from tests.recorder_process import Recorder
from tests.scripted_engine import ScriptedEngine

CONTEXT = 65536
"""Context window in tokens. The first prompt of some harnesses has 30,000."""
ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart"


def pytest_configure(config):
    """Give `datasets`, which test modules import later, a cache of the tests' own. Downloaded
    models stay in theirs."""
    cache = tempfile.TemporaryDirectory(prefix="rolltap-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["HF_DATASETS_CACHE"] = cache.name
    # else it warns when its AsyncGRPOTrainer is imported
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def pytest_collection_modifyitems(config, items):
    if not deep.DEEP:
        left_out = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """Return a folder with only the tokenizer of the quickstart's model. A recorder needs no
    more."""
    sys.path.insert(0, str(QUICKSTART))
    try:
        import words
    finally:
        sys.path.remove(str(QUICKSTART))
    folder = tmp_path_factory.mktemp("tokenizer")
    words.make_tokenizer(words.filler_text()).save_pretrained(folder)
    return folder


def on_a_small_disk(size: str, folder: str | Path) -> list[str] | None:
    """Return the prefix of a command line, which sees a tmpfs of that size at the folder. Other
    processes do not see it. None: this machine lets nobody mount one."""
    mount = 'mount -t tmpfs -o "size=$0" none "$1" && shift && exec "$@"'
    for options in ("-rm", "-m") if shutil.which("unshare") else ():
        prefix = ["unshare", options, "sh", "-c", mount, size, str(folder)]
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return None


@pytest.fixture(scope="session")
def small_disk():
    """Return `on_a_small_disk`. Skips the test where there is none."""
    if on_a_small_disk("1m", "/mnt") is None:
        pytest.skip("this machine lets nobody mount a small disk")
    return on_a_small_disk


@pytest.fixture(scope="session")
def docker() -> Iterator[None]:
    """Name a Docker daemon of the tests' own in the environment. Skips the test where none can
    run."""
    with docker_daemon() as host, pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER_HOST", host)
        yield


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Return the folder of the quickstart's model. Training it on first use takes a minute."""
    folder = ROOT / "runs" / "quickstart" / "model"
    subprocess.run([sys.executable, QUICKSTART / "make_model.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def save_tokenizer(tokenizer_folder):
    """Return a function that saves the tokenizer in a folder, with another chat template and `more`
    special tokens.

    It returns the folder as text.
    """

    def save(folder, template, more=()):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        special = [AddedToken(token, special=True, normalized=False) for token in more]
        tokenizer.add_tokens(special, special_tokens=True)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save


class RunningEngine:
    def __init__(self, server: EngineServer, model_dir: Path) -> None:
        self.url = server.url
        self.model_dir = model_dir
        self.process_group = server._process.pid
        self.key = server.key_file.read_text().strip()
        # no keep-alive: vLLM closes connections after some errors without announcing it
        self.http = httpx.Client(
            base_url=server.url,
            headers={"authorization": f"Bearer {self.key}"},
            timeout=600,
            limits=httpx.Limits(max_keepalive_connections=0),
        )


def vllm_program() -> str:
    """Return the command of vLLM. Skips the test when it is not installed."""
    vllm = os.environ.get("ROLLTAP_VLLM", "vllm")
    if shutil.which(vllm) is None:
        remedy = "tests/run.sh installs it, or set ROLLTAP_VLLM"
        pytest.skip(f"vLLM is not installed ({vllm}): {remedy}")
    return vllm


def free_port() -> int:
    """Return a port on which nothing listens, for a server that takes its time to start.

    It is none of those that the kernel gives to connections meanwhile (ip(7), ip_local_port_range).
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # whatever a test has seeded
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def running_engine(model: Path, log: Path, context: int, *extra: str) -> Iterator[RunningEngine]:
    """Run a vLLM server with LoRA loading, for one step ahead. Skips the test when vLLM is not
    installed."""
    settings = {"max_model_len": context, "lora_rank": 8, "max_staleness": 1, "log": log}
    program = {"vllm": vllm_program(), "port": free_port(), "extra": extra}
    with EngineServer(str(model), **program, **settings) as server:
        engine = RunningEngine(server, model)
        with engine.http:
            yield engine


@pytest.fixture(scope="session")
def engine_key(tmp_path_factory) -> Iterator[None]:
    """Name a key file in the environment, which all engines and their clients use.

    Without vLLM it skips before: nobody would write the file, and the tests of scripted engines
    that follow read it.
    """
    vllm_program()
    key = tmp_path_factory.mktemp("key") / "engine.key"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROLLTAP_ENGINE_KEY_FILE", str(key))
        yield


@pytest.fixture(scope="session")
def engine(engine_key, tiny_model, tmp_path_factory) -> Iterator[RunningEngine]:
    """Yield a vLLM server with the tiny model. Tests that publish must restore its weights."""
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with running_engine(tiny_model, log, CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="session")
def second_engine(engine_key, tiny_model, tmp_path_factory) -> Iterator[RunningEngine]:
    """Yield another server like `engine`. Tests that publish must restore its weights."""
    log = tmp_path_factory.mktemp("second-vllm") / "vllm.log"
    with running_engine(tiny_model, log, 4096) as second:
        yield second


@pytest.fixture(scope="module")  # an engine takes 2 GB
def qwen35_engine(engine_key, tokenizer_folder, tmp_path_factory) -> Iterator[RunningEngine]:
    """Yield a vLLM server with a tiny Qwen3.5, by its defaults. Tests that publish must restore its
    weights."""
    folder = tmp_path_factory.mktemp("qwen35")
    from tests import tiny_checkpoints  # needs torch, which not every environment of the tests has

    model = tiny_checkpoints.qwen35(folder / "model", tokenizer_folder)
    with running_engine(model, folder / "vllm.log", 4096) as engine:
        yield engine


@pytest.fixture
def scripted_engine(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        yield engine


@pytest.fixture
def start(tmp_path, scripted_engine, tokenizer_folder):
    started = []

    def start(*extra, **how):
        started.append(Recorder(tmp_path, scripted_engine.url, tokenizer_folder, *extra, **how))
        return started[-1]

    yield start
    for recorder in started:
        if recorder.process.poll() is None:
            recorder.stop()
