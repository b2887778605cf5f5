"""An agent with AutoGen that reflects on the results of its tools in a call without tools."""

import asyncio
import sys
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def write_file(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1")
    agent = AssistantAgent(
        "writer", client, tools=[write_file], reflect_on_tool_use=True, max_tool_iterations=2
    )
    for question in ("Write notes.txt, twice.", "Is it written?")[
        : 2 if "asked_again" in sys.argv else 1
    ]:
        print((await agent.run(task=question)).messages[-1].content)


asyncio.run(main())
