"""A working directory with what the README supposes, in which its blocks run one after the
other."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.traces.reader import RecordedCalls
from tests.conftest import QUICKSTART
from tests.readme.blocks import BLOCKS, Block
from tests.readme.tables import FILES, SERVERS, SKIPPED, SUBSTITUTIONS
from tests.trainer.runs.exports.hub import Hub

BLOCK_SECONDS = 1800.0
AGENT = """
import httpx
tools = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}]
messages = [{"role": "user", "content": "Hello"}]
for _ in range(4):
    question = {"model": "any", "messages": messages, "tools": tools}
    reply = httpx.post("https://api.openai.com/v1/chat/completions", json=question, timeout=None)
    messages.append(reply.raise_for_status().json()["choices"][0]["message"])
    calls = messages[-1].get("tool_calls")
    if not calls:
        break
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "12:00"} for call in calls]
"""
RUNNABLE = [
    block
    for block in BLOCKS
    if block.language in ("sh", "python") and block.first_line not in SKIPPED
]


def file_name(block: Block) -> str | None:
    return next((name for start, name in FILES.items() if block.text.startswith(start)), None)


class Workshop:
    """Runs blocks in `folder`, with a home of its own, `rolltap` on the PATH and a Hub on
    loopback."""

    def __init__(self, folder: Path, engine: str, model: Path, hub: Hub) -> None:
        self.folder = folder
        self.engine = engine
        self.model = str(model)
        self.proxy = self.proxy_address = ""
        self._servers: list[subprocess.Popen[str]] = []
        self._done: set[Block] = set()
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "ROLLTAP_ENGINE": engine,
            "ROLLTAP_ENGINE_KEY_FILE": os.environ["ROLLTAP_ENGINE_KEY_FILE"],
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": hub.token,
            "HF_HUB_DISABLE_XET": "1",  # a protocol of its own, instead of Git LFS
        }
        for name, value in os.environ.items():
            if not name.startswith(("HF_", "ROLLTAP_")):
                self._env.setdefault(name, value)
        (folder / "home").mkdir()
        (folder / "my_agent.py").write_text(AGENT)
        tokens = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-0.5]}
        line = {"session_id": "s", "call_id": "c", **tokens, "finish_reason": "stop"}
        (folder / "calls.jsonl").write_text(json.dumps(line))
        shutil.copytree(QUICKSTART / "workspace", folder / "start")
        for block in BLOCKS:
            if (name := file_name(block)) is not None:
                (folder / name).write_text(self.substitute(block.text))

    @property
    def session(self) -> str:
        """A session of the run that `rolltap record` made."""
        return min(RecordedCalls(self.folder / "runs" / "try"))

    @property
    def call(self) -> str:
        return RecordedCalls(self.folder / "runs" / "try")[self.session][0].call_id

    def substitute(self, text: str) -> str:
        for pattern, replacement in SUBSTITUTIONS.items():
            if re.search(pattern, text):
                value = re.sub(r"\{(\w+)\}", lambda name: getattr(self, name[1]), replacement)
                text = re.sub(pattern, lambda _, value=value: value, text)
        return text

    def run_through(self, block: Block) -> None:
        """Run the block, after those before it that have not run."""
        for each in RUNNABLE[: RUNNABLE.index(block) + 1]:
            if each not in self._done:
                self._done.add(each)
                self._run(each)

    def _run(self, block: Block) -> None:
        text = self.substitute(block.text)
        if block.text.startswith(SERVERS):
            return self._serve(text)
        program = ["bash", "-euo", "pipefail"] if block.language == "sh" else [sys.executable]
        script = self.folder / f"line-{block.line}.{block.language}"
        script.write_text(text)
        log = script.with_suffix(".log")
        process = self._start([*program, script], log)
        try:
            status = process.wait(BLOCK_SECONDS)
        finally:
            stop(process)
        assert status == 0, f"{block} ended with status {status}:\n{log.read_text()}"

    def _serve(self, text: str) -> None:
        """Start mitmdump on a free port and wait until it accepts calls."""
        ready, told = os.pipe()
        options = f"--listen-port 0 --set rolltap_ready=/dev/fd/{told}"
        script = text.replace("mitmdump", f"exec mitmdump {options}", 1)
        log = self.folder / "mitmdump.log"
        self._servers.append(self._start(["bash", "-c", script], log, told))
        os.close(told)
        with open(ready) as pipe:
            line = pipe.readline()
        assert line, log.read_text()
        address = json.loads(line)
        self.proxy_address = f"{address['host']}:{address['port']}"
        self.proxy = f"http://{self.proxy_address}"

    def _start(
        self, command: list[str | Path], log: Path, *descriptors: int
    ) -> subprocess.Popen[str]:
        with log.open("w") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                start_new_session=True,
                text=True,
            )

    def close(self) -> None:
        """Stop the servers, and unload the adapters that the blocks have loaded into the engine."""
        for server in self._servers:
            stop(server)
        engine = EngineAdmin(self.engine)
        for adapter in engine.models().adapters:
            engine.unload_adapter(adapter)


def stop(process: subprocess.Popen[str]) -> None:
    """End what is left of a block's processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL if process.poll() is not None else signal.SIGTERM)
    process.wait(BLOCK_SECONDS)
