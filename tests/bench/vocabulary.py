"""The tools of each harness for the benchmark of continuity."""

from dataclasses import dataclass
from typing import Any

Action = tuple[str, dict[str, Any]]
"""A tool's name and arguments. `COMMAND` and `CONTENT` are replaced by awkward texts and `{n}` by a number of the turn.
A key that ends in a question mark is optional and randomly left out."""


@dataclass(frozen=True)
class Vocabulary:
    """The tool calls that a model can make in a harness."""

    actions: list[Action]
    end: Action | None = None
    """The call that ends a session. Where None, a reply without calls ends it."""
    aside: str = "A title"
    """The answer to side questions."""
    agent: str = "<tools>"
    """Text of the prompts that are no side questions."""
    texts: tuple[str, ...] = ()
    """Turns of a model in a program without tools, which reads what to do in the text."""


_EDIT = "notes-{{n}}.txt\n<<<<<<< SEARCH\n{}=======\nhéllo {{n}}\n>>>>>>> REPLACE\n"

VOCABULARIES = {
    "aider": Vocabulary(
        [],
        texts=(_EDIT.format(""), _EDIT.format("not there\n"), "I would edit notes-{n}.txt, which is not there."),
        agent="*SEARCH/REPLACE*",
    ),
    "claude-code": Vocabulary(
        [
            ("Bash", {"command": "COMMAND", "description?": "Run it", "timeout?": 20000, "run_in_background?": False}),
            ("Write", {"content": "CONTENT", "file_path": "notes-{n}.txt"}),
            ("Edit", {"replace_all?": True, "new_string": "CONTENT", "old_string": "é", "file_path": "notes-{n}.txt"}),
            ("Read", {"limit?": 5, "offset?": 1, "file_path": "missing-{n}.txt"}),
            ("ListAgents", {}),
            ("ReportFindings", {"findings": []}),
            ("ToolSearch", {"query": "select:WebFetch", "max_results": 5}),
        ]
    ),
    "cline": Vocabulary(
        [
            ("run_commands", {"commands": ["COMMAND"]}),
            ("run_commands", {"commands": ["COMMAND", "COMMAND"]}),
            ("read_files", {"files": [{"path": "missing.txt"}]}),
            ("search_codebase", {"queries": ["row {n}"]}),
            ("team_status", {}),
        ]
    ),
    "codex": Vocabulary(
        [
            ("exec_command", {"cmd": "COMMAND", "yield_time_ms?": 2000, "login?": False, "max_output_tokens?": 500}),
            ("exec_command", {"workdir": ".", "tty?": True, "cmd": "COMMAND"}),
            ("get_goal", {}),
        ]
    ),
    "copilot": Vocabulary(
        [
            ("bash", {"command": "COMMAND", "description": "Run it", "initial_wait?": 5, "mode?": "sync"}),
            ("view", {"path": "{cwd}/missing-{n}.txt", "forceReadLargeFiles?": False}),
            ("glob", {"pattern": "*.{n}"}),
            ("apply_patch", {"input": "CONTENT"}),
            ("list_agents", {"include_completed?": True}),
            ("list_bash", {}),
        ]
    ),
    "gemini-cli": Vocabulary(
        [
            ("run_shell_command", {"command": "COMMAND", "description?": "Run it", "is_background?": False}),
            ("write_file", {"content": "CONTENT", "file_path": "notes-{n}.txt"}),
            ("read_file", {"end_line?": 5, "start_line?": 1, "file_path": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}", "case_sensitive?": True}),
            ("list_background_processes", {}),
        ],
        aside='{"complexity_reasoning": "It is simple.", "complexity_score": 10}',
    ),
    "kilo": Vocabulary(
        [
            ("bash", {"timeout?": 20000, "command": "COMMAND"}),
            ("write", {"content": "CONTENT", "filePath": "notes-{n}.txt"}),
            ("todowrite", {"todos": []}),
            ("read", {"limit?": 5, "offset?": 1, "filePath": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}"}),
        ]
    ),
    "mini-swe-agent": Vocabulary(
        [("bash", {"command": "COMMAND"})], end=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    ),
    "opencode": Vocabulary(
        [
            ("bash", {"timeout?": 20000, "command": "COMMAND"}),
            ("todowrite", {"todos": []}),
            ("read", {"limit?": 5, "offset?": 1, "filePath": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}"}),
        ]
    ),
    "openhands": Vocabulary(
        [
            ("terminal", {"security_risk": "LOW", "command": "COMMAND", "timeout?": 20, "summary?": "Run it"}),
            (
                "file_editor",
                {"path": "{cwd}/notes-{n}.txt", "file_text": "CONTENT", "command": "create", "security_risk": "LOW"},
            ),
            ("task_tracker", {"command?": "view", "security_risk": "LOW"}),
            ("think", {"thought": "CONTENT"}),
        ],
        end=("finish", {"message": "Done."}),
    ),
    "pi": Vocabulary(
        [
            ("bash", {"timeout?": 20, "command": "COMMAND"}),
            ("write", {"content": "CONTENT", "path": "notes-{n}.txt"}),
            ("edit", {"edits": [{"newText": "b", "oldText": "é"}], "path": "notes-{n}.txt"}),
            ("read", {"limit?": 5, "offset?": 1, "path": "missing-{n}.txt"}),
        ]
    ),
    "qwen-code": Vocabulary(
        [
            ("run_shell_command", {"is_background": False, "command": "COMMAND", "timeout?": 20000}),
            ("write_file", {"content": "CONTENT", "file_path": "notes-{n}.txt"}),
            ("read_file", {"limit?": 5, "offset?": 0, "file_path": "missing-{n}.txt"}),
            ("glob", {"pattern": "*.{n}"}),
            ("get_goal", {}),
        ]
    ),
}
