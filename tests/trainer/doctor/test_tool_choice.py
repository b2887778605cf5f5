import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.doctor.tool_choice import (
    GREETING,
    ending_call,
    example,
    harmless_call,
    shell_call,
)

ECHO = f"echo '{GREETING}'"
TEXT = {"type": "string"}


def tool(name, required=(), **properties):
    return {
        "name": name,
        "parameters": {"type": "object", "properties": properties, "required": list(required)},
    }


def parse(text):
    """Return the tools of `name parameter! parameter:type, ...`. `!` is required, a type with `|`
    an enum."""
    tools = []
    for name, *parameters in map(str.split, text.split(",")):
        found = {}
        for each in parameters:
            key, _, kind = each.replace("!", "").partition(":")
            found[key] = {"enum": kind.split("|")} if "|" in kind else {"type": kind or "string"}
        required = [each.partition("!")[0] for each in parameters if "!" in each]
        tools.append(tool(name, required, **found))
    return tools


PROGRAMS = {
    "claude-code": (
        "Agent description! prompt!, Bash command! timeout:number run_in_background:boolean, Edit"
        " file_path! old_string! new_string!, Read file_path!, Skill skill!, Write file_path!"
        " content!"
    ),
    "codex": (
        "exec_command cmd! workdir, write_stdin session_id!:number chars, request_user_input"
        " questions!:array"
    ),
    "gemini-cli": (
        "list_directory dir_path!, run_shell_command command! is_background:boolean, "
        "write_file file_path! content!"
    ),
    "mini-swe-agent": "bash command!",
    "opencode": "invalid tool! error!, bash command! description!, task prompt!",
    "pi": "read path!, bash command!",
    "qwen-code": "edit file_path!, run_shell_command command! is_background!:boolean",
    "openhands": (
        "file_editor command!:view|create path!, terminal command! security_risk!:LOW|HIGH, finish"
        " message!"
    ),
    "cline": "read_files paths!:array, run_commands commands!:array",
    "copilot": (
        "bash command! description! mode:sync|async, write_bash shellId! input!, stop_bash shellId!"
    ),
    "goose": "developer__text_editor path!, developer__shell command!",
    "one with a terminal": "run_in_terminal command!",
    "an old codex": "shell command!:array",
    "a script": "send_mail to!, weather city!",
    "handoffs": "transfer_to_clerk, multiply a!:integer b!:integer",
    "unknown verbs": "frobnicate x!, getRow x!",
    "an MCP server": "mcp__fs__list_directory path!",
    "a web tool": "web_search query!",
    "Semantic Kernel": "Mail-send_mail to!, P-get_price item!",
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
    "copilot": ("bash", {"command": ECHO, "description": "hello"}),
    "goose": ("developer__shell", {"command": ECHO}),
    "one with a terminal": ("run_in_terminal", {"command": ECHO}),
    "an old codex": ("shell", {"command": ["sh", "-c", ECHO]}),
    "a script": ("weather", {"city": "hello"}),
    "handoffs": ("multiply", {"a": 1, "b": 1}),
    "unknown verbs": ("getRow", {"x": "hello"}),
    "an MCP server": ("mcp__fs__list_directory", {"path": "."}),
    "a web tool": ("web_search", {"query": "hello"}),
    "Semantic Kernel": ("P-get_price", {"item": "hello"}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gets_a_call_that_does_no_harm(program):
    assert harmless_call(parse(PROGRAMS[program])) == CALLS[program]


ACTS = """
write_file sendMail DeleteRow transfer_to_clerk final_answer ask_user mcp__shop__buy refund_order reset_database
drop_table rm removefile charge_card purchase shutdown execute_sql merge_pull_request tweet add add_user query fetch
fetch_funds book_flight format_disk clear_history close_issue notify_customer set_price transferFunds deleteall
reply_to_email status reset_view drop_list clear_search find_and_replace get_and_lock read_then_flush get_refund
check_out timeTravel frobnicate mcp__view__reset mcp__read count_down wipe-list Wipe-List Get-wipe_all
"""


def test_a_tool_is_not_called_unless_its_name_says_that_it_only_looks():
    tools = [tool(name, ["x", "path"], x=TEXT, path=TEXT) for name in ACTS.split()]
    assert [harmless_call([each]) for each in tools] == [None] * len(tools)


@pytest.mark.parametrize(
    "name",
    [
        "execute_sql",
        "send_command",
        "SlashCommand",
        "robot_command",
        "delete_commands",
        "run_refund",
        "reset_terminal",
    ],
)
def test_a_tool_with_a_command_that_is_no_shell_gets_none(name):
    tools = [tool(name, ["command"], command=TEXT, script=TEXT)]
    assert harmless_call(tools) is shell_call(tools, "true") is None


@pytest.mark.parametrize("name", ["submit", "complete_task", "done"])
def test_a_tool_that_ends_something_else_than_the_session_is_not_called(name):
    assert ending_call([tool(name, ["task_id"], task_id=TEXT)]) is None


@pytest.mark.parametrize(
    "name", ["finish", "submit", "attempt_completion", "complete_task", "final_answer"]
)
def test_a_program_is_ended_with_the_tool_that_it_has_for_that(name):
    assert ending_call(parse(f"bash command!, {name} text!")) == (name, {"text": "hello"})


def test_the_tool_that_a_person_chooses_is_called_whatever_its_name_says():
    tools = parse("bash command!, send_mail to!, read path!")
    assert harmless_call(tools, "send_mail") == ("send_mail", {"to": "hello"})
    assert harmless_call(tools, "bash") == ("bash", {"command": ECHO})
    assert harmless_call(tools, "sendmail") is None


def test_a_tool_without_a_schema_is_called():
    assert harmless_call([{"name": "get_time"}]) == ("get_time", {})


def test_a_program_without_such_tools_gets_no_call():
    assert (
        ending_call(parse(PROGRAMS["pi"]))
        is shell_call([tool("read", ["path"], path=TEXT)], "true")
        is None
    )
    assert harmless_call([]) is None


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (
            {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["b"]},
            {"b": "hello"},
        ),
        ({"required": ["a"], "properties": {"a": TEXT}}, {"a": "hello"}),
        ({"type": "object", "required": ["a"]}, {"a": "hello"}),
        ({"enum": ["LOW", "HIGH"]}, "LOW"),
        ({"const": 3}, 3),
        ({"type": "integer", "default": 5}, 5),
        ({"type": "string", "default": None}, "hello"),
        ({"type": "integer", "minimum": 10, "maximum": 20}, 10),
        ({"type": "integer", "exclusiveMinimum": 1}, 2),
        ({"type": "number", "maximum": 0.5}, 0.5),
        ({"type": "boolean"}, False),
        ({"type": "null"}, None),
        ({"type": ["null", "boolean"]}, False),
        ({"type": "string", "format": "date"}, "2026-01-01"),
        ({"type": "string", "minLength": 7}, "hellooo"),
        ({"type": "string", "maxLength": 2}, "he"),
        ({"type": "string", "maxLength": 0}, ""),
        ({"type": "array", "items": TEXT}, []),
        ({"items": TEXT, "minItems": 2}, ["hello", "hello"]),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, 1),
        ({"anyOf": [{"type": "null"}]}, None),
        ({"oneOf": [{"type": "boolean"}, TEXT]}, False),
        (
            {
                "allOf": [{"required": ["a"], "properties": {"a": TEXT}}, {"required": ["b"]}],
                "type": "object",
            },
            {"a": "hello", "b": "hello"},
        ),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {}, "minItems": 1}}},
            ["hello"],
        ),
        ({}, "hello"),
        (True, "hello"),
    ],
)
def test_a_value_has_what_its_schema_requires(schema, value):
    assert example(schema) == value


def test_a_property_that_is_a_place_is_the_workspace():
    schema = {"required": ["file_path", "query"], "properties": {"file_path": TEXT, "query": TEXT}}
    assert example(schema) == {"file_path": ".", "query": "hello"}


def test_a_schema_without_a_finite_value_ends():
    schema = {
        "$defs": {"x": {"required": ["x"], "properties": {"x": {"$ref": "#/$defs/x"}}}},
        "$ref": "#/$defs/x",
    }
    assert "x" in example(schema)


_LEAVES = st.one_of(
    st.builds(lambda low: {"type": "integer", "minimum": low}, st.integers(-9, 9)),
    st.builds(lambda high: {"type": "number", "maximum": high}, st.integers(-9, 9)),
    st.builds(lambda length: {"type": "string", "minLength": length}, st.integers(0, 9)),
    st.builds(lambda choices: {"enum": choices}, st.lists(st.integers(), min_size=1)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "string"]}]),
)
SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda item, least: {"type": "array", "items": item, "minItems": least},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda properties, some: {
                "type": "object",
                "properties": properties,
                "required": [*properties][:some],
            },
            st.dictionaries(st.sampled_from(["a", "b", "path"]), inner),
            st.integers(0, 3),
        ),
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_every_value_is_valid(schema):
    jsonschema.validate(example(schema), schema)


KEYWORDS = (
    "type enum anyOf allOf $ref required properties items minItems minLength maxLength minimum"
    " default a"
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["object", "array", "integer", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_a_tool_with_parameters_that_are_no_schema_is_called_all_the_same(parameters):
    assert harmless_call([{"name": "read", "parameters": parameters}])[0] == "read"


def test_a_value_stays_small():
    schema = {"type": "array", "minItems": 10**12, "items": {"type": "string", "minLength": 10**12}}
    assert len(json.dumps(example(schema))) < 10**7
