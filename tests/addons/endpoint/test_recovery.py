"""A session is what it was after its recorder was killed, as far as its rows tell."""

import functools
import itertools
import json
import logging
import operator
import random
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import ModelCall
from rolltap.addons.dialects.claude_code import normal_arguments
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.endpoint.recovery import Recovery, _last_version
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Event, Session, VersionSpan, utc_now
from rolltap.addons.store.tables import RunWriter, run_files
from tests.addons.dialects.test_openai_chat import TOOL
from tests.addons.endpoint.test_retries import OTHERS
from tests.addons.harness import RETRY, content, said, user, with_result
from tests.addons.prompts import talks
from tests.addons.prompts.talks import COMMAND, MARKUP, THINKING, arguments, changed, result, same
from tests.deep import examples
from tests.factories import START
from tests.scripted_engine import Answer, Say

NAME = routes.CHAT.NAME


class Recorded(talks.Session):
    """A session whose calls are recorded in a run, as `Generation` records them."""

    def __init__(self, rendering, encode, run, session_id="s1"):
        super().__init__(rendering, encode)
        write_metadata(run, {})
        self.run = run
        self.writer = RunWriter(run)
        self.session_id = session_id
        self.dialect = NAME

    def ask(self, messages, completion, fields=None, prompt=None):
        reply = super().ask(messages, completion, prompt)
        prompt, completion_ids = self.calls[-1]
        parent = prompt.parent
        call = {
            "session_id": self.session_id,
            "call_id": str(len(self.calls) - 1),
            "prompt_ids": prompt.ids,
            "completion_ids": completion_ids,
            "logprobs": [-0.5] * len(completion_ids),
            "weight_versions": [VersionSpan(version="1", start=0, end=len(completion_ids))],
            "parent_id": parent.call_id if parent else None,
            "prefix_length": prompt.prefix_length,
            "kind": prompt.kind,
            "kind_reason": prompt.reason,
            "dialect": self.dialect,
            "messages": json.dumps(prompt.new_messages, ensure_ascii=False),
            "tools": None if parent else json.dumps(self.tools, ensure_ascii=False),
            "reply": json.dumps(reply, ensure_ascii=False),
            "finished_at": utc_now(),
        }
        self.writer.add_call(Call(**{**call, **(fields or {})}))
        return reply

    def recovered(self, session_id="s1"):
        """Return the session as another recorder of the same run finds it."""
        return Recovery(RunWriter(self.run), self.rendering).recover(session_id)

    def prompts(self, messages):
        """Return the prompts of a request, here and after a restart."""
        request, recovered = self.decode(messages), self.recovered()
        recovered.index(self.dialect, request.echo_rule)
        return self.conversations.prompt(request), recovered.conversations.prompt(request)

    def works(self):
        """Return the next request of a conversation with four calls that think and call a tool."""
        messages = [user("Hi")]
        for _ in range(4):
            reply = self.ask(messages, THINKING + "<|im_end|>")
            messages += [reply, result(reply)]
        return messages

    def damage(self, written, damaged):
        """Replace bytes of the rows of calls, which have them once."""
        (path,) = run_files(self.run, "calls")
        contents = path.read_bytes()
        assert contents.count(written) == 1
        path.write_bytes(contents.replace(written, damaged))

    def assert_continued(self, messages, parent):
        """Assert that a request continues the same call, here and after a restart."""
        before, after = self.prompts(messages)
        assert (after.kind, after.parent.call_id) == ("bridged", parent)
        assert seen(after) == seen(before)


@pytest.fixture
def session(rendering, encode, tmp_path):
    return Recorded(rendering, encode, tmp_path / "run")


def seen(prompt):
    return (
        prompt.kind,
        prompt.reason,
        prompt.parent and prompt.parent.call_id,
        prompt.prefix_length,
        prompt.ids,
    )


class TestConversations:
    def test_reasoning_is_restored_from_the_call_that_the_opaque_field_names(self, session):
        reply = session.ask([user("Hi")], "<think>\nI look.\n</think>\n\nHello.<|im_end|>")
        echo = {"role": "assistant", "content": reply["content"], "call_id": "0"}
        request = ModelCall("m", [user("Hello"), echo, user("Go on")], session.tools)
        recovered = session.recovered()
        recovered.index(NAME)
        whole = [user("Hello"), {**echo, "reasoning_content": "I look."}, user("Go on")]
        assert [*recovered.conversations.prompt(request).ids] == session.rendering.render(
            whole, session.tools
        )

    def test_context_is_restored_with_the_call_that_had_it(self, session):
        messages = [user("Hi"), session.ask([user("Hi")], "Hello.<|im_end|>"), user("Go on")]
        messages += [{"role": "assistant", "content": "Job 1 has ended."}, user("And?")]
        messages += [session.ask(messages, "Well.<|im_end|>"), user("Go on")]
        session.assert_continued(messages, "1")

    @pytest.mark.parametrize("status", ["failed", "aborted"])
    def test_a_call_that_did_not_complete_is_not_continued(self, session, status):
        reply = session.ask([user("Hi")], "Hello.<|im_end|>", {"status": status})
        _, after = session.prompts([user("Hi"), reply, user("Go on")])
        assert (after.kind, after.parent, after.reason) == ("root", None, "no earlier call")

    def test_a_call_with_a_violation_is_continued_as_before(self, session):
        reply = session.ask(
            [user("Hi")], "Hello.<|im_end|>", {"violation": "its log-probability 0 is positive"}
        )
        session.assert_continued([user("Hi"), reply, user("Go on")], "0")

    def test_a_child_that_was_written_under_an_earlier_name_finds_its_parent(self, session):
        """The clock was set back between two recorders, so that the files are in the wrong
        order."""
        messages = [user("Hi"), session.ask([user("Hi")], "Hello.<|im_end|>"), user("Go on")]
        session.writer = RunWriter(session.run)
        session.writer._suffix = "1-1"
        messages += [session.ask(messages, "Yes.<|im_end|>"), user("More")]
        assert run_files(session.run, "calls")[0].name.startswith("calls-1-1")
        session.assert_continued(messages, "1")

    def test_compacted_rows_are_read_too(self, session):
        messages = session.works()
        session.writer.close()
        session.assert_continued(messages, "3")


class TestDamage:
    def test_a_damaged_call_and_its_descendants_are_not_continued(self, session, caplog):
        messages, requests = [user("Hi")], []
        for text in ("One.", "Two.", "Three."):
            messages = [*messages, session.ask(messages, f"{text}<|im_end|>"), user("Go on")]
            requests.append(messages)
        session.damage(b'"content": "Two."', b'"content": "Six."')
        with caplog.at_level(logging.WARNING):
            kinds = [session.prompts(request)[1].kind for request in requests]
        assert kinds == ["bridged", "rendered", "rendered"]
        assert "session s1: the row of a call is damaged" in caplog.text
        assert (
            "call 2 cannot be continued after a restart: its parent 1 cannot be read" in caplog.text
        )

    def test_a_time_beyond_all_years_is_damage(self, session, caplog):
        reply = session.ask([user("Hi")], "Hello.<|im_end|>", {"started_at": START})
        session.damage(struct.pack("<q", int(START.timestamp()) * 10**6), struct.pack("<q", 2**62))
        _, after = session.prompts([user("Hi"), reply, user("Go on")])
        assert after.kind == "rendered"
        assert "session s1: the row of a call is damaged" in caplog.text

    def test_flipped_bits_anywhere_keep_no_session_from_being_served(self, session):
        messages = session.works()
        session.writer.add_event(Event(kind="ended", session_id="s2"))
        files = [
            (path, path.read_bytes())
            for table in ("calls", "events")
            for path in run_files(session.run, table)
        ]
        some = random.Random(0)
        kinds = set()
        for _ in range(150):
            for path, contents in files:
                damaged = bytearray(contents)
                for _ in range(some.randrange(1, 4)):
                    damaged[some.randrange(len(damaged))] ^= 1 << some.randrange(8)
                path.write_bytes(damaged)
            _, after = session.prompts(messages)
            kinds.add(after.kind)
            if after.parent is not None:
                assert [*after.ids[: after.prefix_length]] == session.token_ids(
                    after.parent.call_id
                )
        assert kinds == {
            "bridged",
            "rendered",
            "root",
        }  # a root when no commit with the session's rows can be read

    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": "not JSON"},
            {"reply": None},
            {"reply": "[}"},
            {"reply": '{"content": null}'},
            {"messages": "[1]"},
            {"sampling": "?"},
            {"parent_id": "unknown", "prefix_length": 3},
            {"parent_id": "0"},
            {"prefix_length": 1},
        ],
    )
    def test_a_row_that_makes_no_sense_is_left_out(self, session, fields):
        reply = session.ask([user("Hi")], "Hello.<|im_end|>", fields)
        _, after = session.prompts([user("Hi"), reply, user("Go on")])
        reason = "message 1 may be the reply of a call that cannot be read"
        assert (after.kind, after.reason) == ("rendered", reason)

    def test_calls_that_are_each_others_parents_are_left_out(self, session):
        session.ask([user("One")], "Hello.<|im_end|>", {"parent_id": "1"})
        session.ask([user("Two")], "Hello.<|im_end|>", {"parent_id": "0"})
        messages = [user("Hi"), session.ask([user("Hi")], "Yes.<|im_end|>"), user("Go on")]
        recovered = session.recovered()
        recovered.index(NAME)
        assert list(recovered.conversations.history.turns) == ["2"]
        session.assert_continued(messages, "2")


class TestEchoRule:
    """Claude Code's echoes lack `cd FOLDER && `. Its rule is not recorded."""

    @pytest.fixture
    def claude(self, session, monkeypatch):
        def decode(messages, user_id='{"device_id": "d", "session_id": "s"}'):
            tool = {"name": "look", "input_schema": {"type": "object"}}
            request = {
                "max_tokens": 9,
                "tools": [tool],
                "messages": messages,
                "metadata": {"user_id": user_id},
            }
            return routes.MESSAGES.decode(
                parse_object(json.dumps(request).encode()), "/v1/messages"
            )

        monkeypatch.setattr(session, "decode", decode)
        session.dialect = routes.MESSAGES.NAME
        session.tools = decode([user("Hi")]).tools
        return session

    def echo(self, reply, command):
        call_id = reply["tool_calls"][0]["id"]
        use = {"type": "tool_use", "id": call_id, "name": "look", "input": {"command": command}}
        answer = {"type": "tool_result", "tool_use_id": call_id, "content": "Nothing."}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]

    def test_the_rule_of_the_request_is_that_of_the_recorded_calls(self, claude):
        reply = claude.ask([user("Hi")], COMMAND)
        claude.assert_continued([user("Hi"), *self.echo(reply, "ls")], "0")

    def test_another_program_does_not_take_the_calls_away(self, claude):
        reply = claude.ask([user("Hi")], COMMAND)
        recovered = claude.recovered()
        kinds = []
        for user_id, command in (
            ("me", "ls"),
            ("me", "cd a && ls"),
            ('{"device_id": "d", "session_id": "s"}', "ls"),
        ):
            request = claude.decode([user("Hi"), *self.echo(reply, command)], user_id)
            recovered.index(routes.MESSAGES.NAME, request.echo_rule)
            kinds.append(recovered.conversations.prompt(request).kind)
        assert kinds == ["rendered", "bridged", "bridged"]

    def test_calls_of_other_apis_have_no_rule(self, session):
        reply = session.ask([user("Hi")], COMMAND)
        recovered = session.recovered()
        recovered.index(routes.MESSAGES.NAME, normal_arguments)
        request = session.decode(
            [user("Hi"), arguments('{"command": "cd a && ls"}')(reply), result(reply)]
        )
        recovered.index(NAME)
        assert recovered.conversations.prompt(request).kind == "bridged"


echoed = st.text(max_size=5) | st.sampled_from(MARKUP)
folders = itertools.count()


THOUGHT = "<think>\nOne\n</think>\n\nHello."
TEXTS = ["Hello.", "Hello.\n", THOUGHT]
completions = st.sampled_from([*TEXTS, *TEXTS, THINKING]) | echoed
echoes = st.sampled_from(
    [same, *(changed(content=text) for text in ("", "Other.", *TEXTS, *TEXTS))]
)


@given(st.data())
@examples(800)
def test_every_prompt_and_its_reason_are_what_they_would_have_been(
    rendering, encode, tmp_path_factory, data
):
    """Calls run in parallel, from equal prompts too; echoes are changed, requests repeated,
    recorders restarted."""
    folder = tmp_path_factory.getbasetemp() / f"run-{next(folders)}"
    session = Recorded(rendering, encode, folder)
    branches, running = [[user("Hi")], [{"role": "system", "content": "You help."}, user("Hi")]], []
    for _ in range(data.draw(st.integers(1, 12))):
        if not running or data.draw(st.booleans()):
            session.tools = data.draw(st.sampled_from([[TOOL], [TOOL], [TOOL], []]))
            messages = data.draw(st.sampled_from(branches))
            running.append((messages, session.tools, session.prompt(messages)))
            continue
        messages, session.tools, prompt = running.pop(data.draw(st.integers(0, len(running) - 1)))
        end = data.draw(
            st.sampled_from(["<|im_end|>", "<|im_end|>", "<|im_end|>", "", "<|im_end|>a"])
        )
        reply = session.ask(messages, data.draw(completions) + end, prompt=prompt)
        answer = result(reply) if reply.get("tool_calls") else user("Go on")
        branches += [[*messages, data.draw(echoes)(reply), answer] for _ in range(2)]
        if not running and data.draw(st.booleans()):
            session.writer = RunWriter(folder)
    recovered = session.recovered()
    for session.tools, messages in itertools.product(([TOOL], []), reversed(branches)):
        request = session.decode(messages)
        recovered.index(session.dialect, request.echo_rule)
        before, after = (
            session.conversations.prompt(request),
            recovered.conversations.prompt(request),
        )
        assert seen(after) == seen(before)


ASKED = {"model": "m", "messages": [user()], "tools": [TOOL]}


async def answer(harness, headers=None, **changes):
    """Return the reply to a request without its time."""
    status, text = await harness.send({**ASKED, **changes}, headers=headers)
    assert status == 200
    return {key: value for key, value in json.loads(text).items() if key != "created"}


class TestLostReply:
    @pytest.fixture
    async def lost(self, restart, scripted_engine):
        """Return the reply that a recorder gave before it was killed. All later ones are "New."."""
        scripted_engine.replies.append(Say(THINKING))
        scripted_engine.otherwise = lambda request: Say("New.")
        async with restart() as harness:
            return await answer(harness)

    async def test_it_is_given_again_once(self, lost, restart, scripted_engine):
        async with restart() as harness:
            assert await answer(harness) == lost
            assert said(await answer(harness)) == "New."
            (event,) = harness.events("replayed")
            assert event["call_id"] == harness.calls()[0]["call_id"]
        assert lost["choices"][0]["message"]["tool_calls"]
        assert len(scripted_engine.requests) == 2

    async def test_a_marked_retry_gets_it_as_often_as_it_asks_and_as_a_stream_too(
        self, lost, restart, scripted_engine
    ):
        async with restart() as harness:
            assert [await answer(harness, headers=RETRY) for _ in range(3)] == [lost] * 3
            _, events = await harness.send({**ASKED, "stream": True}, headers=RETRY)
        assert (content(events), "[DONE]" in events) == (said(lost) or "", True)
        assert len(scripted_engine.requests) == 1

    @pytest.mark.parametrize(("changes", "session"), OTHERS, ids=str)
    async def test_another_request_or_session_gets_a_new_sample(
        self, lost, restart, changes, session
    ):
        async with restart() as harness:
            _, text = await harness.send({**ASKED, **changes}, session=session, headers=RETRY)
        assert "New." in text

    async def test_a_call_after_which_another_one_was_started_was_delivered(
        self, lost, restart, scripted_engine
    ):
        scripted_engine.replies.append(Say("Two."))
        async with restart() as harness:
            await answer(harness, messages=[user("b")])
        async with restart() as harness:
            assert said(await answer(harness)) == "New."
            assert said(await answer(harness, messages=[user("b")])) == "Two."

    async def test_a_reply_that_was_not_held_to_its_schema_is_given_again(
        self, restart, scripted_engine
    ):
        refusal = Answer(400, '{"error": {"message": "no such grammar"}}')
        scripted_engine.replies += [refusal, Say("Free."), Say("New.")]
        schema = {"name": "x", "schema": {"type": "object"}}
        form = {"tools": [], "response_format": {"type": "json_schema", "json_schema": schema}}
        async with restart() as harness:
            lost = await answer(harness, **form)
        async with restart() as harness:
            assert await answer(harness, **form) == lost
            sampling = json.loads(harness.calls()[0]["sampling"])
            assert "structured_outputs" not in sampling
            assert sampling["asked"]["structured_outputs"] == {"json": {"type": "object"}}
            assert said(await answer(harness, tools=[])) == "New."

    async def test_a_call_that_failed_is_sampled_anew(self, restart, scripted_engine):
        scripted_engine.replies += [*[Say("one two", break_after=1)] * 2, Say("New.")]
        async with restart() as harness:
            for headers in ({}, RETRY):
                assert (await harness.send(ASKED, headers=headers))[0] == 503
        async with restart() as harness:
            assert said(await answer(harness)) == "New."

    @pytest.mark.parametrize(
        ("say", "fields"),
        [
            (Say("one two", finish_reason="length"), {"max_tokens": 2}),
            (Say("one two"), {"stop_sequences": ["thr", "tw"]}),
            (Say("<think>\nI think.\n</think>\n\nYes."), {}),
        ],
        ids=["token limit", "stop text", "reasoning"],
    )
    async def test_its_ending_and_usage_are_the_same(self, restart, scripted_engine, say, fields):
        scripted_engine.replies.append(say)
        body = {"model": "m", "messages": [user()], "max_tokens": 99, **fields}
        replies = []
        for _ in range(2):
            async with restart() as harness:
                replies.append(await harness.send(body, path="/v1/messages"))
        assert replies[0] == replies[1]
        assert len(scripted_engine.requests) == 1

    @pytest.mark.parametrize(
        ("path", "body", "counted"),
        [
            (
                "/v1/chat/completions",
                {"messages": [user()]},
                ("usage", "completion_tokens_details", "reasoning_tokens"),
            ),
            (
                "/v1/responses",
                {"input": "Hello"},
                ("usage", "output_tokens_details", "reasoning_tokens"),
            ),
            (
                "/v1beta/models/m:generateContent",
                {"contents": [{"parts": [{"text": "Hello"}]}]},
                ("usageMetadata", "thoughtsTokenCount"),
            ),
        ],
        ids=["chat", "responses", "gemini"],
    )
    async def test_its_reasoning_is_counted_alike(
        self, restart, scripted_engine, encode, path, body, counted
    ):
        reasoning = "<think>\nI think."
        scripted_engine.replies.append(Say(f"{reasoning}\n</think>\n\nYes."))
        replies = []
        for _ in range(2):
            async with restart() as harness:
                replies.append(
                    json.loads((await harness.send({"model": "m", **body}, path=path))[1])
                )
        for reply in replies:
            assert functools.reduce(operator.getitem, counted, reply) == len(encode(reasoning))
        assert len(scripted_engine.requests) == 1


def test_a_session_with_a_row_has_ended(session):
    session.ask([user("Hi")], "Hello.<|im_end|>")
    RunWriter(session.run).add_session(Session(session_id="s1", status="completed"))
    names = ("s1", "s2", "", "s", "S1", "s1 ", "s10")
    assert [session.recovered(name).ended for name in names] == [True, *[False] * 6]


def test_a_session_has_ended_when_another_process_says_so_or_this_one_has_ended_it(session):
    recovery = Recovery(session.writer, session.rendering)
    names = "abcd"
    assert [recovery.recover(name).ended for name in names] == [False] * 4
    other = RunWriter(session.run)
    other.add_event(Event(kind="call_started", session_id="a"))
    other.add_event(Event(kind="ended", session_id="b"))
    other.add_event(Event(kind="ended"))
    other.add_session(Session(session_id="c", status="completed"))
    recovery.end("d")
    assert [recovery.recover(name).ended for name in names] == [False, True, True, True]


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


async def test_the_roles_of_conversations_survive_a_restart(restart, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), Say("Done."), Say("Done.")]
    system = {"role": "system", "content": "You help."}
    async with restart() as harness:
        _, main = await harness.ask(user(), tools=[TOOL])
    async with restart() as harness:
        _, helper = await harness.ask(system, user(), tools=[TOOL])
    async with restart() as harness:
        await harness.ask(system, user(), *with_result(helper), tools=[TOOL])
        await harness.ask(user(), *with_result(main), tools=[TOOL])
        calls = harness.calls()
    assert [call["role"] for call in calls] == ["agent", "subagent", "subagent", "agent"]
    assert calls[0]["call_id"] in calls[1]["role_evidence"]


@pytest.mark.parametrize("forget", [False, True], ids=["live", "after a restart"])
@pytest.mark.parametrize("changes", [False, True], ids=["a failed request", "a changed reply"])
async def test_tool_calls_that_a_request_has_answered_do_not_wait(
    restart, scripted_engine, forget, changes
):
    scripted_engine.replies += [
        Say(CALL),
        Say("Done.") if changes else Answer(400, "No."),
        Say("Done."),
    ]
    other = {"role": "system", "content": "Another run."}
    async with restart() as harness:
        _, body = await harness.ask(user(), tools=[TOOL])
        changed = [{"role": "assistant", "content": "I look."}, user("Go on")]
        await harness.ask(user(), *(changed if changes else with_result(body)), tools=[TOOL])
        if not forget:
            await harness.ask(other, user(), tools=[TOOL])
    async with restart() as harness:
        if forget:
            await harness.ask(other, user(), tools=[TOOL])
        calls = harness.calls()
    assert [call["status"] for call in calls] == [
        "completed",
        "completed" if changes else "failed",
        "completed",
    ]
    assert [call["role"] for call in calls] == ["agent"] * 3


def test_a_session_that_was_forgotten_is_found_among_the_rows_of_the_own_process(session):
    recovery = Recovery(session.writer, session.rendering)
    assert recovery.recover("s1").calls == []
    reply = session.ask([user("Hi")], "Hello.<|im_end|>")
    request = session.decode([user("Hi"), reply, user("Go on")])
    for _ in range(2):
        recovered = recovery.recover("s1")
        recovered.index(NAME)
        assert recovered.conversations.prompt(request).kind == "bridged"
        assert [call.delivered for call in recovered.calls] == [True]


def test_the_rows_of_the_own_process_are_not_read_for_a_new_session(session, monkeypatch):
    recovery = Recovery(session.writer, session.rendering)
    recovery.load()
    session.ask([user("Hi")], "Hello.<|im_end|>")
    monkeypatch.setattr("rolltap.addons.store.index.SegmentReader", None)  # whoever reads, fails
    for number in range(5):
        recovery.recover(f"new {number}").index(NAME)


def test_many_threads_recover_sessions_while_calls_are_committed_and_compacted(session):
    sessions = [f"s{number}" for number in range(8)]
    messages = [user("Hi")]
    for name in sessions:
        session.session_id = name
        messages = [user("Hi"), session.ask([user("Hi")], f"I am {name}.<|im_end|>"), user("Go on")]
    recovery = Recovery(RunWriter(session.run), session.rendering)

    def recover(name):
        request = session.decode(
            [user("Hi"), {"role": "assistant", "content": f"I am {name}."}, user("Go on")]
        )
        recovered = recovery.recover(name)
        recovered.index(NAME)
        return recovered.conversations.prompt(request).kind

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(recover, name) for name in sessions * 4]
        session.session_id = "other"
        for _ in range(3):
            session.ask(messages, "More.<|im_end|>")
            session.writer.close()
        assert [kind.result() for kind in found] == ["bridged"] * len(found)


@pytest.mark.parametrize(
    ("rows", "version"),
    [
        ([], None),
        ([(1, None)], None),
        ([(1, [("a", 0, 1)]), (2, [])], "a"),
        ([(2, [("b", 0, 1), ("c", 1, 3)]), (1, [("a", 0, 1)])], "c"),
        ([(1, [("a", 0, 1), ("b", 1, 1)])], "a"),  # b sampled nothing
    ],
)
def test_the_last_version_is_that_of_the_newest_calls_last_token(rows, version):
    calls = [
        {
            "started_at": at,
            "weight_versions": (
                spans and [{"version": v, "start": a, "end": b} for v, a, b in spans]
            ),
        }
        for at, spans in rows
    ]
    assert _last_version(calls) == version
