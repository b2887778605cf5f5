"""The harnesses as the scripted model sees them: their tools, and the rest of what their sessions
need.

`tests/harness` plays them with plain replies, `tests/bench/continuity.py` with awkward ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Action = tuple[str, dict[str, Any]]
"""A tool's name and arguments. `COMMAND` and `CONTENT` stand for texts and `{n}` for a number of
the turn. A key that ends in a question mark is optional."""


@dataclass(frozen=True)
class Program:
    """The tool calls that a model can make in a harness. The first one runs a command."""

    actions: list[Action]
    config: tuple[str, str]
    """Path of a configuration file in the home folder, and its text."""
    writes: bool = False
    """Whether the second action writes the file `notes-{n}.txt`."""
    end: Action | None = None
    """The call that ends a session. Where None, a reply without calls ends it."""
    aside: str = "A title"
    """The answer to side questions: a title, a choice of a model."""
    agent: str = "<tools>"
    """Text of the prompts that are no side questions."""
    texts: tuple[str, ...] = ()
    """Turns of a model in a program without tools, which reads what to do in the text."""

    def call(self, place: int, texts: dict[str, str]) -> Action:
        """Return the action at a place without what is optional, with other texts for some of its
        own."""
        name, arguments = self.actions[place]
        required = {key: value for key, value in arguments.items() if not key.endswith("?")}
        return name, fill(required, lambda text: texts.get(text, text))


def fill(value: Any, text: Callable[[str], str]) -> Any:
    """Return arguments in which each text is replaced."""
    if isinstance(value, dict):
        return {key: fill(inner, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, text) for inner in value]
    return text(value) if isinstance(value, str) else value


_EDIT = "notes-{{n}}.txt\n<<<<<<< SEARCH\n{}=======\nhéllo {{n}}\n>>>>>>> REPLACE\n"

PROGRAMS = {
    "aider": Program(
        [],
        texts=(
            _EDIT.format(""),
            _EDIT.format("not there\n"),
            "I would edit notes-{n}.txt, which is not there.",
        ),
        agent="*SEARCH/REPLACE*",
        config=(".aider.conf.yml", "show-diffs:   false\n"),
    ),
    "claude-code": Program(
        [
            (
                "Bash",
                {
                    "command": "COMMAND",
                    "description?": "Run it",
                    "timeout?": 20000,
                    "run_in_background?": False,
                },
            ),
            ("Write", {"content": "CONTENT", "file_path": "notes-{n}.txt"}),
            (
                "Edit",
                {
                    "replace_all?": True,
                    "new_string": "CONTENT",
                    "old_string": "é",
                    "file_path": "notes-{n}.txt",
                },
            ),
            ("Read", {"limit?": 5, "offset?": 1, "file_path": "missing-{n}.txt"}),
            ("ListAgents", {}),
            ("ReportFindings", {"findings": []}),
            ("ToolSearch", {"query": "select:WebFetch", "max_results": 5}),
        ],
        config=(".claude/settings.json", '{ "cleanupPeriodDays":  9 }'),
        writes=True,
    ),
    "cline": Program(
        [
            ("run_commands", {"commands": ["COMMAND"]}),
            ("run_commands", {"commands": ["COMMAND", "COMMAND"]}),
            ("read_files", {"files": [{"path": "missing.txt"}]}),
            ("search_codebase", {"queries": ["row {n}"]}),
            ("team_status", {}),
        ],
        config=(".cline/data/settings/global-settings.json", '{ "autoUpdateEnabled":  false }'),
    ),
    "codex": Program(
        [
            (
                "exec_command",
                {
                    "cmd": "COMMAND",
                    "yield_time_ms": 30000,
                    "login?": False,
                    "max_output_tokens?": 500,
                },
            ),
            ("exec_command", {"workdir": ".", "tty?": True, "cmd": "COMMAND"}),
            ("get_goal", {}),
        ],
        config=(".codex/config.toml", 'model_reasoning_effort   = "low"\n'),
    ),
    "copilot": Program(
        [
            (
                "bash",
                {
                    "command": "COMMAND",
                    "description": "Run it",
                    "initial_wait?": 20,
                    "mode?": "sync",
                },
            ),
            ("view", {"path": "{cwd}/missing-{n}.txt", "forceReadLargeFiles?": False}),
            ("glob", {"pattern": "*.{n}"}),
            ("apply_patch", {"input": "CONTENT"}),
            ("list_agents", {"include_completed?": True}),
            ("list_bash", {}),
        ],
        config=(".copilot/settings.json", '{ "banner":  "never" }'),
    ),
    "gemini-cli": Program(
        [
            (
                "run_shell_command",
                {"command": "COMMAND", "description?": "Run it", "is_background?": False},
            ),
            ("write_file", {"content": "CONTENT", "file_path": "notes-{n}.txt"}),
            ("read_file", {"end_line?": 5, "start_line?": 1, "file_path": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}", "case_sensitive?": True}),
            ("list_background_processes", {}),
        ],
        aside='{"complexity_reasoning": "It is simple.", "complexity_score": 10}',
        config=(".gemini/settings.json", '{ "ui":  {"hideTips": true} }'),
        writes=True,
    ),
    "kilo": Program(
        [
            ("bash", {"timeout?": 20000, "command": "COMMAND", "description": "Run it"}),
            ("write", {"content": "CONTENT", "filePath": "notes-{n}.txt"}),
            ("todowrite", {"todos": []}),
            ("read", {"limit?": 5, "offset?": 1, "filePath": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}"}),
        ],
        config=(
            ".config/kilo/kilo.jsonc",
            '{ "$schema": "https://app.kilo.ai/config.json",  "permission": {"bash":"allow"} }',
        ),
        writes=True,
    ),
    "mini-swe-agent": Program(
        [("bash", {"command": "COMMAND"})],
        end=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        config=(".config/mini-swe-agent/.env", "MSWEA_GLOBAL_COST_LIMIT='7'\n"),
    ),
    "opencode": Program(
        [
            ("bash", {"timeout?": 20000, "command": "COMMAND", "description": "Run it"}),
            ("todowrite", {"todos": []}),
            ("read", {"limit?": 5, "offset?": 1, "filePath": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}"}),
        ],
        config=(
            ".config/opencode/opencode.json",
            '{ "$schema": "https://opencode.ai/config.json",  "snapshot": false }',
        ),
    ),
    "openhands": Program(
        [
            (
                "terminal",
                {
                    "security_risk": "LOW",
                    "command": "COMMAND",
                    "timeout?": 20,
                    "summary?": "Run it",
                },
            ),
            (
                "file_editor",
                {
                    "path": "{cwd}/notes-{n}.txt",
                    "file_text": "CONTENT",
                    "command": "create",
                    "security_risk": "LOW",
                },
            ),
            ("task_tracker", {"command?": "view", "security_risk": "LOW"}),
            ("think", {"thought": "CONTENT"}),
        ],
        end=("finish", {"message": "Done."}),
        config=(".openhands/settings.json", '{ "theme":  "dark" }'),
    ),
    "pi": Program(
        [
            ("bash", {"timeout?": 20, "command": "COMMAND"}),
            ("write", {"content": "CONTENT", "path": "notes-{n}.txt"}),
            ("edit", {"edits": [{"newText": "b", "oldText": "é"}], "path": "notes-{n}.txt"}),
            ("read", {"limit?": 5, "offset?": 1, "path": "missing-{n}.txt"}),
        ],
        config=(".pi/agent/settings.json", '{ "hideThinkingBlock":  true }'),
        writes=True,
    ),
    "qwen-code": Program(
        [
            (
                "run_shell_command",
                {"is_background": False, "command": "COMMAND", "timeout?": 20000},
            ),
            ("write_file", {"content": "CONTENT", "file_path": "notes-{n}.txt"}),
            ("read_file", {"limit?": 5, "offset?": 0, "file_path": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}"}),
            ("get_goal", {}),
        ],
        config=(".qwen/settings.json", '{ "$version": 4,  "ui": {"hideTips": true} }'),
    ),
}
