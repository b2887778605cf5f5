"""A session is what it was after its recorder was killed, as far as its rows tell."""

import itertools
import json
import random
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import ModelCall
from rolltap.addons.dialects.claude_code import normal_arguments
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.endpoint.recovery import Recovery
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Event, Session, VersionSpan, json_text, utc_now
from rolltap.addons.store.tables import RunWriter, run_files
from tests.addons.dialects.test_openai_chat import TOOL
from tests.addons.endpoint.asking import GEMINI, assistant, refused, system, told, values
from tests.addons.endpoint.test_retries import OTHERS
from tests.addons.harness import RETRY, content, said, user, with_result
from tests.addons.prompts import talks
from tests.addons.prompts.talks import COMMAND, MARKUP, THINKING, arguments, changed, result, same
from tests.deep import examples
from tests.factories import START, make_call
from tests.scripted_engine import Answer, Say

END = "<|im_end|>"
DAMAGED = "session s1: the row of a call is damaged"


class Recorded(talks.Session):
    """A session whose calls are recorded in a run, as `Generation` records them."""

    dialect = routes.CHAT.NAME
    rule = None

    def __init__(self, rendering, encode, run):
        super().__init__(rendering, encode)
        write_metadata(run, {})
        self.run = run
        self.writer = RunWriter(run)
        self.fields = {}
        """Fields of the next rows that are not those of a completed call of session s1."""

    def ask(self, messages, completion, prompt=None):
        number = len(self.calls)
        reply = super().ask(messages, completion, prompt)
        prompt, completion_ids = self.calls[number]
        call = make_call(
            number,
            prompt.ids,
            completion_ids,
            session_id="s1",
            prefix_length=prompt.prefix_length,
            kind=prompt.kind,
            kind_reason=prompt.reason,
            dialect=self.dialect,
            messages=json_text(prompt.new_messages),
            reply=json_text(reply),
            finished_at=utc_now(),
        )
        if prompt.parent is None:
            call.tools = json_text(self.tools)
        else:
            call.parent_id = prompt.parent.call_id
        self.writer.add_call(replace(call, **self.fields))
        return reply

    def recovered(self, session_id="s1"):
        """Return the session as another recorder of the same run finds it."""
        recovered = Recovery(RunWriter(self.run), self.rendering).recover(session_id)
        recovered.index(self.dialect, self.rule)
        return recovered

    def after_a_restart(self, messages):
        """Return the prompt of a request to another recorder of the same run."""
        return self.recovered().conversations.prompt(self.decode(messages))

    def damage(self, written, damaged):
        """Replace bytes of the rows of calls, which have them once."""
        (path,) = run_files(self.run, "calls")
        contents = path.read_bytes()
        assert contents.count(written) == 1
        path.write_bytes(contents.replace(written, damaged))

    def assert_continued(self, messages, parent):
        """Assert that a request continues the same call, here and after a restart."""
        after = self.after_a_restart(messages)
        assert after.kind == "bridged"
        assert after.parent.call_id == parent
        assert seen(after) == seen(self.prompt(messages))


@pytest.fixture
def session(rendering, encode, tmp_path):
    return Recorded(rendering, encode, tmp_path / "run")


def seen(prompt):
    parent = prompt.parent and prompt.parent.call_id
    return prompt.kind, prompt.reason, parent, prompt.prefix_length, prompt.ids


def test_reasoning_is_restored_from_the_call_that_the_opaque_field_names(session):
    _, reply, _ = session.talk("<think>\nI look.\n</think>\n\nHello.")
    echo = assistant(reply["content"], call_id="0")
    request = ModelCall("m", [user(), echo, user("Go on")], session.tools)
    prompt = session.recovered().conversations.prompt(request)
    whole = [user(), {**echo, "reasoning_content": "I look."}, user("Go on")]
    assert [*prompt.ids] == session.rendering.render(whole, session.tools)


@pytest.mark.parametrize("status", ["failed", "aborted"])
def test_a_call_that_did_not_complete_is_not_continued(session, status):
    session.fields = {"status": status}
    after = session.after_a_restart(session.talk("Hello."))
    assert after.kind == "root"
    assert after.reason == "no earlier call"


def test_a_call_with_a_violation_is_continued_as_before(session):
    session.fields = {"violation": "its log-probability 0 is positive"}
    session.assert_continued(session.talk("Hello."), "0")


def test_a_child_that_was_written_under_an_earlier_name_finds_its_parent(session):
    """The clock was set back between two recorders, so that the files are in the wrong order."""
    messages = session.talk("Hello.")
    session.writer = RunWriter(session.run)
    session.writer._suffix = "1-1"
    messages += [session.ask(messages, "Yes." + END), user("More")]
    assert run_files(session.run, "calls")[0].name.startswith("calls-1-1")
    session.assert_continued(messages, "1")


class TestDamage:
    def test_a_damaged_call_and_its_descendants_are_not_continued(self, session, caplog):
        messages = session.talk("One.", "Two.", "Three.")
        session.damage(b'"Two."', b'"Six."')
        kinds = [session.after_a_restart(messages[:end]).kind for end in (3, 5, 7)]
        assert kinds == ["bridged", "rendered", "rendered"]
        assert DAMAGED in caplog.text
        lost = "call 2 cannot be continued after a restart: its parent 1 cannot be read"
        assert lost in caplog.text

    def test_a_time_beyond_all_years_is_damage(self, session, caplog):
        messages = session.talk("Hello.")
        time = struct.pack("<q", int(START.timestamp()) * 10**6)
        session.damage(time, struct.pack("<q", 2**62))
        assert session.after_a_restart(messages).kind == "rendered"
        assert DAMAGED in caplog.text

    def test_flipped_bits_anywhere_keep_no_session_from_being_served(self, session):
        messages = session.talk(*[THINKING] * 4)
        session.writer.add_event(Event(kind="ended", session_id="s2"))
        paths = [*run_files(session.run, "calls"), *run_files(session.run, "events")]
        sound = {path: path.read_bytes() for path in paths}
        some = random.Random(0)
        kinds = set()
        for _ in range(150):
            for path, contents in sound.items():
                damaged = bytearray(contents)
                for _ in range(some.randrange(1, 4)):
                    damaged[some.randrange(len(damaged))] ^= 1 << some.randrange(8)
                path.write_bytes(damaged)
            after = session.after_a_restart(messages)
            kinds.add(after.kind)
            if after.parent is not None:
                prefix = [*after.ids[: after.prefix_length]]
                assert prefix == session.token_ids(after.parent.call_id)
        # a root when no commit with the session's rows can be read
        assert kinds == {"bridged", "rendered", "root"}

    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": "not JSON"},
            {"messages": "[1]"},
            {"reply": None},
            {"reply": "[}"},
            {"reply": '{"content": null}'},
            {"sampling": "?"},
            {"parent_id": "unknown", "prefix_length": 3},
            {"parent_id": "0"},
            {"prefix_length": 1},
        ],
        ids=str,
    )
    def test_a_row_that_makes_no_sense_is_left_out(self, session, fields):
        session.fields = fields
        after = session.after_a_restart(session.talk("Hello."))
        assert after.kind == "rendered"
        assert after.reason == "message 1 may be the reply of a call that cannot be read"

    def test_calls_that_are_each_others_parents_are_left_out(self, session):
        for parent in ("1", "0"):
            session.fields = {"parent_id": parent}
            session.ask([user(f"{parent} is mine")], "Hello." + END)
        session.fields = {}
        messages = session.talk("Yes.")
        assert [*session.recovered().conversations.history.turns] == ["2"]
        session.assert_continued(messages, "2")


class Claude(Recorded):
    """A session of Claude Code, whose echoes lack `cd FOLDER && `. Its rule is not recorded."""

    dialect = routes.MESSAGES.NAME
    user_id = '{"device_id": "d", "session_id": "s"}'

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tools = self.decode([user()]).tools
        self.reply = self.ask([user()], COMMAND)

    def decode(self, messages):
        request = {
            "max_tokens": 9,
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "messages": messages,
            "metadata": {"user_id": self.user_id},
        }
        return routes.MESSAGES.decode(parse_object(json.dumps(request).encode()), "/v1/messages")

    def echoed(self, command):
        """Return the conversation with the recorded reply, in which the command is this one."""
        call_id = self.reply["tool_calls"][0]["id"]
        use = {"type": "tool_use", "id": call_id, "name": "look", "input": {"command": command}}
        answer = {"type": "tool_result", "tool_use_id": call_id, "content": "Nothing."}
        return [user(), assistant([use]), {"role": "user", "content": [answer]}]


class TestEchoRule:
    @pytest.fixture
    def claude(self, rendering, encode, tmp_path):
        return Claude(rendering, encode, tmp_path / "run")

    def test_the_rule_of_a_request_is_that_of_the_recorded_calls_and_another_one_takes_none_away(
        self, claude
    ):
        recovered = claude.recovered()
        found = []
        for user_id, command in (("me", "ls"), ("me", "cd a && ls"), (Claude.user_id, "ls")):
            claude.user_id = user_id
            request = claude.decode(claude.echoed(command))
            recovered.index(claude.dialect, request.echo_rule)
            found.append(recovered.conversations.prompt(request).kind)
        assert found == ["rendered", "bridged", "bridged"]
        claude.rule = request.echo_rule
        claude.assert_continued(claude.echoed("ls"), "0")

    def test_calls_of_other_apis_have_no_rule(self, session):
        reply = session.ask([user()], COMMAND)
        recovered = Recovery(RunWriter(session.run), session.rendering).recover("s1")
        recovered.index(routes.MESSAGES.NAME, normal_arguments)
        echo = arguments('{"command": "cd a && ls"}')(reply)
        request = session.decode([user(), echo, result(reply)])
        assert recovered.conversations.prompt(request).kind == "bridged"
        recovered.index(session.dialect)
        assert recovered.conversations.prompt(request).kind == "bridged"


folders = itertools.count()
THOUGHT = "<think>\nOne\n</think>\n\nHello."
TEXTS = ["Hello.", "Hello.\n", THOUGHT]
OFTEN = [*TEXTS, *TEXTS]
completions = st.sampled_from([*OFTEN, THINKING]) | st.text(max_size=5) | st.sampled_from(MARKUP)
echoes = st.sampled_from([same, *(changed(content=text) for text in ("", "Other.", *OFTEN))])
ends = st.sampled_from([END, END, END, "", f"{END}a"])
contexts = st.sampled_from([[], [], [talks.CONTEXT, user("And?")]])
tools = st.sampled_from([[TOOL], [TOOL], [TOOL], []])


@given(st.data())
@examples(800)
def test_every_prompt_and_its_reason_are_what_they_would_have_been(
    rendering, encode, tmp_path_factory, data
):
    """Calls run in parallel, from equal prompts too; echoes are changed, requests repeated, texts
    of the program added, recorders restarted, and rows compacted."""
    session = Recorded(rendering, encode, tmp_path_factory.getbasetemp() / f"run-{next(folders)}")
    branches = [[user()], [system(), user()]]
    running = []
    for _ in range(data.draw(st.integers(1, 12))):
        if not running or data.draw(st.booleans()):
            session.tools = data.draw(tools)
            messages = data.draw(st.sampled_from(branches))
            running.append((messages, session.tools, session.prompt(messages)))
            continue
        messages, session.tools, prompt = running.pop(data.draw(st.integers(0, len(running) - 1)))
        reply = session.ask(messages, data.draw(completions) + data.draw(ends), prompt)
        answer = result(reply) if reply.get("tool_calls") else user("Go on")
        for _ in range(2):
            branches.append([*messages, data.draw(echoes)(reply), answer, *data.draw(contexts)])
        if not running and data.draw(st.booleans()):
            if data.draw(st.booleans()):
                session.writer.close()
            session.writer = RunWriter(session.run)
    recovered = session.recovered()
    for session.tools, messages in itertools.product(([TOOL], []), reversed(branches)):
        request = session.decode(messages)
        before = session.conversations.prompt(request)
        assert seen(recovered.conversations.prompt(request)) == seen(before)


ASKED = {"model": "m", "messages": [user()], "tools": [TOOL]}


async def answer(harness, headers=None, **changes):
    """Return the reply to a request without its time."""
    status, text = await harness.send({**ASKED, **changes}, headers=headers)
    assert status == 200
    return {**json.loads(text), "created": 0}


class TestLostReply:
    @pytest.fixture
    async def lost(self, restart, scripted_engine):
        """Return the reply that a recorder gave before it was killed. All later ones are "New."."""
        scripted_engine.replies.append(Say(THINKING))
        scripted_engine.otherwise = lambda request: Say("New.")
        async with restart() as harness:
            return await answer(harness)

    async def test_it_is_given_again_once_and_to_a_marked_retry_as_often_as_it_asks(
        self, lost, restart, scripted_engine
    ):
        assert lost["choices"][0]["message"]["tool_calls"]
        async with restart() as harness:
            for headers in (None, RETRY, RETRY):
                assert await answer(harness, headers) == lost
            _, events = await harness.send({**ASKED, "stream": True}, headers=RETRY)
            assert content(events) == (said(lost) or "")
            assert len(scripted_engine.requests) == 1
            assert said(await answer(harness)) == "New."
            replayed = harness.events("replayed")
            assert values(replayed, "call_id") == [harness.calls()[0]["call_id"]] * 4

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
            await told(harness, user("b"))
        async with restart() as harness:
            assert said(await answer(harness)) == "New."
            assert await told(harness, user("b")) == "Two."

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
        scripted_engine.replies += [Say("one two", break_after=1), Say("New.")]
        async with restart() as harness:
            assert await refused(harness, user()) == (503, "engine_error")
        async with restart() as harness:
            assert await told(harness, user()) == "New."

    @pytest.mark.parametrize(
        ("say", "fields"),
        [
            (Say("one two", finish_reason="length"), {"max_tokens": 2}),
            (Say("one two"), {"stop_sequences": ["thr", "tw"]}),
            (Say(THOUGHT), {}),
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

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", GEMINI])
    async def test_its_reasoning_is_counted_alike(self, restart, scripted_engine, encode, path):
        scripted_engine.replies.append(Say(THOUGHT))
        contents = [{"parts": [{"text": "Hello"}]}]
        body = {"model": "m", "messages": [user()], "input": "Hello", "contents": contents}
        counts = []
        for _ in range(2):
            async with restart() as harness:
                _, text = await harness.send(body, path=path)
            counts += re.findall(r'"(?:reasoning_tokens|thoughtsTokenCount)": ?(\d+)', text)
        assert counts == [str(len(encode("<think>\nOne")))] * 2
        assert len(scripted_engine.requests) == 1


def test_a_session_has_ended_when_a_row_or_an_event_says_so_or_this_process_has_ended_it(session):
    recovery = Recovery(session.writer, session.rendering)
    names = ["call", "event", "row", "own", "", "even", "Event", "event "]
    assert not any(recovery.recover(name).ended for name in names)
    other = RunWriter(session.run)
    other.add_event(Event(kind="call_started", session_id="call"))
    other.add_event(Event(kind="ended", session_id="event"))
    other.add_event(Event(kind="ended"))
    other.add_session(Session(session_id="row", status="completed"))
    recovery.end("own")
    assert [name for name in names if recovery.recover(name).ended] == ["event", "row", "own"]


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


async def test_the_roles_of_conversations_survive_a_restart(restart, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), Say("Done."), Say("Done.")]
    async with restart() as harness:
        _, main = await harness.ask(user(), tools=[TOOL])
    async with restart() as harness:
        _, helper = await harness.ask(system(), user(), tools=[TOOL])
    async with restart() as harness:
        await harness.ask(system(), user(), *with_result(helper), tools=[TOOL])
        await harness.ask(user(), *with_result(main), tools=[TOOL])
        calls = harness.calls()
    assert values(calls, "role") == ["agent", "subagent", "subagent", "agent"]
    assert calls[0]["call_id"] in calls[1]["role_evidence"]


def changed_reply(_):
    return [assistant("I look."), user("Go on")]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("answered", "reply", "status"),
    [(with_result, Answer(400, "No."), "failed"), (changed_reply, Say("Done."), "completed")],
    ids=["a failed request", "a changed reply"],
)
async def test_tool_calls_that_a_request_has_answered_do_not_wait(
    restart, scripted_engine, restarted, answered, reply, status
):
    scripted_engine.replies += [Say(CALL), reply, Say("Done.")]
    asked = [system("Another run."), user()]
    async with restart() as harness:
        _, body = await harness.ask(user(), tools=[TOOL])
        await harness.ask(user(), *answered(body), tools=[TOOL])
        if not restarted:
            await harness.ask(*asked, tools=[TOOL])
    async with restart() as harness:
        if restarted:
            await harness.ask(*asked, tools=[TOOL])
        calls = harness.calls()
    assert values(calls, "status") == ["completed", status, "completed"]
    assert values(calls, "role") == ["agent"] * 3


def test_a_session_that_was_forgotten_is_found_among_the_rows_of_the_own_process(session):
    recovery = Recovery(session.writer, session.rendering)
    assert recovery.recover("s1").calls == []
    request = session.decode(session.talk("Hello."))
    for _ in range(2):
        recovered = recovery.recover("s1")
        recovered.index(session.dialect)
        assert recovered.conversations.prompt(request).kind == "bridged"
        assert [call.delivered for call in recovered.calls] == [True]


def test_the_rows_of_the_own_process_are_not_read_for_a_new_session(session, monkeypatch):
    recovery = Recovery(session.writer, session.rendering)
    recovery.load()
    session.talk("Hello.")
    monkeypatch.setattr("rolltap.addons.store.index.SegmentReader", None)  # whoever reads, fails
    for number in range(5):
        recovery.recover(f"new {number}").index(session.dialect)


def test_many_threads_recover_sessions_while_calls_are_committed_and_compacted(session):
    talked = {}
    for name in "abcdefgh":
        session.fields = {"session_id": name}
        talked[name] = session.decode(session.talk(f"I am {name}."))
    recovery = Recovery(RunWriter(session.run), session.rendering)

    def recover(name):
        recovered = recovery.recover(name)
        recovered.index(session.dialect)
        return recovered.conversations.prompt(talked[name]).kind

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(recover, name) for name in [*talked] * 4]
        session.fields = {"session_id": "other"}
        for _ in range(3):
            session.talk("More.")
            session.writer.close()
        assert {kind.result() for kind in found} == {"bridged"}


@pytest.mark.parametrize(
    ("calls", "version"),
    [
        ([], None),
        ([(1, [])], None),
        ([(1, [("a", 0, 1)]), (2, [])], "a"),
        ([(2, [("b", 0, 1), ("c", 1, 3)]), (1, [("a", 0, 1)])], "c"),
        ([(1, [("a", 0, 1), ("b", 1, 1)])], "a"),  # b sampled nothing
    ],
)
def test_the_last_version_is_that_of_the_newest_calls_last_token(session, calls, version):
    for day, spans in calls:
        named = [VersionSpan(version=name, start=start, end=end) for name, start, end in spans]
        session.fields = {"started_at": START.replace(day=day), "weight_versions": named}
        session.talk("Hello.")
    assert session.recovered().last_version == version
