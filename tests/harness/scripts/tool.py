"""The tool of the agents."""

from pathlib import Path

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
DECLARED = {"name": "write_file", "description": "Write a file."}
STRICT = {
    "type": "function",
    **DECLARED,
    "parameters": {**PARAMETERS, "additionalProperties": False},
    "strict": True,
}
"""As the Responses API declares it."""


def write_file(path, content):
    Path(path).write_text(content)
    return "written"
