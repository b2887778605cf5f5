import json

import pytest

from rolltap.addons.store.records import WEBSOCKET, Call, Event
from rolltap.trainer.doctor.findings import Observed, findings

HOST = {"host": "api.openai.com", "path": "/v1/chat/completions"}
OTHER = {"host": "api.x.com", "method": "POST", "path": "/v2/responses"}


def call(kind="root", **fields):
    return Call(
        **{"session_id": "s", "call_id": "c", "prompt_ids": [1], "kind": kind, **HOST, **fields}
    )


GOOD = [call(), call("bridged")]
REWRITTEN = "message 3 is not that of call c: 'a' where it had 'b'"
TOOLS = json.dumps([{"type": "function", "function": {"name": "send_mail"}}])
CALLS_BASH = json.dumps(
    {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
)
FINISHES = CALLS_BASH.replace("bash", "finish")
SUBMITS = CALLS_BASH.replace("{}", "{echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT}")
ANSWERED = json.dumps([{"role": "tool", "tool_call_id": "1", "content": "ok"}])
FORMAT = json.dumps(
    [
        {
            "role": "system",
            "content": "Begin with [[ ## answer ## ]], end with [[ ## completed ## ]].",
        }
    ]
)
WRITTEN = json.dumps(
    [{"role": "assistant", "content": "Mine."}, {"role": "user", "content": "Go on."}]
)


def run(**fields):
    return Observed(program="p", timeout=60.0, **fields)


SEEN = {
    "silent": run(),
    "said something": run(output="no key\n"),
    "died": run(output="Traceback:\nModuleNotFoundError: no httpx\n", exit_status=1),
    "died in silence": run(exit_status=5),
    "died on loopback": run(output="ConnectError: http://localhost:1/v1", exit_status=1),
    "uncaptured only": run(events=[Event(kind="uncaptured", **OTHER)] * 3),
    "mistyped": run(
        events=[Event(kind="uncaptured", **OTHER, detail="refused: did you mean /v1/responses?")]
    ),
    "distrusts": run(
        events=[Event(kind="refused", host="api.openai.com", detail="TLS failed: unknown ca")]
    ),
    "telemetry distrusts": run(
        calls=GOOD,
        events=[Event(kind="refused", host="t.example", detail="TLS failed: unknown ca")],
    ),
    "other credentials": run(events=[Event(kind="unauthorised")]),
    "rejected": run(events=[Event(kind="rejected", **OTHER, detail="n=2 is not served")]),
    "failed": run(calls=[*GOOD, call("bridged", status="failed", error="no room")]),
    "violated": run(
        calls=[*GOOD, call("bridged", violation="2 token ids but 1 log-probabilities")]
    ),
    "rewrites": run(calls=[*GOOD, call("rendered", kind_reason=REWRITTEN)]),
    "ambiguous": run(
        calls=[
            *GOOD,
            call("rendered", kind_reason="2 earlier calls fit equally well up to message 3"),
        ]
    ),
    "other tools": run(
        calls=[*GOOD, call("rendered", kind_reason="its tools are not those of any earlier call")]
    ),
    "untrained": run(
        calls=[call(role="auxiliary", role_evidence="no tools"), call("bridged", role="auxiliary")]
    ),
    "acts only": run(calls=[call(tools=TOOLS)]),
    "acts only and is asked again": run(calls=[call(tools=TOOLS), call("bridged")]),
    "gives no result": run(
        calls=[call(tools=TOOLS, reply=CALLS_BASH), call("bridged", parent_id="c")]
    ),
    "a tool that it has not": run(calls=[call(tools=TOOLS)], tool="get_price"),
    "a tool of a program without": run(calls=[call()], tool="get_price"),
    "a format of its own": run(calls=[call(messages=FORMAT)], exit_status=1),
    "a setting on loopback": run(places={"X_BASE_URL": "http://localhost:8000/v1"}),
    "a printed loopback": run(output="POST http://127.0.0.1:8000/v1/chat failed"),
    "refused on loopback": run(output="httpx.ConnectError: [Errno 111] Connection refused"),
    "other requests": run(
        events=[Event(kind="refused", host="t.example", path="/log", method="GET")]
    ),
    "no tools": run(calls=[call()]),
    "died at its tool call": run(calls=[call(reply=CALLS_BASH)], exit_status=1),
    "stopped after its second call": run(
        calls=[call(), call("bridged", call_id="d", parent_id="c", reply=CALLS_BASH)]
    ),
    "died without a call of a tool": run(calls=[call()], exit_status=2),
    "wrote a reply": run(calls=[*GOOD, call("bridged", parent_id="c", messages=WRITTEN)]),
    "status": run(calls=GOOD, exit_status=3),
    "hangs": run(calls=GOOD, exit_status=None, stopped="timeout"),
    "another version": run(
        calls=GOOD, version="2.0", tested_version="1.0", install="npm install x@1.0"
    ),
    "image": run(calls=GOOD, events=[Event(kind="hidden")] * 2),
    "telemetry": run(calls=GOOD, events=[Event(kind="refused", host="t.example", path="/log")]),
}
SAID = {
    "silent": ("problem", "did not use the proxy", "http://model.rolltap/v1"),
    "said something": ("problem", "did not use the proxy", "Does the output below say"),
    "died": (
        "problem",
        "The program ended with status 1: ModuleNotFoundError: no httpx. No model",
        "placeholder key",
    ),
    "died in silence": (
        "problem",
        "The program ended with status 5. No model call came.",
        "It printed nothing.",
    ),
    "died on loopback": (
        "problem",
        "'http://localhost:1/v1' in its output",
        "http://model.rolltap/v1",
    ),
    "uncaptured only": (
        "problem",
        "3 requests were not captured: POST api.x.com/v2/responses",
        "the base URL",
    ),
    "mistyped": ("problem", "did you mean /v1/responses?", "Correct the path"),
    "distrusts": ("problem", "TLS failed", "SSL_CERT_FILE"),
    "telemetry distrusts": ("note", "TLS failed", "SSL_CERT_FILE"),
    "other credentials": ("problem", "another user name and password", "HTTPS_PROXY"),
    "rejected": ("problem", "n=2 is not served", "Switch off"),
    "failed": ("problem", "no room", ""),
    "violated": ("problem", "2 token ids", ""),
    "rewrites": ("problem", "'a' where it had 'b'", "rewrote its history"),
    "ambiguous": ("problem", "fit equally well", "same question"),
    "other tools": ("problem", "its tools are not those", "other tools than before"),
    "untrained": ("problem", "auxiliary (no tools)", ""),
    "acts only": ("note", "offered 1 tool and called none: send_mail", "only looks"),
    "died at its tool call": ("problem", "call of bash was not answered", ""),
    "stopped after its second call": ("problem", "call of bash was not answered", ""),
    "died without a call of a tool": ("problem", "status 2", ""),
    "wrote a reply": ("problem", "an assistant message that no model wrote", ""),
    "acts only and is asked again": (
        "note",
        "offered 1 tool and called none: send_mail",
        "--tool NAME",
    ),
    "gives no result": ("note", "called bash, and no tool's result came back", "--tool NAME"),
    "a tool that it has not": (
        "problem",
        "never offered a tool get_price. It offers send_mail.",
        "--tool",
    ),
    "a tool of a program without": (
        "problem",
        "never offered a tool get_price. It offers none.",
        "",
    ),
    "a format of its own": (
        "note",
        "status 1. It wants replies in a text format of its own ([[ ## answer ## ]])",
        "",
    ),
    "a setting on loopback": (
        "problem",
        "there is 'http://localhost:8000/v1' in X_BASE_URL.",
        "http://model.rolltap/v1",
    ),
    "a printed loopback": (
        "problem",
        "'http://127.0.0.1:8000/v1/chat' in its output",
        "http://model.rolltap/v1",
    ),
    "refused on loopback": (
        "problem",
        "'Connection refused' in its output",
        "http://model.rolltap/v1",
    ),
    "other requests": (
        "problem",
        "Only other requests came through the proxy: GET t.example/log.",
        "HTTPS_PROXY",
    ),
    "no tools": ("note", "The program offers the model no tools", "captured"),
    "status": ("note", "status 3", ""),
    "hangs": ("problem", "within 60 s (timeout)", "--timeout"),
    "another version": ("note", "version 2.0; its preset was tested with 1.0", "npm install x@1.0"),
    "image": ("note", "In 2 calls images were replaced by a text", ""),
    "telemetry": ("note", "t.example", "rolltap_allow"),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_finding_says_what_was_seen_and_what_to_set(name):
    level, text, advice = SAID[name]
    found = findings(SEEN[name])
    assert [f for f in found if f.level == level and text in f.text and advice in f.advice], found
    assert any(f.level == "problem" for f in found) == (level == "problem")


def test_a_program_that_is_continued_has_no_finding():
    assert findings(run(calls=GOOD)) == []


def test_a_program_that_got_the_result_of_a_tool_has_no_finding():
    calls = [call(tools=TOOLS, reply=CALLS_BASH), call("bridged", parent_id="c", messages=ANSWERED)]
    assert findings(run(calls=calls)) == []


def test_a_websocket_is_no_host_to_allow():
    assert findings(run(calls=GOOD, events=[Event(kind="refused", **HOST, detail=WEBSOCKET)])) == []


def test_a_cause_that_is_known_is_not_guessed_at():
    for name in ("uncaptured only", "distrusts", "other credentials", "rejected", "other requests"):
        assert not any("did not use the proxy" in finding.text for finding in findings(SEEN[name]))


@pytest.mark.parametrize("name", ["died", "died in silence"])
def test_a_program_that_failed_by_itself_is_told_so_first_with_little_on_proxies(name):
    (finding,) = findings(SEEN[name])
    assert finding.text.startswith("The program ended with status")
    assert "Java" not in finding.advice


def test_problems_come_first():
    found = findings(run(calls=[*GOOD, call("rendered", kind_reason="r")], exit_status=1))
    assert [finding.level for finding in found] == ["problem", "note"]


def test_output_is_referred_to_when_there_is_some():
    for output in ("", "boom\n"):
        for seen in (run(output=output), run(calls=GOOD, exit_status=1, output=output)):
            assert any("below" in finding.advice for finding in findings(seen)) == bool(output)


def test_a_program_that_used_the_proxy_is_not_told_otherwise():
    calls = [call(reply=CALLS_BASH)]
    assert not any(
        "--tool NAME" in finding.advice for finding in findings(run(calls=calls, exit_status=1))
    )


@pytest.mark.parametrize("last", [FINISHES, SUBMITS])
def test_the_tool_call_with_which_a_program_ends_needs_no_answer(last):
    assert (
        findings(run(calls=[call(), call("bridged", call_id="d", parent_id="c", reply=last)])) == []
    )


def test_a_tool_call_of_a_side_question_needs_no_answer():
    assert findings(run(calls=[*GOOD, call(call_id="d", role="auxiliary", reply=CALLS_BASH)])) == []


def test_a_branch_of_a_conversation_is_continued():
    branch = [
        call(reply=CALLS_BASH),
        *(call("bridged", call_id=name, parent_id="c") for name in "de"),
    ]
    assert findings(run(calls=branch)) == []


def test_a_reply_that_the_token_limit_cut_is_no_fault_of_the_tools():
    found = findings(run(calls=[call(tools=TOOLS, finish_reason="length")]))
    assert [finding.level for finding in found] == ["problem"]
    assert "the token limit of the program cut the scripted reply" in found[0].text
    assert "max_tokens" in found[0].advice
