import pytest

from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.engine import completion
from rolltap.addons.engine import pool as module
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.tables import RunWriter, read_rows
from tests.addons.harness import Harness, user
from tests.scripted_engine import Answer, Say, ScriptedEngine

URLS = [f"http://10.0.0.{n}:8000" for n in range(1, 5)]
SESSIONS = [f"s{n}" for n in range(400)]


@pytest.fixture
async def engines():
    engines = EnginePool(URLS)
    yield engines
    await engines.close()


def homes(engines):
    return {session: engines.of(session).url for session in SESSIONS}


async def test_a_session_stays_with_one_engine_and_every_engine_has_sessions(engines):
    assert homes(engines) == homes(engines)
    counts = [list(homes(engines).values()).count(url) for url in URLS]
    assert all(60 < count < 140 for count in counts)


async def test_only_the_sessions_of_an_engine_that_failed_move_and_they_come_back(engines, monkeypatch):
    before = homes(engines)
    failed = engines.of("s0")
    engines.failed(failed)
    moved = homes(engines)
    assert failed.url not in moved.values()
    assert all(moved[session] == url for session, url in before.items() if url != failed.url)
    monkeypatch.setattr(module, "DOWN_SECONDS", -1.0)
    engines.failed(failed)
    assert homes(engines) == before


async def test_when_all_failed_each_session_has_its_own_again(engines):
    before = homes(engines)
    for engine in engines._engines:
        engines.failed(engine)
    assert homes(engines) == before


async def test_an_engine_that_fails_says_whether_another_one_is_left(engines):
    assert [engines.failed(engine) for engine in engines._engines] == [True, True, True, False]


async def test_when_no_engine_is_left_the_call_fails(tokenizer, rendering, tmp_path):
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    with ScriptedEngine(tokenizer) as one, ScriptedEngine(tokenizer) as two:
        endpoint = Endpoint(rendering, [one.url, two.url], writer, {}, patience=0)
        await endpoint.start()
        async with Harness.connect(endpoint) as harness:
            status, _ = await harness.ask(user())
        await endpoint.close()
    assert status == 502
    assert (len(one.requests), len(two.requests)) == (1, 1)
    writer.close()


async def test_an_engine_that_has_never_answered_is_replaced(tokenizer, rendering, tmp_path):
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    with ScriptedEngine(tokenizer) as engine:
        endpoint = Endpoint(rendering, ["http://127.0.0.1:9", engine.url], writer, {}, patience=0)
        await endpoint.start()
        engine.otherwise = lambda request: Say("Hi.")
        statuses = set()
        async with Harness.connect(endpoint) as harness:
            for number in range(8):  # each of the engines is the first choice of some of them
                body = {"model": "m", "messages": [user()]}
                async with harness.post(body, session=f"s{number}") as response:
                    statuses.add(response.status)
        await endpoint.close()
    assert statuses == {200}
    writer.close()


async def test_a_call_whose_engine_dies_goes_on_at_another_one(tokenizer, rendering, tmp_path, monkeypatch):
    """The call does not wait for the engine that died."""
    monkeypatch.setattr(completion, "FIRST_PAUSE_SECONDS", 1000.0)
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    with ScriptedEngine(tokenizer) as one, ScriptedEngine(tokenizer) as two:
        endpoint = Endpoint(rendering, [one.url, two.url], writer, {}, patience=0)
        await endpoint.start()
        first, second = (one, two) if endpoint.engines.of("s1").url == one.url else (two, one)
        first.replies += [Say("one two three", break_after=2), Answer(500, "down")]
        second.replies += [Say(" three"), Say("Hi.")]
        async with Harness.connect(endpoint) as harness:
            _, reply = await harness.ask(user())
            await harness.ask(user("Again"))
        await endpoint.close()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert second.requests[0]["token_ids"][: len(first.requests[0]["token_ids"])] == first.requests[0]["token_ids"]
    calls = list(read_rows(tmp_path, "calls"))
    assert [call["engine"] for call in calls] == [second.url] * 2
    assert calls[0]["violation"] is None
    writer.close()
