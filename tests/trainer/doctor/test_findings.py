import json

import pytest

from rolltap.addons.store.records import Call, Event
from rolltap.trainer.doctor.findings import findings
from rolltap.trainer.doctor.observed import Observed, loopback_urls

HOST = {"host": "api.openai.com", "path": "/v1/chat/completions"}
OTHER = {"host": "api.x.com", "method": "POST", "path": "/v2/responses"}


def call(kind="root", **fields):
    return Call(**{"session_id": "s", "call_id": "c", "prompt_ids": [1], "kind": kind, **HOST, **fields})


GOOD = [call(), call("bridged")]
REWRITTEN = "message 3 is not that of call c: 'a' where it had 'b'"
TOOLS = json.dumps([{"type": "function", "function": {"name": "send_mail"}}])


def run(**fields):
    return Observed(program="p", timeout=60.0, **fields)


SEEN = {
    "silent": run(),
    "old node": run(node="20.20.2"),
    "new node": run(node="22.21.0"),
    "loopback": run(loopback=["OPENAI_BASE_URL=http://localhost:1/v1"]),
    "uncaptured only": run(events=[Event(kind="uncaptured", **OTHER)] * 3),
    "distrusts": run(events=[Event(kind="refused", host="api.openai.com", detail="TLS failed: unknown ca")]),
    "telemetry distrusts": run(
        calls=GOOD, events=[Event(kind="refused", host="t.example", detail="TLS failed: unknown ca")]
    ),
    "without credentials": run(events=[Event(kind="unauthorised")]),
    "rejected": run(events=[Event(kind="rejected", **OTHER, detail="n=2 is not served")]),
    "failed": run(calls=[*GOOD, call("bridged", status="failed", error="no room")]),
    "violated": run(calls=[*GOOD, call("bridged", violation="2 token ids but 1 log-probabilities")]),
    "rewrites": run(calls=[*GOOD, call("rendered", kind_reason=REWRITTEN)]),
    "ambiguous": run(calls=[*GOOD, call("rendered", kind_reason="2 earlier calls fit equally well up to message 3")]),
    "other tools": run(calls=[*GOOD, call("rendered", kind_reason="its tools are not those of any earlier call")]),
    "untrained": run(calls=[call(role="auxiliary", role_evidence="no tools"), call("bridged", role="auxiliary")]),
    "acts only": run(calls=[call(tools=TOOLS)]),
    "no tools": run(calls=[call()]),
    "status": run(calls=GOOD, exit_status=3),
    "hangs": run(calls=GOOD, exit_status=None, stopped="timeout"),
    "another version": run(calls=GOOD, version="2.0", tested_version="1.0", install="npm install x@1.0"),
    "image": run(calls=GOOD, events=[Event(kind="hidden")]),
    "telemetry": run(calls=GOOD, events=[Event(kind="refused", host="t.example", path="/log")]),
}
SAID = {
    "silent": ("problem", "did not use the proxy", "trust_env=True"),
    "old node": ("problem", "Node 20.20.2", "Node 22.21"),
    "new node": ("problem", "did not use the proxy", ""),
    "loopback": ("problem", "OPENAI_BASE_URL=http://localhost:1/v1", "http://model.rolltap/v1"),
    "uncaptured only": ("problem", "3 times not captured: POST api.x.com/v2/responses", "rolltap_prefix"),
    "distrusts": ("problem", "TLS failed", "SSL_CERT_FILE"),
    "telemetry distrusts": ("note", "TLS failed", "SSL_CERT_FILE"),
    "without credentials": ("problem", "without the user name and password", "HTTPS_PROXY"),
    "rejected": ("problem", "n=2 is not served", "Switch it off"),
    "failed": ("problem", "no room", ""),
    "violated": ("problem", "2 token ids", ""),
    "rewrites": ("problem", "'a' where it had 'b'", "rewrote its history"),
    "ambiguous": ("problem", "fit equally well", "same question"),
    "other tools": ("problem", "its tools are not those", "other tools than before"),
    "untrained": ("problem", "auxiliary (no tools)", ""),
    "acts only": ("note", "none of them was called and answered: send_mail", "only looks"),
    "no tools": ("note", "offers the model no tools", "captured"),
    "status": ("note", "status 3", "last lines"),
    "hangs": ("problem", "within 60 s (timeout)", "--timeout"),
    "another version": ("note", "version 2.0; its preset was tested with 1.0", "npm install x@1.0"),
    "image": ("note", "an image", ""),
    "telemetry": ("note", "t.example", "rolltap_allow"),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_was_seen_is_said_with_what_to_set(name):
    level, text, advice = SAID[name]
    found = findings(SEEN[name])
    assert [f for f in found if f.level == level and text in f.text and advice in f.advice], found
    assert any(f.level == "problem" for f in found) == (level == "problem")


def test_a_program_that_is_continued_has_no_finding():
    assert findings(run(calls=GOOD)) == []


def test_a_cause_that_is_known_is_not_guessed_at():
    for name in ("uncaptured only", "distrusts", "without credentials", "rejected"):
        assert not any("did not use the proxy" in finding.text for finding in findings(SEEN[name]))


def test_problems_come_first():
    found = findings(run(calls=[*GOOD, call("rendered", kind_reason="r")], exit_status=1))
    assert [finding.level for finding in found] == ["problem", "note"]


@pytest.mark.parametrize(
    ("environment", "command", "found"),
    [
        ({"OPENAI_BASE_URL": "http://localhost:8000/v1"}, [], ["OPENAI_BASE_URL=http://localhost:8000/v1"]),
        ({}, ["x", "--url=http://127.0.0.1:1"], ["--url=http://127.0.0.1:1"]),
        ({"HTTPS_PROXY": "http://127.0.0.1:1", "no_proxy": "localhost"}, ["x"], []),
        ({"A": "https://api.openai.com"}, ["x"], []),
    ],
)
def test_a_url_on_loopback_is_found_in_variables_and_arguments(environment, command, found):
    assert loopback_urls(environment, command) == found
