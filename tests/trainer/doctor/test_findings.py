import json

import pytest

from rolltap.addons.store.records import WEBSOCKET, Call, Event
from rolltap.trainer.doctor.findings import Observed, findings

API = {"host": "api.openai.com", "path": "/v1/chat/completions"}
UNKNOWN_API = {"host": "api.x.com", "method": "POST", "path": "/v2/responses"}
LOGS = {"host": "t.example", "path": "/log", "method": "GET"}


def call(kind="root", **fields):
    names = {"session_id": "s", "call_id": "c", "prompt_ids": [1]}
    return Call(**{**names, "kind": kind, **API, **fields})


def second(**fields):
    """Return a call that goes on with the first one."""
    return call("bridged", parent_id="c", **{"call_id": "d", **fields})


GOOD = [call(), call("bridged")]
REWRITTEN = "message 3 is not that of call c: 'a' where it had 'b'"
AMBIGUOUS = "2 earlier calls fit equally well up to message 3"
OTHER_TOOLS = "its tools are not those of any earlier call"
UNKNOWN_CA = "TLS failed: unknown ca"
TOOLS = json.dumps([{"type": "function", "function": {"name": "send_mail"}}])
BASH = json.dumps(
    {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
)
FINISH = BASH.replace("bash", "finish")
SUBMIT = BASH.replace("{}", "{echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT}")
ANSWERED = json.dumps([{"role": "tool", "tool_call_id": "1", "content": "ok"}])
FORMAT = json.dumps([{"role": "system", "content": "Begin with [[ ## answer ## ]]."}])
WRITTEN = json.dumps(
    [{"role": "assistant", "content": "Mine."}, {"role": "user", "content": "Go on."}]
)
ENDPOINT = "http://model.rolltap/v1"


def run(*calls, events=(), **fields):
    return Observed(program="p", timeout=60.0, calls=[*calls], events=[*events], **fields)


def saw(kind, *calls, times=1, **fields):
    """Return what was seen of a program with events of a kind."""
    return run(*calls, events=[Event(kind=kind, **fields)] * times)


FOUND = {
    "silent": (run(), "problem", "did not use the proxy", ENDPOINT),
    "said something": (
        run(output="no key\n"),
        "problem",
        "did not use the proxy",
        "Does the output below say",
    ),
    "died": (
        run(output="Traceback:\nModuleNotFoundError: no httpx\n", exit_status=1),
        "problem",
        "The program ended with status 1: ModuleNotFoundError: no httpx. No model",
        "placeholder key",
    ),
    "died in silence": (
        run(exit_status=5),
        "problem",
        "The program ended with status 5. No model call came.",
        "It printed nothing.",
    ),
    "died on loopback": (
        run(output="ConnectError: http://localhost:1/v1", exit_status=1),
        "problem",
        "'http://localhost:1/v1' in its output",
        ENDPOINT,
    ),
    "uncaptured only": (
        saw("uncaptured", times=3, **UNKNOWN_API),
        "problem",
        "3 requests were not captured: POST api.x.com/v2/responses",
        "the base URL",
    ),
    "mistyped": (
        saw("uncaptured", **UNKNOWN_API, detail="refused: did you mean /v1/responses?"),
        "problem",
        "did you mean /v1/responses?",
        "Correct the path",
    ),
    "distrusts": (
        saw("refused", host="api.openai.com", detail=UNKNOWN_CA),
        "problem",
        "TLS failed",
        "SSL_CERT_FILE",
    ),
    "telemetry distrusts": (
        saw("refused", *GOOD, host="t.example", detail=UNKNOWN_CA),
        "note",
        "TLS failed",
        "SSL_CERT_FILE",
    ),
    "other credentials": (
        saw("unauthorised"),
        "problem",
        "another user name and password",
        "HTTPS_PROXY",
    ),
    "rejected": (
        saw("rejected", **UNKNOWN_API, detail="n=2 is not served"),
        "problem",
        "n=2 is not served",
        "Switch off",
    ),
    "failed": (run(*GOOD, second(status="failed", error="no room")), "problem", "no room", ""),
    "violated": (
        run(*GOOD, second(violation="2 token ids but 1 log-probabilities")),
        "problem",
        "2 token ids",
        "",
    ),
    "rewrites": (
        run(*GOOD, call("rendered", kind_reason=REWRITTEN)),
        "problem",
        "'a' where it had 'b'",
        "rewrote its history",
    ),
    "ambiguous": (
        run(*GOOD, call("rendered", kind_reason=AMBIGUOUS)),
        "problem",
        "fit equally well",
        "same question",
    ),
    "other tools": (
        run(*GOOD, call("rendered", kind_reason=OTHER_TOOLS)),
        "problem",
        "its tools are not those",
        "other tools than before",
    ),
    "untrained": (
        run(call(role="auxiliary", role_evidence="no tools"), second(role="auxiliary")),
        "problem",
        "auxiliary (no tools)",
        "",
    ),
    "acts only": (
        run(call(tools=TOOLS)),
        "note",
        "offered 1 tool and called none: send_mail",
        "only looks",
    ),
    "acts only and is asked again": (
        run(call(tools=TOOLS), call("bridged")),
        "note",
        "offered 1 tool and called none: send_mail",
        "--tool NAME",
    ),
    "died at its tool call": (
        run(call(reply=BASH), exit_status=1),
        "problem",
        "call of bash was not answered",
        "",
    ),
    "stopped after its second call": (
        run(call(), second(reply=BASH)),
        "problem",
        "call of bash was not answered",
        "",
    ),
    "died without a call of a tool": (run(call(), exit_status=2), "problem", "status 2", ""),
    "wrote a reply": (
        run(*GOOD, second(messages=WRITTEN)),
        "problem",
        "an assistant message that no model wrote",
        "",
    ),
    "gives no result": (
        run(call(tools=TOOLS, reply=BASH), second(call_id="c")),
        "note",
        "called bash, and no tool's result came back",
        "--tool NAME",
    ),
    "a tool that it has not": (
        run(call(tools=TOOLS), tool="get_price"),
        "problem",
        "never offered a tool get_price. It offers send_mail.",
        "--tool",
    ),
    "a tool of a program without": (
        run(call(), tool="get_price"),
        "problem",
        "never offered a tool get_price. It offers none.",
        "",
    ),
    "a format of its own": (
        run(call(messages=FORMAT), exit_status=1),
        "note",
        "status 1. It wants replies in a text format of its own ([[ ## answer ## ]])",
        "",
    ),
    "a setting on loopback": (
        run(places={"X_BASE_URL": "http://localhost:8000/v1"}),
        "problem",
        "there is 'http://localhost:8000/v1' in X_BASE_URL.",
        ENDPOINT,
    ),
    "a printed loopback": (
        run(output="POST http://127.0.0.1:8000/v1/chat failed"),
        "problem",
        "'http://127.0.0.1:8000/v1/chat' in its output",
        ENDPOINT,
    ),
    "refused on loopback": (
        run(output="httpx.ConnectError: [Errno 111] Connection refused"),
        "problem",
        "'Connection refused' in its output",
        ENDPOINT,
    ),
    "other requests": (
        saw("refused", **LOGS),
        "problem",
        "Only other requests came through the proxy: GET t.example/log.",
        "HTTPS_PROXY",
    ),
    "no tools": (run(call()), "note", "The program offers the model no tools", "captured"),
    "status": (run(*GOOD, exit_status=3), "note", "status 3", ""),
    "hangs": (
        run(*GOOD, exit_status=None, stopped="timeout"),
        "problem",
        "within 60 s (timeout)",
        "--timeout",
    ),
    "another version": (
        run(*GOOD, version="2.0", tested_version="1.0", install="npm install x@1.0"),
        "note",
        "version 2.0; its preset was tested with 1.0",
        "npm install x@1.0",
    ),
    "image": (
        saw("hidden", *GOOD, times=2),
        "note",
        "In 2 calls images were replaced by a text",
        "",
    ),
    "telemetry": (saw("refused", *GOOD, **LOGS), "note", "t.example", "rolltap_allow"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_finding_says_what_was_seen_and_what_to_set(name):
    seen, level, text, advice = FOUND[name]
    found = findings(seen)
    said = [each for each in found if text in each.text and advice in each.advice]
    assert level in {each.level for each in said}, found
    assert ("problem" in {each.level for each in found}) == (level == "problem")


SOUND = {
    "it is continued": run(*GOOD),
    "it got the result of a tool": run(
        call(tools=TOOLS, reply=BASH), call("bridged", parent_id="c", messages=ANSWERED)
    ),
    "a websocket is no host to allow": saw("refused", *GOOD, **API, detail=WEBSOCKET),
    "a tool ended it": run(call(), second(reply=FINISH)),
    "a command ended it": run(call(), second(reply=SUBMIT)),
    "a side question calls a tool": run(*GOOD, call(call_id="d", role="auxiliary", reply=BASH)),
    "its conversation branches": run(call(reply=BASH), second(), second(call_id="e")),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_program_has_no_finding(name):
    assert findings(SOUND[name]) == []


@pytest.mark.parametrize(
    "name", ["uncaptured only", "distrusts", "other credentials", "rejected", "other requests"]
)
def test_a_cause_that_is_known_is_not_guessed_at(name):
    for finding in findings(FOUND[name][0]):
        assert "did not use the proxy" not in finding.text


@pytest.mark.parametrize("name", ["died", "died in silence"])
def test_a_program_that_failed_by_itself_is_told_so_first_with_little_on_proxies(name):
    (finding,) = findings(FOUND[name][0])
    assert finding.text.startswith("The program ended with status")
    assert "Java" not in finding.advice


def test_problems_come_first():
    found = findings(run(*GOOD, call("rendered", kind_reason="r"), exit_status=1))
    assert [finding.level for finding in found] == ["problem", "note"]


@pytest.mark.parametrize("how", [{}, {"exit_status": 1}])
@pytest.mark.parametrize("output", ["", "boom\n"])
def test_output_is_referred_to_when_there_is_some(output, how):
    found = findings(run(*(GOOD if how else []), output=output, **how))
    assert any("below" in finding.advice for finding in found) == bool(output)


def test_a_program_that_died_at_its_tool_call_is_not_told_to_choose_a_tool():
    for finding in findings(FOUND["died at its tool call"][0]):
        assert "--tool NAME" not in finding.advice


def test_a_reply_that_the_token_limit_cut_is_no_fault_of_the_tools():
    (finding,) = findings(run(call(tools=TOOLS, finish_reason="length")))
    assert finding.level == "problem"
    assert "the token limit of the program cut the scripted reply" in finding.text
    assert "max_tokens" in finding.advice
