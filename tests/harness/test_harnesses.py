"""The real programs, unmodified and headless, led by the scripted engine over TLS.

Each program is recorded with `rolltap record` and has a configuration of its own in the home folder. It writes a file
with a tool of its own, reads it back with another call, and ends.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.reader import iter_sessions
from tests.harness.play import installed, tool_call

pytestmark = pytest.mark.harness

WRITE, READ = "printf 'héllo\\n' > greeting.txt", "cat greeting.txt"
# programs must not parse it as options or substitute its braces
INSTRUCTION = "- Write {greeting} into greeting.txt, then read it."


@dataclass(frozen=True)
class Script:
    """The model's tool calls in a harness, and the configuration file of the harness."""

    tools: list[tuple[str, dict]]
    """Name and arguments of the tool that each turn calls."""
    config: tuple[str, str]
    """Path of a configuration file in the home folder, and its text."""
    last: str | None = "I wrote the greeting."
    """The text that ends the session. None: its last tool call ends it."""
    aside: str = "A greeting"
    """The answer to side questions, which have no tools: a title, a choice of a model."""
    texts: tuple[str, ...] = ()
    """The turns of a program without tools, which reads what to do in the text."""
    agent: str = "<tools>"
    """Text of the prompts that are no side questions."""
    rewrites: str = ""
    """A change that the program makes in its history, as the reason of its calls says it: none is continued."""

    @property
    def turns(self) -> list[str]:
        """Return the model's replies to the agent."""
        last = [] if self.last is None else [self.last]
        return [*self.texts, *(tool_call(*call) for call in self.tools), *last]

    def turn(self, prompt: str) -> int:
        """Return the number of turns before `prompt`, from the results of tools or the turns' own texts in it."""
        return prompt.count("<tool_response>") if self.tools else sum(text.strip() in prompt for text in self.texts)


_APPEND = """\
greeting.txt
<<<<<<< SEARCH
{}=======
{}>>>>>>> REPLACE
"""

SCRIPTS = {
    "aider": Script(
        [],
        (".aider.conf.yml", "show-diffs:   false\n"),
        last=None,
        # the first edit replaces a line that is not there, which aider answers with the file's real lines
        texts=("So:\n\n" + _APPEND.format("hello\n", "héllo\n"), "Then I make it.\n\n" + _APPEND.format("", "héllo\n")),
        agent="*SEARCH/REPLACE*",
        rewrites="message 7 is not that of call",  # the files as they are now, before the conversation
    ),
    "claude-code": Script(
        [
            ("Write", {"file_path": "greeting.txt", "content": "héllo\n"}),
            ("Bash", {"command": READ, "description": "Read the greeting"}),
        ],
        (".claude/settings.json", '{ "cleanupPeriodDays":  9 }'),
    ),
    "cline": Script(
        [("run_commands", {"commands": [WRITE]}), ("run_commands", {"commands": [READ]})],
        (".cline/data/settings/global-settings.json", '{ "autoUpdateEnabled":  false }'),
    ),
    "codex": Script(
        [("exec_command", {"cmd": WRITE}), ("exec_command", {"cmd": READ})],
        (".codex/config.toml", 'model_reasoning_effort   = "low"\n'),
    ),
    "copilot": Script(
        [
            ("bash", {"command": WRITE, "description": "Write the greeting"}),
            ("bash", {"command": READ, "description": "Read the greeting"}),
        ],
        (".copilot/settings.json", '{ "banner":  "never" }'),
    ),
    "gemini-cli": Script(
        [
            ("write_file", {"file_path": "greeting.txt", "content": "héllo\n"}),
            ("run_shell_command", {"command": READ, "description": "Read the greeting"}),
        ],
        (".gemini/settings.json", '{ "ui":  {"hideTips": true} }'),
        aside='{"complexity_reasoning": "It is simple.", "complexity_score": 10}',
    ),
    "kilo": Script(
        [
            ("write", {"filePath": "greeting.txt", "content": "héllo\n"}),
            ("bash", {"command": READ, "description": "Read the greeting"}),
        ],
        (
            ".config/kilo/kilo.jsonc",
            '{ "$schema": "https://app.kilo.ai/config.json",  "permission": {"bash":"allow"} }',
        ),
    ),
    "mini-swe-agent": Script(
        [
            ("bash", {"command": WRITE}),
            ("bash", {"command": READ}),
            ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        ],
        (".config/mini-swe-agent/.env", "MSWEA_GLOBAL_COST_LIMIT='7'\n"),
        last=None,
    ),
    "opencode": Script(
        [
            ("bash", {"command": WRITE, "description": "Write the greeting"}),
            ("read", {"filePath": "greeting.txt"}),
        ],
        (".config/opencode/opencode.json", '{ "$schema": "https://opencode.ai/config.json",  "snapshot": false }'),
    ),
    "openhands": Script(
        [
            ("terminal", {"command": WRITE, "security_risk": "LOW"}),
            ("terminal", {"summary": "Read the greeting", "command": READ, "security_risk": "LOW"}),
        ],
        (".openhands/settings.json", '{ "theme":  "dark" }'),
    ),
    "pi": Script(
        [("write", {"path": "greeting.txt", "content": "héllo\n"}), ("bash", {"command": READ})],
        (".pi/agent/settings.json", '{ "hideThinkingBlock":  true }'),
    ),
    "qwen-code": Script(
        [
            ("run_shell_command", {"command": WRITE, "is_background": False}),
            ("run_shell_command", {"command": READ, "is_background": False}),
        ],
        (".qwen/settings.json", '{ "$version": 4,  "ui": {"hideTips": true} }'),
    ),
}


def lead(engine, script):
    """Let `engine` follow `script`."""

    def reply(request):
        prompt = engine.tokenizer.decode(request["token_ids"])
        return Say(script.turns[script.turn(prompt)] if script.agent in prompt else script.aside)

    engine.otherwise = reply


@pytest.fixture(params=Harness.names())
def program(request):
    return installed(request.param)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_session_with_tools_is_one_unbroken_line_of_calls_and_changes_no_configuration(
    program, scripted_engine, tokenizer_folder, tmp_path
):
    script = SCRIPTS[program.name]
    lead(scripted_engine, script)
    run, home, workspace = (tmp_path / name for name in ("run", "home", "workspace"))
    workspace.mkdir()
    name, text = script.config
    (home / name).parent.mkdir(parents=True)
    (home / name).write_text(text)
    before = files(home)
    headless = program.command_for(INSTRUCTION)[1 + len(program.arguments) :]
    options = ["--out", run, "--engine", scripted_engine.url, "--model", tokenizer_folder, "--harness", program.name]
    ended = subprocess.run(
        [Path(sys.executable).with_name("rolltap"), "record", *options, "--", *headless],
        cwd=workspace,
        env=clean_environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "héllo" in (workspace / "greeting.txt").read_text()
    assert before.items() <= files(home).items()

    (recorded,) = iter_sessions(run)
    session, calls = recorded.session, recorded.calls
    assert (session.status, session.harness) == ("completed", program.name)
    main = [call for call in calls if call.role == "agent"]
    later = "rendered" if script.rewrites else "bridged"
    assert [call.kind for call in main] == ["root", *[later] * (len(script.turns) - 1)]
    assert all(script.rewrites in call.kind_reason for call in main[1:] if script.rewrites)
    assert [call.status for call in calls] == ["completed"] * len(calls)
    sent = [request["token_ids"] for request in scripted_engine.requests]
    assert sorted(sent) == sorted(list(call.prompt_ids) for call in calls)
    traces, ledger = build_traces(calls, "prefix_merging")
    lines = [[call.call_id] for call in main] if script.rewrites else [[call.call_id for call in main]]
    assert all(line in [trace.call_ids for trace in traces] for line in lines)
    ledger.check()
    assert ledger.sampled == sum(len(call.completion_ids) for call in calls)
    assert ledger.trained == sum(len(call.completion_ids) for call in main)
    assert {event["kind"] for event in read_rows(run, "events")} <= {"call_started", "refused", "ended"}
    assert summarize(run).uncaptured_calls == 0
