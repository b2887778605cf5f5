"""An agent with openai-agents: the history sent whole, or held by the server as responses."""

import sys
from pathlib import Path

import httpx
from agents import Agent, Runner, function_tool


@function_tool
def write_file(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


@function_tool
async def get_page(url: str) -> str:
    """Get a page."""
    async with httpx.AsyncClient() as client:
        return (await client.get(url)).text


memory = {
    "whole": {},
    "previous_response_id": {"auto_previous_response_id": True},
}[sys.argv[1]]
agent = Agent(
    name="writer", instructions="You write files.", model="gpt-5.5", tools=[write_file, get_page]
)
print(Runner.run_sync(agent, "Write notes.txt, twice.", **memory).final_output)
