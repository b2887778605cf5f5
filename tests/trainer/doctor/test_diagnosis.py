import json
from dataclasses import replace

from rich.console import Console

from rolltap.addons.store.records import Call, Event
from rolltap.trainer.doctor.diagnosis import LAST_LINES, Diagnosis
from rolltap.trainer.doctor.findings import Observed

REPLY = json.dumps(
    {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
)
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
    reply=REPLY,
)
RESULT = json.dumps([{"role": "tool", "content": "ok"}])
NEXT = Call(
    session_id="s", call_id="d", prompt_ids=[1], kind="bridged", parent_id="c", messages=RESULT
)


def printed(diagnosis):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(diagnosis)
        return console.export_text()


def test_a_ready_program_is_said_in_the_first_line():
    diagnosis = Diagnosis(
        Observed(program="p", calls=[CALL, NEXT], output="chatter", quirks=["Is odd."])
    )
    text = printed(diagnosis)
    assert text.splitlines()[0] == "p: ready. 2 calls captured, 1 continued token for token."
    assert "API: openai-chat at h/v1/x, model m[0]: 1 call\n" in text
    assert "header x: [bold]" in text
    assert "quirk: Is odd." in text
    assert "chatter" not in text


def test_a_program_that_is_captured_and_has_no_history_is_not_called_ready():
    diagnosis = Diagnosis(
        Observed(program="p", calls=[Call(session_id="s", call_id="c", prompt_ids=[1])])
    )
    assert diagnosis.verdict == (
        "p: 1 call captured; no call continued another, so continuity was not tried."
    )
    assert (diagnosis.problems, diagnosis.ready, diagnosis.to_json()["ok"]) == (0, False, False)


def test_a_program_of_whose_tools_no_result_was_seen_is_not_called_ready():
    told, asked = replace(CALL, reply=None), replace(NEXT, messages="[]")
    diagnosis = Diagnosis(Observed(program="p", calls=[told, asked]))
    assert (
        diagnosis.verdict
        == "p: 2 calls captured, 1 continued token for token; no tool's result was seen."
    )
    assert (diagnosis.problems, diagnosis.ready) == (0, False)
    assert Diagnosis(Observed(program="p", calls=[replace(told, tools=None), asked])).ready


def test_a_call_after_a_turn_that_the_program_wrote_is_not_counted_as_continued():
    written = json.dumps([{"role": "assistant", "content": "Mine."}])
    last = Call(
        session_id="s", call_id="e", prompt_ids=[1], kind="bridged", parent_id="c", messages=written
    )
    seen = Observed(program="p", calls=[CALL, NEXT, last])
    assert (seen.continued, Diagnosis(seen).verdict) == ([NEXT], "p: 1 problem.")


def test_problems_come_with_advice_other_requests_and_the_end_of_the_output():
    events = [Event(kind="refused", method="GET", host="t.example", path="/x")] * 3
    lines = [f"line {n}." for n in range(40)]
    text = printed(
        Diagnosis(Observed(program="p", events=events, exit_status=2, output="\n".join(lines)))
    )
    assert text.splitlines()[0] == "p: 1 problem."
    assert "problem: The program ended with status 2: line 39. No model call came." in text
    assert "trust_env=True" in text
    assert "refused: t.example." in text
    assert [f" {line}" in text for line in lines] == [False] * (40 - LAST_LINES) + [
        True
    ] * LAST_LINES


def test_the_json_has_the_calls_with_their_tools():
    value = json.loads(json.dumps(Diagnosis(Observed(program="p", calls=[CALL, NEXT])).to_json()))
    assert (value["ok"], value["findings"]) == (True, [])
    assert value["calls"][0]["tools"] == value["calls"][0]["tool_calls"] == ["bash"]
    assert value["calls"][0]["role_evidence"] == "header x: [bold]"
