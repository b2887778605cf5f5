"""A policy that reads an image: the program goes on, and the model gets a text in its place."""

import base64

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


GREY = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAFklEQVR4nGNoIAAYRhWMKhhVMFIVAABCAAAfNUt+"
    "NwAAAABJRU5ErkJggg=="
)
"""A grey image of 32 x 32 pixels, as PNG."""


@pytest.mark.parametrize("name", cases(READ, 0, 1))
def test_a_program_whose_model_reads_an_image_goes_on(name, lead, record, workspace):
    tool, parameter = READ[name]
    image = workspace / "grey.png"
    image.write_bytes(GREY)

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
    assert (played.summary.hidden, played.summary.rejected) == (1, 0)
    played.check_whole()
