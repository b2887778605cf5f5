"""An agent with LangChain, which runs it in LangGraph, on each of its models."""

import sys
from pathlib import Path

import requests
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain.tools import tool


@tool
def write_file(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


@tool
def get_page(url: str) -> str:
    """Get a page."""
    return requests.get(url).text


model = {
    "chat": lambda: init_chat_model("openai:gpt-4.1"),
    "responses": lambda: init_chat_model("openai:gpt-5.5", use_responses_api=True),
    "previous_response_id": lambda: init_chat_model(
        "openai:gpt-5.5", use_previous_response_id=True
    ),
    "anthropic": lambda: init_chat_model("anthropic:claude-sonnet-4-5"),
    "google": lambda: init_chat_model("google_genai:gemini-2.5-pro"),
}[sys.argv[1]]()
agent = create_agent(model, tools=[write_file, get_page], system_prompt="You write files.")
asked = {"messages": [{"role": "user", "content": "Write notes.txt, twice."}]}
print(agent.invoke(asked)["messages"][-1].text)
