"""A policy that reads an image: the program goes on, and the model gets a text in its place."""

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.reader import iter_sessions
from tests.deep import cases
from tests.harness.play import installed, tool_call

pytestmark = pytest.mark.harness

READ = {
    "claude-code": ("Read", "file_path"),
    "gemini-cli": ("read_file", "file_path"),
    "opencode": ("read", "filePath"),
    "pi": ("read", "path"),
}
"""The tool that reads an image, and its parameter. Codex and Qwen Code send no image to a model they do not know."""


def png(side):
    """Return a grey image."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x80" * side) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", cases(READ, 0, 1))
def test_a_program_whose_model_reads_an_image_goes_on(name, scripted_engine, tokenizer_folder, tmp_path):
    program = installed(name)
    tool, parameter = READ[name]
    run, home, workspace = (tmp_path / name for name in ("run", "home", "workspace"))
    home.mkdir()
    workspace.mkdir()
    image = workspace / "grey.png"
    image.write_bytes(png(32))

    def reply(request):
        prompt = scripted_engine.tokenizer.decode(request["token_ids"])
        if "<tools>" not in prompt:
            return Say('{"complexity_reasoning": "It is simple.", "complexity_score": 10}')
        if "<tool_response>" not in prompt:
            return Say(tool_call(tool, {parameter: str(image)}))
        return Say("It is grey.")

    scripted_engine.otherwise = reply
    headless = program.command_for("What is in grey.png?")[1 + len(program.arguments) :]
    options = ["--out", run, "--engine", scripted_engine.url, "--model", tokenizer_folder, "--harness", name]
    ended = subprocess.run(
        [Path(sys.executable).with_name("rolltap"), "record", *options, "--", *headless],
        cwd=workspace,
        env=clean_environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "It is grey." in ended.stdout
    (recorded,) = iter_sessions(run)
    main = [call for call in recorded.calls if call.role == "agent"]
    assert [call.kind for call in main] == ["root", "bridged"]
    assert "[image/png, not shown: this model reads text]" in main[1].messages
    assert [event["call_id"] for event in read_rows(run, "events") if event["kind"] == "hidden"] == [main[1].call_id]
    assert (summarize(run).hidden, summarize(run).uncaptured_calls, summarize(run).rejected) == (1, 0, 0)
