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


def parse(text):
    """Return the tools of `name parameter! parameter:type, ...`. `!` is required, a type with `|`
    an enum."""
    tools = []
    for line in text.split(","):
        name, *parameters = line.split()
        schema = {"type": "object", "properties": {}, "required": []}
        for parameter in parameters:
            key, _, kind = parameter.partition(":")
            if key.endswith("!"):
                key = key.removesuffix("!")
                schema["required"].append(key)
            schema["properties"][key] = {"type": kind or "string"}
            if "|" in kind:
                schema["properties"][key] = {"enum": kind.split("|")}
        tools.append({"name": name, "parameters": schema})
    return tools


PROGRAMS = {
    "claude-code": (
        "Agent description! prompt!, "
        "Bash command! timeout:number run_in_background:boolean, "
        "Edit file_path! old_string! new_string!, Read file_path!, Skill skill!, "
        "Write file_path! content!",
        "Bash",
        {"command": ECHO},
    ),
    "codex": (
        "exec_command cmd! workdir, write_stdin session_id!:number chars, "
        "request_user_input questions!:array",
        "exec_command",
        {"cmd": ECHO},
    ),
    "gemini-cli": (
        "list_directory dir_path!, run_shell_command command! is_background:boolean, "
        "write_file file_path! content!",
        "run_shell_command",
        {"command": ECHO},
    ),
    "mini-swe-agent": ("bash command!", "bash", {"command": ECHO}),
    "opencode": (
        "invalid tool! error!, bash command! description!, task prompt!",
        "bash",
        {"command": ECHO, "description": "hello"},
    ),
    "pi": ("read path!, bash command!", "bash", {"command": ECHO}),
    "qwen-code": (
        "edit file_path!, run_shell_command command! is_background!:boolean",
        "run_shell_command",
        {"command": ECHO, "is_background": False},
    ),
    "openhands": (
        "file_editor command!:view|create path!, "
        "terminal command! security_risk!:LOW|HIGH, finish message!",
        "terminal",
        {"command": ECHO, "security_risk": "LOW"},
    ),
    "cline": (
        "read_files paths!:array, run_commands commands!:array",
        "run_commands",
        {"commands": [ECHO]},
    ),
    "copilot": (
        "bash command! description! mode:sync|async, write_bash shellId! input!, "
        "stop_bash shellId!",
        "bash",
        {"command": ECHO, "description": "hello"},
    ),
    "goose": (
        "developer__text_editor path!, developer__shell command!",
        "developer__shell",
        {"command": ECHO},
    ),
    "one with a terminal": ("run_in_terminal command!", "run_in_terminal", {"command": ECHO}),
    "an old codex": ("shell command!:array", "shell", {"command": ["sh", "-c", ECHO]}),
    "a script": ("send_mail to!, weather city!", "weather", {"city": "hello"}),
    "handoffs": ("transfer_to_clerk, multiply a!:integer b!:integer", "multiply", {"a": 1, "b": 1}),
    "unknown verbs": ("frobnicate x!, getRow x!", "getRow", {"x": "hello"}),
    "an MCP server": ("mcp__fs__list_directory path!", "mcp__fs__list_directory", {"path": "."}),
    "a web tool": ("web_search query!", "web_search", {"query": "hello"}),
    "Semantic Kernel": ("Mail-send_mail to!, P-get_price item!", "P-get_price", {"item": "hello"}),
}
"""Program -> its tools, and the call that it gets."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gets_a_call_that_does_no_harm(program):
    tools, name, arguments = PROGRAMS[program]
    assert harmless_call(parse(tools)) == (name, arguments)


ACTS = """
write_file sendMail DeleteRow transfer_to_clerk final_answer ask_user mcp__shop__buy refund_order
reset_database drop_table rm removefile charge_card purchase shutdown execute_sql
merge_pull_request tweet add add_user query fetch fetch_funds book_flight format_disk
clear_history close_issue notify_customer set_price transferFunds deleteall reply_to_email status
reset_view drop_list clear_search find_and_replace get_and_lock read_then_flush get_refund
check_out timeTravel frobnicate mcp__view__reset mcp__read count_down wipe-list Wipe-List
Get-wipe_all
"""


@pytest.mark.parametrize("name", ACTS.split())
def test_a_tool_is_not_called_unless_its_name_says_that_it_only_looks(name):
    assert harmless_call(parse(f"{name} x! path!")) is None


NO_SHELLS = (
    "execute_sql send_command SlashCommand robot_command delete_commands run_refund reset_terminal"
)


@pytest.mark.parametrize("name", NO_SHELLS.split())
def test_a_tool_with_a_command_that_is_no_shell_gets_none(name):
    tools = parse(f"{name} command! script")
    assert harmless_call(tools) is None
    assert shell_call(tools, "true") is None


@pytest.mark.parametrize("name", ["submit", "complete_task", "done"])
def test_a_tool_that_ends_something_else_than_the_session_is_not_called(name):
    assert ending_call(parse(f"{name} task_id!")) is None


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
    assert ending_call(parse("read path!, bash command!")) is None
    assert shell_call(parse("read path!"), "true") is None
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
        ({"const": 3}, 3),
        ({"type": "integer", "default": 5}, 5),
        ({"type": "string", "default": None}, "hello"),
        ({"type": "integer", "minimum": 10, "maximum": 20}, 10),
        ({"type": "integer", "exclusiveMinimum": 1}, 2),
        ({"type": "number", "maximum": 0.5}, 0.5),
        ({"type": ["null", "boolean"]}, False),
        ({"type": "string", "format": "date"}, "2026-01-01"),
        ({"type": "string", "maxLength": 2}, "he"),
        ({"type": "string", "maxLength": 0}, ""),
        ({"items": TEXT, "minItems": 2}, ["hello", "hello"]),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, 1),
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


SMALL = st.integers(-9, 9)


def schema_of(kind, **keywords):
    return st.fixed_dictionaries({"type": st.just(kind), **keywords})


def with_required(schema, number):
    """Return the schema of an object of which the first properties are required."""
    return {**schema, "required": [*schema["properties"]][:number]}


def nested(inner):
    properties = st.dictionaries(st.sampled_from(["a", "b", "path"]), inner)
    return st.one_of(
        schema_of("array", items=inner, minItems=st.integers(0, 2)),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.builds(with_required, schema_of("object", properties=properties), st.integers(0, 3)),
    )


LEAVES = st.one_of(
    schema_of("integer", minimum=SMALL),
    schema_of("number", maximum=SMALL),
    schema_of("string", minLength=st.integers(0, 9)),
    st.fixed_dictionaries({"enum": st.lists(st.integers(), min_size=1)}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "string"]}]),
)
SCHEMAS = st.recursive(LEAVES, nested, max_leaves=8)


@given(SCHEMAS)
def test_every_value_is_valid(schema):
    jsonschema.validate(example(schema), schema)


KEYWORDS = (
    "type enum anyOf allOf $ref required properties items minItems minLength maxLength minimum"
    " default a"
)
VALUES = st.sampled_from(["object", "array", "integer", "#/$defs/a"])


def containers(inner):
    keywords = st.sampled_from(KEYWORDS.split())
    return st.lists(inner, max_size=3) | st.dictionaries(keywords, inner, max_size=4)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | VALUES
JSON = st.recursive(SCALARS, containers, max_leaves=12)


@given(JSON)
def test_a_tool_with_parameters_that_are_no_schema_is_called_all_the_same(parameters):
    assert harmless_call([{"name": "read", "parameters": parameters}])[0] == "read"


def test_a_value_stays_small():
    schema = {"type": "array", "minItems": 10**12, "items": {"type": "string", "minLength": 10**12}}
    assert len(json.dumps(example(schema))) < 10**7
