"""A recorder is killed in the middle of sessions. The next one on the same run continues them, and
no others."""

import json
import os
import random
import signal

import pytest

from rolltap.addons.dialects.call import sign
from rolltap.addons.store.tables import run_files
from rolltap.trainer.boxes.environment import SESSION_END
from tests.deep import cases
from tests.recorder_process import CHAT
from tests.scripted_engine import Say

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
LOOK = 'So:\n<tool_call>\n{"name": "look", "arguments": {"at":  "caf\\u00e9"}}\n</tool_call>'
RETRY = {"x-stainless-retry-count": "1"}


def user(text="Hello"):
    return {"role": "user", "content": text}


def go_on(messages, reply):
    """Return the conversation with the reply and an answer to it."""
    message = reply["choices"][0]["message"]
    answers = []
    for call in message.get("tool_calls") or []:
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": "Nothing."})
    return [*messages, message, *(answers or [user("Go on")])]


class Killed:
    """Recorders of one run, each of which was killed before the next one started. Its engine says
    `LOOK` by default."""

    def __init__(self, start, engine):
        self._start = start
        self.engine = engine
        engine.otherwise = lambda _: Say(LOOK)
        self.recorder = start()

    def kill(self):
        self.recorder.stop(signal.SIGKILL)

    def restart(self):
        self.recorder = self._start()

    def post(self, session, messages, headers=None, **fields):
        body = {"model": "m", "messages": messages, "tools": [TOOL], **fields}
        with self.recorder.client(session) as client:
            return client.post(CHAT, json=body, headers=headers)

    def ask(self, session, messages, headers=None, **fields):
        """Return the reply's body without its time."""
        response = self.post(session, messages, headers, **fields)
        assert response.status_code == 200, response.text
        reply = response.json()
        del reply["created"]
        return reply

    def says(self, session, messages):
        return self.ask(session, messages)["choices"][0]["message"]["content"]

    def calls(self, session):
        calls = [call for call in self.recorder.rows("calls") if call["session_id"] == session]
        return sorted(calls, key=lambda call: call["started_at"])

    def kinds(self, session):
        return [call["kind"] for call in self.calls(session)]

    def prompts(self, session):
        """Return the whole prompt of each recorded call."""
        whole = {None: []}
        prompts = []
        for call in self.calls(session):
            prompt = whole[call["parent_id"]] + call["prompt_tail_ids"]
            whole[call["call_id"]] = prompt + call["completion_ids"]
            prompts.append(prompt)
        return prompts

    def files(self):
        run = self.recorder.run
        return [*run_files(run, "calls"), *run_files(run, "events")]


@pytest.fixture
def killed(start, scripted_engine):
    return Killed(start, scripted_engine)


def a_session_goes_on_token_for_token(killed):
    messages = [user()]
    sent = []
    for number in range(4):
        killed.engine.replies.append(Say("<think>\nI look.\n</think>\n\n" + LOOK))
        messages = go_on(messages, killed.ask("s1", messages))
        sent.append(killed.engine.requests[-1]["token_ids"])
        assert killed.kinds("s1") == ["root"] + ["bridged"] * number
        yield
    assert sent == killed.prompts("s1")


def a_session_whose_call_was_running_goes_on_from_its_last_committed_call(killed):
    killed.engine.replies += [Say("One."), Say("two three", hold_after=1)]
    messages = go_on([user()], killed.ask("running", [user()]))
    body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": True}
    with (
        killed.recorder.client("running") as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        next(response.iter_lines())
        assert killed.engine.holding.wait(120)
        yield
    killed.engine.replies.append(Say("Three."))
    assert killed.says("running", messages) == "Three."
    assert killed.kinds("running") == ["root", "bridged"]


def a_side_question_is_still_one(killed):
    killed.ask("side", [user()])
    yield
    killed.ask("side", [user("Name this.")], tools=[])
    assert [call["role"] for call in killed.calls("side")] == ["agent", "auxiliary"]


def a_session_with_a_similar_name_gets_nothing_of_it(killed):
    mine = killed.ask("t1", [user()])
    yield
    for name in ("t", "t11", "T1", "t1-", "t1.", "%25"):
        assert killed.ask(name, [user()], RETRY)["id"] != mine["id"]
        killed.ask(name, go_on([user()], mine))
        calls = killed.calls(name.replace("%25", "%"))
        assert [call["parent_id"] for call in calls] == [None, None]


def a_forged_id_of_another_sessions_call_restores_nothing(killed):
    killed.engine.replies.append(Say("<think>\nMy secret.\n</think>\n\nHi."))
    killed.ask("victim", [user()])
    (call,) = killed.calls("victim")
    yield
    block = {"type": "thinking", "thinking": "", "signature": sign(call["call_id"])}
    echo = {"role": "assistant", "content": [block, {"type": "text", "text": "Hi."}]}
    request = {"model": "m", "max_tokens": 50, "messages": [user("Hey"), echo, user("Go on")]}
    with killed.recorder.client("attacker") as client:
        assert client.post("https://api.anthropic.com/v1/messages", json=request).status_code == 200
    prompt = killed.engine.tokenizer.decode(killed.engine.requests[-1]["token_ids"])
    assert "My secret" not in prompt


def a_lost_reply_is_given_again_once_and_then_sampled_anew(killed):
    first = killed.ask("lost", [user()])
    yield
    asked = len(killed.engine.requests)
    assert killed.ask("lost", [user()]) == first
    assert len(killed.engine.requests) == asked
    killed.engine.replies.append(Say("New."))
    assert killed.says("lost", [user()]) == "New."
    events = [event for event in killed.recorder.rows("events") if event["kind"] == "replayed"]
    (replayed,) = [event["call_id"] for event in events if event["session_id"] == "lost"]
    assert replayed in {call["call_id"] for call in killed.calls("lost")}


def a_lost_reply_is_given_again_after_several_kills_and_continued(killed):
    first = killed.ask("lost-twice", [user()])
    for _ in range(2):
        yield
        assert killed.ask("lost-twice", [user()]) == first
    killed.ask("lost-twice", go_on([user()], first))
    assert killed.kinds("lost-twice") == ["root", "bridged"]


def an_ended_session_is_over_in_every_later_recorder(killed):
    killed.ask("ended", [user()])
    with killed.recorder.client("ended") as client:
        assert client.post(SESSION_END).status_code == 200
    for _ in range(2):
        yield
        for headers in (None, RETRY):
            assert killed.post("ended", [user()], headers).status_code == 410
        assert killed.kinds("ended") == ["root"]


SESSIONS = [value for name, value in [*globals().items()] if name.startswith(("a_", "an_"))]
"""Each of the functions above. It yields when all recorders are to be killed."""


def test_sessions_outlive_kills_and_an_uncommitted_tail(killed):
    running = [session(killed) for session in SESSIONS]
    while running := [session for session in running if next(session, "over") is None]:
        killed.kill()
        if len(running) == len(SESSIONS):
            for path in killed.files():
                with path.open("ab") as file:
                    file.write(bytes(8) + os.urandom(1000))
        killed.restart()


def test_damaged_rows_are_not_continued_and_stop_nobody(killed):
    conversations = {}
    for name in ("s1", "s2"):
        conversations[name] = go_on([user(name)], killed.ask(name, [user(name)]))
    killed.kill()
    (path,) = run_files(killed.recorder.run, "calls")
    contents = path.read_bytes()
    damaged = contents.replace(json.dumps(user("s1")).encode(), json.dumps(user("x1")).encode())
    assert damaged != contents
    path.write_bytes(damaged)
    killed.restart()
    for name, messages in conversations.items():
        killed.ask(name, messages)
    assert [killed.kinds(name)[-1] for name in conversations] == ["rendered", "bridged"]
    assert "is damaged" in killed.recorder.log()


@pytest.mark.parametrize("seed", cases(range(2)))
def test_flipped_bytes_anywhere_never_keep_a_session_from_being_served(killed, seed):
    messages = [user()]
    some = random.Random(seed)
    for _ in range(4):
        messages = go_on(messages, killed.ask("s1", messages))
    killed.kill()
    for path in killed.files():
        contents = bytearray(path.read_bytes())
        for _ in range(5):
            contents[some.randrange(len(contents))] ^= 1 << some.randrange(8)
        path.write_bytes(contents)
    killed.restart()
    killed.ask("s1", messages)
