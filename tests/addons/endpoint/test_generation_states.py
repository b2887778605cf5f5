"""A generation as a state machine: in random orders of events, its call is recorded at most once
and every listener gets one end."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import ModelCall, Reply, Usage
from rolltap.addons.endpoint.budget import SessionBudget, Used
from rolltap.addons.endpoint.generation import LINGER_SECONDS, Generation, State
from rolltap.addons.endpoint.request import PreparedCall
from rolltap.addons.endpoint.server import KEEP_ALIVE_SECONDS, send_events
from rolltap.addons.engine.client import Chunk, Engine
from rolltap.addons.engine.own_model import Served
from rolltap.addons.engine.policy import Policy, SessionPolicy
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.errors import EngineError
from rolltap.addons.prompts.conversations import Prompt
from rolltap.addons.prompts.reply import SampledReply
from rolltap.addons.store.records import Call, VersionSpan
from tests.deep import examples

PROMPT_IDS = [1, 2, 3]
STOP = 0
MAX_TOKENS = 8
TURNS = 20
"""Iterations of the event loop after which nothing is left to run until the clock advances."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock is set by the test."""

    now = 0.0

    def time(self):
        return self.now


class ScriptedClient:
    """An engine's client that replays a script, a queue of token ids, finish reasons and errors.

    With `rude` it raises an EngineError when it is cancelled.
    """

    healthy = mock.AsyncMock(return_value=True)
    served = mock.AsyncMock(return_value=Served("scripted", 8192, "1"))
    close = mock.AsyncMock()
    forget = mock.Mock()
    error = Engine.error

    def __init__(self, url, scenario, rude):
        self.url = url
        self.script = scenario.script
        self.sent = scenario.sent
        self.rude = rude
        self.asked = []
        self.expected = []

    def _is_whole(self):
        return STOP in self.sent or len(self.sent) == MAX_TOKENS

    async def generate(self, token_ids, sampling, model):
        start = len(self.sent)
        self.asked.append(([*token_ids], sampling["max_tokens"], self._is_whole()))
        self.expected.append((PROMPT_IDS + self.sent, MAX_TOKENS - start, False))
        while True:
            try:
                said = await self.script.get()
            except asyncio.CancelledError:
                if self.rude:
                    raise EngineError("the connection was closed") from None
                raise
            if isinstance(said, Exception):
                raise said
            if isinstance(said, str):
                versions = [VersionSpan(version="1", start=0, end=len(self.sent) - start)]
                yield Chunk([], [], finish_reason=said, weight_versions=versions)
                return
            new = []
            for token in said:
                if not self._is_whole():
                    new.append(token)
                    self.sent.append(token)
            yield Chunk(new, [-1.0] * len(new))


class Disk(ThreadPoolExecutor):
    """A writer of runs, and the executor of its fsyncs. They complete when the test calls
    `answer`."""

    run = Path("run")

    def __init__(self, policy):
        super().__init__()
        self.sync_policy = policy
        self.refusals = 0
        """Number of the next commits that fail."""
        self.told_no = 0
        self.calls = []
        self.faults = []
        self.waiting = []
        self.synced = False
        self.lost = False

    def add_call(self, call):
        if self.refusals:
            self.refusals -= 1
            self.told_no += 1
            raise OSError("No space left on device")
        self.heard = not self.generation.abandoned
        self.calls.append(call.to_row() | {"completion_ids": list(call.completion_ids)})

    def note(self, event):
        if event.kind == "fault":
            assert not self.generation.done
            self.faults.append(event)

    def sync(self):
        if self.lost:
            raise OSError("the disk is gone")
        self.synced = True

    def submit(self, function, *arguments):
        future = Future()
        self.waiting.append((function, arguments, future))
        return future

    def answer(self):
        for function, arguments, future in self.waiting:
            try:
                future.set_result(function(*arguments))
            except OSError as error:
                future.set_exception(error)
        self.waiting.clear()


class Renderer:
    """A renderer that decodes a token to its number. Its parser raises in the functions that are in
    `broken`."""

    reasoning_spans = ()
    vocabulary = 1_000_000

    def __init__(self):
        self.broken = set()
        self.text = ""

    def decode(self, token_ids):
        return "".join(f"{i} " for i in token_ids)

    def sampled_reply(self, prompt_ids, model_call):
        return SampledReply(self, self.decode, [])

    def feed(self, text):
        self._check("feed")
        self.text += text
        return "", text

    def finish(self, text, end):
        self._check("finish")
        return Reply(content=self.text), ("", "")

    def _check(self, name):
        if name in self.broken:
            raise RuntimeError("a parser's bug")


class Listener:
    """A request that listens for a stream or for the whole reply. `text` and `ends` are what the
    harness received."""

    start = keep_alive = mock.Mock(return_value=b"")

    def __init__(self, scenario, stream):
        self.generation = scenario.generation
        self.disk = scenario.disk
        self.text = ""
        self.ends = []
        self.task = asyncio.create_task(self._listen(stream))

    async def _listen(self, stream):
        with self.generation.listening():
            if stream:
                await send_events(self.generation, self, mock.AsyncMock())
                return
            while not await self.generation.finished(KEEP_ALIVE_SECONDS):
                pass
            if self.generation.reply is None:
                self.error(self.generation.error)
            else:
                self.text = self.generation.reply.content
                self.finish(self.generation.reply, self.generation.usage)

    def delta(self, reasoning, content):
        assert not self.ends
        self.text += content
        return b""

    def finish(self, reply, usage):
        assert [call["status"] for call in self.disk.calls] == ["completed"]
        assert self.disk.synced or self.disk.sync_policy != "call"
        self.ends.append(reply)
        return b""

    def error(self, error):
        assert self.disk.calls or self.disk.told_no
        self.ends.append(error)
        return b""


class Scenario:
    """One generation, and the events that a test can apply to it."""

    def __init__(self, policy="session", engines=1, patience=60.0, rude=False):
        self.disk = Disk(policy)
        self.renderer = Renderer()
        self.remembered = []
        """Contents of the replies that later calls can continue."""
        self.script = asyncio.Queue()
        self.sent = []
        self.listeners = []
        self.faulty = False
        asyncio.get_running_loop().set_default_executor(self.disk)
        self.pool = EnginePool([])
        self.pool.patience = patience
        for number in range(engines):
            self.pool._engines.append(ScriptedClient(f"http://engine-{number}", self, rude))
        self.budget = SessionBudget(SimpleNamespace(max_calls=0, max_sampled_tokens=0), Used())
        self.generation = Generation("c1", b"digest", Usage(len(PROMPT_IDS), 0))
        self.disk.generation = self.generation
        self._start()

    def _start(self):
        session = SimpleNamespace(
            engines=self.pool, rendering=self.renderer, writer=self.disk, add=self.remember
        )
        sampling = {
            "max_tokens": MAX_TOKENS,
            "stop_token_ids": [STOP],
            "structured_outputs": {"json_object": True},
        }
        prompt = Prompt(ModelCall("m", [], []), PROMPT_IDS, "root", "no earlier call", None, 0, [])
        call = Call(session_id="s1", call_id="c1", prompt_ids=PROMPT_IDS)
        self.generation.start(
            session,
            PreparedCall(call, prompt, sampling, b"digest"),
            SessionPolicy(mock.Mock(read=lambda: Policy("1")), keep=True),
            self.budget.take(routes.CHAT, MAX_TOKENS),
        )

    async def remember(self, prepared, reply):
        self.remembered.append(reply.content)

    async def turn(self, turns):
        for _ in range(turns):
            await asyncio.sleep(0)

    async def wait(self, seconds):
        asyncio.get_running_loop().now += seconds
        await self.turn(TURNS)

    def engine_says(self, said):
        self.script.put_nowait(said)

    engine_fails = engine_says

    def engine_dies(self):
        self.faulty = True
        self.engine_says(EngineError("the engine is down", retryable=True))

    def listen(self, stream):
        self.listeners.append(Listener(self, stream))

    def visit(self):
        """Begin and end listening without a turn of the event loop."""
        with self.generation.listening():
            pass

    def leave(self):
        if self.listeners:
            self.listeners.pop().task.cancel()

    def abort(self):
        """Abort as at the end of the session or of the recorder."""
        self.generation.abort("the session ended")

    def disk_refuses(self, commits):
        self.disk.refusals = commits

    def disk_answers(self):
        self.disk.answer()

    def disk_is_lost(self):
        self.disk.lost = True

    def renderer_breaks(self, function):
        self.renderer.broken.add(function)

    async def all_leave(self):
        """Remove all listeners, as when the harness is killed, and wait twice LINGER_SECONDS."""
        while self.listeners:
            self.leave()
        for _ in range(2):
            await self.wait(LINGER_SECONDS)
            self.disk.answer()

    async def engine_finishes(self):
        """Let the engine finish while a harness listens."""
        hopeful = not self.faulty and not self.generation.done
        self.listen(False)
        for _ in range(MAX_TOKENS):
            self.engine_says("stop")
            await self.wait(LINGER_SECONDS)
            self.disk.answer()
        await self.turn(TURNS)
        assert self.generation.reply is not None or not hopeful

    async def recorder_stops(self):
        self.abort()
        await self.turn(TURNS)
        self.disk.answer()

    def refuses(self, *states):
        """Assert that the call cannot become what does not follow its state."""
        for state in states:
            with pytest.raises(RuntimeError, match=f"and cannot become {state.name}"):
                self.generation._enter(state)

    def check(self):
        """Assert what holds of a call in its final state."""
        generation = self.generation
        disk = self.disk
        assert generation.done
        self.refuses(*State)
        assert self.budget.running == []
        for engine in self.pool._engines:
            assert engine.asked == engine.expected
        assert (generation.reply is None) != (generation.error is None)
        assert len(disk.calls) == 1 or (disk.told_no and generation.error is not None)
        assert len(disk.faults) <= (generation.error is not None)
        # an error that nobody thought of may be the request's
        unexpected = ("aborted", "internal_error")
        if generation.error is not None and generation.error.code not in unexpected:
            assert len(disk.faults) == 1
        completed = False
        for call in disk.calls:
            completed = call["status"] == "completed"
            assert call["completion_ids"] == self.sent
            assert call["finished_at"] is not None
            assert completed == (call["reply"] is not None) == (call["error"] is None)
            if completed:
                assert disk.heard
                assert call["violation"] is None
                assert generation.reply is not None or disk.lost
        assert len(self.remembered) == completed
        text = "".join(f"{i} " for i in self.sent)
        if generation.reply is not None:
            assert completed
            assert generation.reply.content == text
            assert disk.synced or disk.sync_policy != "call"
        for listener in self.listeners:
            listener.task.result()
            assert listener.ends == [generation.reply or generation.error]
            assert generation.reply is None or listener.text == text
        assert len(asyncio.all_tasks()) == 1, "a task is left"
        assert generation._task.cancelled() or generation._task.exception() is None


def happens(name, *values):
    """Return a strategy of an event, its arguments, and the number of event loop iterations after
    it."""
    return st.tuples(st.just(name), st.tuples(*values), st.sampled_from([0, 1, 2, TURNS]))


tokens = st.lists(st.sampled_from([5, 6, 7, 8, STOP]), min_size=1, max_size=4)
failures = st.sampled_from([EngineError("the engine refused", status=400), "abort", "repetition"])
FAULTS = {"abort", "engine_fails", "disk_refuses", "disk_is_lost", "renderer_breaks", "all_leave"}
"""Events of which a scenario gets a random subset. With all of them, few scenarios would reach a
reply."""
EVENTS = [
    (4, "engine_says", tokens),
    (3, "listen", st.booleans()),
    (1, "engine_says", st.sampled_from(["stop", "length"])),
    (1, "wait", st.sampled_from([0.1, 0.5, 2.0])),
    (2, "engine_dies"),
    (1, "visit"),
    (1, "leave"),
    (1, "disk_answers"),
    (1, "all_leave"),
    (1, "abort"),
    (1, "engine_fails", failures),
    (1, "disk_refuses", st.integers(1, 2)),
    (3, "disk_is_lost"),
    (3, "renderer_breaks", st.sampled_from(["feed", "finish"])),
]
"""(How often, name, arguments) of each event."""
# each strategy is a new object: `one_of` drops duplicates
events = st.one_of([happens(*event) for often, *event in EVENTS for _ in range(often)])


def run(steps):
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(steps)


@given(
    happened=st.lists(events, min_size=6, max_size=30),
    faults=st.sets(st.sampled_from(sorted(FAULTS))),
    end=st.sampled_from(["all_leave", "engine_finishes", "recorder_stops"]),
    policy=st.sampled_from(["session", "call"]),
    engines=st.integers(1, 2),
    patience=st.sampled_from([0.0, 60.0]),
    rude=st.booleans(),
)
@examples(800)
def test_a_call_is_recorded_once_and_every_listener_is_answered(
    happened, faults, end, policy, engines, patience, rude
):
    async def steps():
        scenario = Scenario(policy, engines, patience, rude)
        scenario.refuses(State.SAMPLING, State.COMMITTED, State.DELIVERABLE)
        for name, values, turns in [*happened, (end, (), TURNS)]:
            if name in FAULTS - faults and name != end:
                continue
            scenario.faulty |= name in FAULTS
            done = getattr(scenario, name)(*values)
            if done is not None:
                await done
            await scenario.turn(turns)
        await scenario.pool.close()
        scenario.check()

    run(steps())


def test_a_stream_is_kept_alive_while_a_tool_call_is_sampled():
    """Its text is none of the stream's."""

    async def steps():
        scenario = Scenario()
        scenario.renderer.feed = lambda text: ("", "")
        changed = asyncio.create_task(scenario.generation.changed(0, 1.0))
        await scenario.turn(TURNS)
        for _ in range(2):
            scenario.engine_says([5])
            await scenario.wait(0.5)
        assert changed.result() is False
        await scenario.recorder_stops()
        await scenario.pool.close()

    run(steps())
