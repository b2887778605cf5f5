"""An agent with AutoGen that reflects on the results of its tools in a call without tools."""

import asyncio
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def write_file(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1")
    agent = AssistantAgent("writer", client, tools=[write_file], reflect_on_tool_use=True, max_tool_iterations=2)
    print((await agent.run(task="Write notes.txt, twice.")).messages[-1].content)


asyncio.run(main())
