"""An agent with pydantic-ai on each of its models. With `image` its instruction holds a picture."""

import base64
import sys
from pathlib import Path

from pydantic_ai import Agent, BinaryContent

MODELS = {
    "chat": "openai-chat:gpt-4.1",
    "image": "openai-chat:gpt-4.1",
    "responses": "openai-responses:gpt-5.5",
    "anthropic": "anthropic:claude-sonnet-4-5",
    "google": "google:gemini-2.5-pro",
}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)

agent = Agent(MODELS[sys.argv[1]], instructions="You write files.")


@agent.tool_plain
def write_file(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


picture = (
    [BinaryContent(base64.b64decode(PIXEL), media_type="image/png")]
    if sys.argv[1] == "image"
    else []
)
print(agent.run_sync(["Write notes.txt, twice.", *picture]).output)
