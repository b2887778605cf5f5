"""A policy that reads an image: the program goes on, and the model gets a text in its place."""

import struct
import zlib

import pytest

from tests.deep import cases
from tests.harness.play import installed, tool_call

pytestmark = pytest.mark.harness

READ = {
    "claude-code": ("Read", "file_path"),
    "gemini-cli": ("read_file", "file_path"),
    "opencode": ("read", "filePath"),
    "pi": ("read", "path"),
}
"""The tool that reads an image, and its parameter. Codex and Qwen Code send no image to a model
they do not know."""


def png(side):

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = zlib.compress((b"\0" + b"\x80" * side) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("name", cases(READ, 0, 1))
def test_a_program_whose_model_reads_an_image_goes_on(name, lead, record, workspace):
    tool, parameter = READ[name]
    image = workspace / "grey.png"
    image.write_bytes(png(32))

    def reply(prompt):
        if "<tools>" not in prompt:
            return '{"complexity_reasoning": "It is simple.", "complexity_score": 10}'
        if "<tool_response>" not in prompt:
            return tool_call(tool, {parameter: str(image)})
        return "It is grey."

    lead(reply)
    played = record("What is in grey.png?", harness=installed(name), keys={})
    assert "It is grey." in played.log
    main = played.main
    assert [call.kind for call in main] == ["root", "bridged"]
    assert "[image/png, not shown: this model reads text]" in main[1].messages
    assert [event["call_id"] for event in played.of("hidden")] == [main[1].call_id]
    summary = played.summary
    assert (summary.hidden, summary.uncaptured_calls, summary.rejected) == (1, 0, 0)
