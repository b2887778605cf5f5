import pytest

from rolltap.trainer.doctor.tool_choice import GREETING, ending_call, harmless_call, shell_call

ECHO = f"echo '{GREETING}'"
TEXT = {"type": "string"}


def tool(name, required=(), **properties):
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(required)}}


PROGRAMS = {
    "claude-code": [
        tool("Agent", ["description", "prompt"], description=TEXT, prompt=TEXT),
        tool("Bash", ["command"], command=TEXT, timeout={"type": "number"}, run_in_background={"type": "boolean"}),
        tool("Edit", ["file_path", "old_string", "new_string"], file_path=TEXT, old_string=TEXT, new_string=TEXT),
        tool("Read", ["file_path"], file_path=TEXT),
        tool("Skill", ["skill"], skill=TEXT),
        tool("Write", ["file_path", "content"], file_path=TEXT, content=TEXT),
    ],
    "codex": [
        tool("exec_command", ["cmd"], cmd=TEXT, workdir=TEXT),
        tool("write_stdin", ["session_id"], session_id={"type": "number"}, chars=TEXT),
        tool("request_user_input", ["questions"], questions={"type": "array"}),
    ],
    "gemini-cli": [
        tool("list_directory", ["dir_path"], dir_path=TEXT),
        tool("run_shell_command", ["command"], command=TEXT, is_background={"type": "boolean"}),
        tool("write_file", ["file_path", "content"], file_path=TEXT, content=TEXT),
    ],
    "mini-swe-agent": [tool("bash", ["command"], command=TEXT)],
    "opencode": [
        tool("invalid", ["tool", "error"], tool=TEXT, error=TEXT),
        tool("bash", ["command", "description"], command=TEXT, description=TEXT),
        tool("task", ["prompt"], prompt=TEXT),
    ],
    "pi": [tool("read", ["path"], path=TEXT), tool("bash", ["command"], command=TEXT)],
    "qwen-code": [
        tool("edit", ["file_path"], file_path=TEXT),
        tool("run_shell_command", ["command", "is_background"], command=TEXT, is_background={"type": "boolean"}),
    ],
    "openhands": [
        tool("file_editor", ["command", "path"], command={"enum": ["view", "create"]}, path=TEXT),
        tool("terminal", ["command", "security_risk"], command=TEXT, security_risk={"enum": ["LOW", "HIGH"]}),
        tool("finish", ["message"], message=TEXT),
    ],
    "cline": [
        tool("read_files", ["paths"], paths={"type": "array", "items": TEXT}),
        tool("run_commands", ["commands"], commands={"type": "array", "items": TEXT}),
    ],
    "kilo": [tool("bash", ["command", "description"], command=TEXT, description=TEXT)],
    "copilot": [
        tool("bash", ["command", "description"], command=TEXT, description=TEXT, mode={"enum": ["sync"]}),
        tool("write_bash", ["shellId", "input"], shellId=TEXT, input=TEXT),
        tool("stop_bash", ["shellId"], shellId=TEXT),
    ],
    "goose": [tool("developer__text_editor", ["path"], path=TEXT), tool("developer__shell", ["command"], command=TEXT)],
    "one with a terminal": [tool("run_in_terminal", ["command"], command=TEXT)],
    "an old codex": [tool("shell", ["command"], command={"type": "array", "items": TEXT})],
    "a script": [tool("send_mail", ["to"], to=TEXT), tool("weather", ["city"], city=TEXT)],
    "handoffs": [tool("transfer_to_clerk"), tool("multiply", ["a", "b"], a={"type": "integer"}, b={"type": "integer"})],
    "unknown verbs": [tool("frobnicate", ["x"], x=TEXT), tool("getRow", ["x"], x=TEXT)],
    "an MCP server": [tool("mcp__fs__list_directory", ["path"], path=TEXT)],
    "a web tool": [tool("web_search", ["query"], query=TEXT)],
    "no schema": [{"name": "get_time"}],
}
CALLS = {
    "claude-code": ("Bash", {"command": ECHO}),
    "codex": ("exec_command", {"cmd": ECHO}),
    "gemini-cli": ("run_shell_command", {"command": ECHO}),
    "mini-swe-agent": ("bash", {"command": ECHO}),
    "opencode": ("bash", {"command": ECHO, "description": "hello"}),
    "pi": ("bash", {"command": ECHO}),
    "qwen-code": ("run_shell_command", {"command": ECHO, "is_background": False}),
    "openhands": ("terminal", {"command": ECHO, "security_risk": "LOW"}),
    "cline": ("run_commands", {"commands": [ECHO]}),
    "kilo": ("bash", {"command": ECHO, "description": "hello"}),
    "copilot": ("bash", {"command": ECHO, "description": "hello"}),
    "goose": ("developer__shell", {"command": ECHO}),
    "one with a terminal": ("run_in_terminal", {"command": ECHO}),
    "an old codex": ("shell", {"command": ["sh", "-c", ECHO]}),
    "a script": ("weather", {"city": "hello"}),
    "handoffs": ("multiply", {"a": 1, "b": 1}),
    "unknown verbs": ("getRow", {"x": "hello"}),
    "an MCP server": ("mcp__fs__list_directory", {"path": "."}),
    "a web tool": ("web_search", {"query": "hello"}),
    "no schema": ("get_time", {}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gets_a_call_that_does_no_harm(program):
    assert harmless_call(PROGRAMS[program]) == CALLS[program]


ACTS = """
write_file sendMail DeleteRow transfer_to_clerk final_answer ask_user mcp__shop__buy refund_order reset_database
drop_table rm removefile charge_card purchase shutdown execute_sql merge_pull_request tweet add add_user query fetch
fetch_funds book_flight format_disk clear_history close_issue notify_customer set_price transferFunds deleteall
reply_to_email status reset_view drop_list clear_search find_and_replace get_and_lock read_then_flush get_refund
check_out timeTravel frobnicate mcp__view__reset mcp__read count_down
"""


@pytest.mark.parametrize("name", ACTS.split())
def test_a_tool_is_not_called_unless_its_name_says_that_it_only_looks(name):
    assert harmless_call([tool(name, ["x", "path"], x=TEXT, path=TEXT)]) is None


@pytest.mark.parametrize(
    "name",
    ["execute_sql", "send_command", "SlashCommand", "robot_command", "delete_commands", "run_refund", "reset_terminal"],
)
def test_a_tool_with_a_command_that_is_no_shell_gets_none(name):
    tools = [tool(name, ["command"], command=TEXT, script=TEXT)]
    assert harmless_call(tools) is shell_call(tools, "true") is None


@pytest.mark.parametrize("name", ["submit", "complete_task", "done"])
def test_a_tool_that_ends_something_else_than_the_session_is_not_called(name):
    assert ending_call([tool(name, ["task_id"], task_id=TEXT)]) is None


@pytest.mark.parametrize("parameters", [{"properties": [1]}, {"properties": 3}, {"required": True}, [], "x"])
def test_a_tool_with_parameters_that_are_no_schema_is_called_all_the_same(parameters):
    assert harmless_call([{"name": "bash", "parameters": parameters}, {"name": "read", "parameters": parameters}]) == (
        "read",
        {},
    )


@pytest.mark.parametrize("name", ["finish", "submit", "attempt_completion", "complete_task", "final_answer"])
def test_a_program_is_ended_with_the_tool_that_it_has_for_that(name):
    assert ending_call([tool("bash", ["command"], command=TEXT), tool(name, ["text"], text=TEXT)]) == (
        name,
        {"text": "hello"},
    )


def test_a_program_without_such_tools_gets_no_call():
    assert ending_call(PROGRAMS["pi"]) is shell_call([tool("read", ["path"], path=TEXT)], "true") is None
    assert harmless_call([]) is None
