"""The real programs, unmodified and headless, led by the scripted engine over TLS.

Each program is recorded with `rolltap record` and has a configuration of its own in the home
folder. It writes a file with a tool of its own, reads it back with another call, and ends.
"""

import pytest

from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.traces.build import build_traces
from tests.deep import DEEP
from tests.harness.play import installed, tool_call
from tests.harness.programs import PROGRAMS

pytestmark = pytest.mark.harness

WRITE, READ = "printf 'héllo\\n' > greeting.txt", "cat greeting.txt"
# programs must not parse it as options or substitute its braces
INSTRUCTION = "- Write {greeting} into greeting.txt, then read it."


_EDIT = """\
greeting.txt
<<<<<<< SEARCH
{}=======
{}>>>>>>> REPLACE
"""
OWN_CHANGES = {"aider": "message 7 is not that of call"}
"""A change that a program makes in its history, as the reason of its calls says it: none is
continued.

aider sends the files as they are now, before the conversation.
"""


def turns(name):
    """Return the model's replies to the agent."""
    if name == "aider":
        # the first edit replaces a line that is not there: aider answers with the real lines
        missed = _EDIT.format("hello\n", "héllo\n")
        return [f"So:\n\n{missed}", "Then I make it.\n\n" + _EDIT.format("", "héllo\n")]
    program = PROGRAMS[name]
    file = {"CONTENT": "héllo\n", "notes-{n}.txt": "greeting.txt"}
    write = program.call(1, file) if program.writes else program.call(0, {"COMMAND": WRITE})
    end = tool_call(*program.end) if program.end else "I wrote the greeting."
    return [tool_call(*write), tool_call(*program.call(0, {"COMMAND": READ})), end]


def greeting(name):
    """Return the function of a prompt that leads a program, by the results of tools or its own
    texts in the prompt."""

    def reply(prompt):
        if PROGRAMS[name].agent not in prompt:
            return PROGRAMS[name].aside
        replies = turns(name)
        own = sum(text.strip() in prompt for text in replies)
        return replies[own if name == "aider" else prompt.count("<tool_response>")]

    return reply


SLOW = ("kilo", "openhands")
"""Started for longest; short, `opencode` stands for the one and `mini-swe-agent` for the other."""

RERUN = ("claude-code", "codex", "gemini-cli", "qwen-code")
"""Run again short, one of each API; deep, all are."""

OF_THE_PROGRAM = (
    "the tool's result is another one",  # of qwen-code, which may lose the output of a command
    "skill by name (Available: ",  # of gemini-cli, in the order in which its skills were loaded
)
"""Differences of a rerun that a busy machine decides in the program, and nothing of ours."""


@pytest.fixture(params=[name for name in Harness.names() if DEEP or name not in SLOW])
def program(request):
    return installed(request.param)


def files(folder):
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[path.relative_to(folder)] = path.read_bytes()
    return found


def test_a_session_with_tools_is_one_unbroken_line_of_calls_changes_no_configuration_and_reruns(
    program, lead, record, run_rerun, home, workspace, scripted_engine
):
    lead(greeting(program.name))
    name, text = PROGRAMS[program.name].config
    own_change = OWN_CHANGES.get(program.name)
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_text(text)
    before = files(home)
    played = record(INSTRUCTION, harness=program, keys={})
    assert "héllo" in (workspace / "greeting.txt").read_text()
    assert before.items() <= files(home).items()

    session = played.session
    calls = played.calls
    main = played.main
    assert (session.status, session.harness) == ("completed", program.name)
    later = "rendered" if own_change else "bridged"
    assert [call.kind for call in main] == ["root", *[later] * (len(turns(program.name)) - 1)]
    assert not own_change or all(own_change in call.kind_reason for call in main[1:])
    played.check_whole()
    sent = [request["token_ids"] for request in scripted_engine.requests]
    assert sorted(sent) == sorted(list(call.prompt_ids) for call in calls)
    traces, ledger = build_traces(calls, "prefix_merging")
    lines = [[call.call_id] for call in main] if own_change else [[call.call_id for call in main]]
    assert all(line in [trace.call_ids for trace in traces] for line in lines)
    ledger.check()
    assert ledger.trained == sum(len(call.completion_ids) for call in main)
    assert played.kinds <= {"call_started", "refused", "ended"}

    if not (DEEP or program.name in RERUN):
        return
    for _ in range(3):
        again = run_rerun(program, INSTRUCTION, before, keys={})
        said = again.stdout + again.stderr
        differs = any(difference in said for difference in OF_THE_PROGRAM)
        if not differs:
            break
    if differs:  # the recorded session itself lost an output
        assert again.returncode == 3, said
        return
    assert again.returncode == 0, said
    assert f"{len(calls)} of {len(calls)} recorded calls answered; exit status 0" in again.stderr
    assert "héllo" in (workspace / "greeting.txt").read_text()
