import io
import json
from dataclasses import replace

from rich.console import Console

from rolltap.addons.store.records import Call, Event
from rolltap.trainer.doctor.diagnosis import LAST_LINES, Diagnosis
from rolltap.trainer.doctor.findings import Observed

CALL = Call(
    session_id="s",
    call_id="c",
    prompt_ids=[1],
    role_evidence="header x: [bold]",
    host="h",
    path="/v1/x",
    dialect="openai-chat",
    model="m[0]",
    tools=json.dumps([{"type": "function", "function": {"name": "bash"}}]),
    reply=json.dumps(
        {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
    ),
)
NEXT = Call(
    session_id="s",
    call_id="d",
    prompt_ids=[1],
    kind="bridged",
    parent_id="c",
    messages=json.dumps([{"role": "tool", "content": "ok"}]),
)


def diagnosis_of(*calls, **fields):
    return Diagnosis(Observed(program="p", calls=[*calls], **fields))


def printed(diagnosis):
    console = Console(width=100, file=io.StringIO())
    console.print(diagnosis)
    return console.file.getvalue()


def test_a_ready_program_is_said_in_the_first_line():
    text = printed(diagnosis_of(CALL, NEXT, output="chatter", quirks=["Is odd."]))
    assert text.startswith("p: ready. 2 calls captured, 1 continued token for token.\n")
    assert "API: openai-chat at h/v1/x, model m[0]: 1 call\n" in text
    assert "header x: [bold]" in text
    assert "quirk: Is odd." in text
    assert "chatter" not in text


def test_a_program_that_is_captured_and_has_no_history_is_not_called_ready():
    diagnosis = diagnosis_of(Call(session_id="s", call_id="c", prompt_ids=[1]))
    assert diagnosis.verdict == (
        "p: 1 call captured; no call continued another, so continuity was not tried."
    )
    assert diagnosis.problems == 0
    assert not diagnosis.ready
    assert diagnosis.to_json()["ok"] is False


def test_a_program_of_whose_tools_no_result_was_seen_is_not_called_ready():
    told = replace(CALL, reply=None)
    asked = replace(NEXT, messages="[]")
    diagnosis = diagnosis_of(told, asked)
    assert diagnosis.verdict == (
        "p: 2 calls captured, 1 continued token for token; no tool's result was seen."
    )
    assert diagnosis.problems == 0
    assert not diagnosis.ready
    assert diagnosis_of(replace(told, tools=None), asked).ready


def test_a_call_after_a_turn_that_the_program_wrote_is_not_counted_as_continued():
    written = json.dumps([{"role": "assistant", "content": "Mine."}])
    last = replace(NEXT, call_id="e", messages=written)
    diagnosis = diagnosis_of(CALL, NEXT, last)
    assert diagnosis.seen.continued == [NEXT]
    assert diagnosis.verdict == "p: 1 problem."


def test_problems_come_with_advice_other_requests_and_the_end_of_the_output():
    events = [Event(kind="refused", method="GET", host="t.example", path="/x")] * 3
    lines = [f"line {n}." for n in range(40)]
    text = printed(diagnosis_of(events=events, exit_status=2, output="\n".join(lines)))
    assert text.startswith("p: 1 problem.\n")
    assert "problem: The program ended with status 2: line 39. No model call came." in text
    assert "trust_env=True" in text
    assert "refused: t.example." in text
    shown = [line for line in lines if f" {line}" in text]
    assert shown == lines[-LAST_LINES:]


def test_the_json_has_the_calls_with_their_tools():
    value = json.loads(json.dumps(diagnosis_of(CALL, NEXT).to_json()))
    assert value["ok"] is True
    assert value["findings"] == []
    call = value["calls"][0]
    assert call["tools"] == call["tool_calls"] == ["bash"]
    assert call["role_evidence"] == "header x: [bold]"
