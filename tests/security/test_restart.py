"""A recorder is killed in the middle of sessions. The next one on the same run continues them, and no others."""

import json
import os
import random
import signal

import pytest

from rolltap.addons.dialects.model_call import sign
from rolltap.addons.store.tables import run_files
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.runtimes.environment import SESSION_END
from tests.deep import cases
from tests.recorder_process import CHAT

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at":  "caf\\u00e9"}}\n</tool_call>'
RETRY = {"x-stainless-retry-count": "1"}


def user(text="Hello"):
    return {"role": "user", "content": text}


def body(messages, **fields):
    return {"model": "m", "messages": messages, "tools": [TOOL], **fields}


def ask(client, messages, headers=None, **fields):
    """Return the reply's body without its time."""
    response = client.post(CHAT, json=body(messages, **fields), headers=headers)
    assert response.status_code == 200, response.text
    return {name: value for name, value in response.json().items() if name != "created"}


def go_on(messages, reply):
    """Return the conversation with the reply and an answer to it."""
    message = reply["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "Nothing."} for call in calls]
    return [*messages, message, *(answers or [user("Go on")])]


def kinds(recorder, session="s1"):
    calls = sorted(recorder.rows("calls"), key=lambda call: call["started_at"])
    return [call["kind"] for call in calls if call["session_id"] == session]


def whole(recorder, call_id):
    """Return the prompt of a recorded call."""
    calls = {call["call_id"]: call for call in recorder.rows("calls")}
    call = calls[call_id]
    parent = calls.get(call["parent_id"])
    before = whole(recorder, parent["call_id"]) + parent["completion_ids"] if parent else []
    return before + call["prompt_tail_ids"]


@pytest.fixture
def killed(start):
    """Return a function that starts a recorder and kills the one before."""
    recorders = []

    def restart():
        if recorders:
            recorders[-1].stop(signal.SIGKILL)
        recorders.append(start())
        return recorders[-1]

    return restart


class TestContinuity:
    def test_a_session_goes_on_token_for_token_after_each_kill(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say("<think>\nI look.\n</think>\n\nSo:\n" + LOOK)
        messages = [user()]
        for number in range(4):
            recorder = killed()
            with recorder.client() as client:
                messages = go_on(messages, ask(client, messages))
            assert kinds(recorder) == ["root"] + ["bridged"] * number
        sent = [request["token_ids"] for request in scripted_engine.requests]
        calls = sorted(recorder.rows("calls"), key=lambda call: call["started_at"])
        assert sent == [whole(recorder, call["call_id"]) for call in calls]

    def test_sessions_whose_calls_were_running_go_on_from_their_last_committed_call(self, killed, scripted_engine):
        scripted_engine.replies += [Say("One."), Say("two three", hold_after=1)]
        recorder = killed()
        with recorder.client() as client:
            messages = go_on([user()], ask(client, [user()]))
            with client.stream("POST", CHAT, json=body(messages, stream=True)) as response:
                next(response.iter_lines())
                assert scripted_engine.holding.wait(30)
                recorder = killed()
        scripted_engine.replies.append(Say("Three."))
        with recorder.client() as client:
            assert ask(client, messages)["choices"][0]["message"]["content"] == "Three."
        assert kinds(recorder) == ["root", "bridged"]

    def test_a_side_question_is_still_one(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say("Hi.")
        with killed().client() as client:
            ask(client, [user()])
        recorder = killed()
        with recorder.client() as client:
            ask(client, [user("Name this.")], tools=[])
        assert sorted(call["role"] for call in recorder.rows("calls")) == ["agent", "auxiliary"]


class TestOtherSessions:
    def test_a_session_with_a_similar_name_gets_nothing_of_it(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say(LOOK)
        with killed().client() as client:
            mine = ask(client, [user()])
        recorder = killed()
        names = ["s", "s11", "S1", "s1-", "s1.", "%25"]
        for name in names:
            with recorder.client(name) as client:
                assert ask(client, [user()], RETRY)["id"] != mine["id"]
                ask(client, go_on([user()], mine))
        rows = [call for call in recorder.rows("calls") if call["session_id"] != "s1"]
        assert len(rows) == 2 * len(names)
        assert {call["parent_id"] for call in rows} == {None}

    def test_a_forged_id_of_another_sessions_call_restores_nothing(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say("<think>\nMy secret.\n</think>\n\nHi.")
        recorder = killed()
        with recorder.client("victim") as client:
            ask(client, [user()])
        (call,) = recorder.rows("calls")
        recorder = killed()
        block = {"type": "thinking", "thinking": "", "signature": sign(call["call_id"])}
        echo = {"role": "assistant", "content": [block, {"type": "text", "text": "Hi."}]}
        request = {"model": "m", "max_tokens": 50, "messages": [user("Hey"), echo, user("Go on")]}
        with recorder.client("attacker") as client:
            assert client.post("https://api.anthropic.com/v1/messages", json=request).status_code == 200
        prompt = scripted_engine.tokenizer.decode(scripted_engine.requests[-1]["token_ids"])
        assert "My secret" not in prompt


class TestLostReply:
    def test_it_is_given_again_once_and_then_sampled_anew(self, killed, scripted_engine):
        scripted_engine.replies += [Say(LOOK), Say("New.")]
        with killed().client() as client:
            first = ask(client, [user()])
        recorder = killed()
        with recorder.client() as client:
            assert ask(client, [user()]) == first
            assert ask(client, [user()])["choices"][0]["message"]["content"] == "New."
        assert len(scripted_engine.requests) == 2
        (event,) = [event for event in recorder.rows("events") if event["kind"] == "replayed"]
        assert event["call_id"] in {call["call_id"] for call in recorder.rows("calls")}

    @pytest.mark.deep  # one kill is above, and several are in `TestContinuity`
    def test_it_is_given_again_after_several_kills_and_continued(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say(LOOK)
        replies = []
        for _ in range(3):
            recorder = killed()
            with recorder.client() as client:
                replies.append(ask(client, [user()]))
        assert replies[0] == replies[1] == replies[2]
        with recorder.client() as client:
            ask(client, go_on([user()], replies[0]))
        assert kinds(recorder) == ["root", "bridged"]


class TestEnd:
    def test_an_ended_session_is_over_in_every_later_recorder(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say("Hi.")
        recorder = killed()
        with recorder.client() as client:
            ask(client, [user()])
            assert client.post(SESSION_END).status_code == 200
        for _ in range(2):
            recorder = killed()
            with recorder.client() as client:
                for headers in ({}, RETRY):
                    assert client.post(CHAT, json=body([user()]), headers=headers).status_code == 410
            with recorder.client("s2") as client:
                ask(client, [user()])
        assert kinds(recorder, "s1") == ["root"]


class TestDamage:
    def test_an_uncommitted_tail_is_ignored(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say(LOOK)
        recorder = killed()
        with recorder.client() as client:
            messages = go_on([user()], ask(client, [user()]))
        recorder.stop(signal.SIGKILL)
        for path in [*run_files(recorder.run, "calls"), *run_files(recorder.run, "events")]:
            with path.open("ab") as file:
                file.write(bytes(8) + os.urandom(1000))
        recorder = killed()
        with recorder.client() as client:
            ask(client, messages)
        assert kinds(recorder) == ["root", "bridged"]

    def test_damaged_rows_are_not_continued_and_stop_nobody(self, killed, scripted_engine):
        scripted_engine.otherwise = lambda _: Say(LOOK)
        recorder = killed()
        conversations = {}
        for session in ("s1", "s2"):
            with recorder.client(session) as client:
                conversations[session] = go_on([user(session)], ask(client, [user(session)]))
        recorder.stop(signal.SIGKILL)
        (path,) = run_files(recorder.run, "calls")
        contents = path.read_bytes()
        damaged = contents.replace(json.dumps(user("s1")).encode(), json.dumps(user("x1")).encode())
        assert damaged != contents
        path.write_bytes(damaged)
        recorder = killed()
        for session, messages in conversations.items():
            with recorder.client(session) as client:
                ask(client, messages)
        assert [kinds(recorder, session)[-1] for session in ("s1", "s2")] == ["rendered", "bridged"]
        assert "is damaged" in recorder.log()

    @pytest.mark.parametrize("seed", cases(range(2)))
    def test_flipped_bytes_anywhere_never_keep_a_session_from_being_served(self, killed, scripted_engine, seed):
        scripted_engine.otherwise = lambda _: Say(LOOK)
        recorder, some = killed(), random.Random(seed)
        messages = [user()]
        with recorder.client() as client:
            for _ in range(4):
                messages = go_on(messages, ask(client, messages))
        recorder.stop(signal.SIGKILL)
        for path in [*run_files(recorder.run, "calls"), *run_files(recorder.run, "events")]:
            contents = bytearray(path.read_bytes())
            for _ in range(5):
                contents[some.randrange(len(contents))] ^= 1 << some.randrange(8)
            path.write_bytes(contents)
        recorder = killed()
        with recorder.client() as client:
            ask(client, messages)
