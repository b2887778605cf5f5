"""The clients against a real service, some of them through a relay that breaks connections."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import httpx
import pytest

import rolltap
from rolltap.errors import InputError, ServiceError
from rolltap.trainer.service import client as module
from rolltap.trainer.service.app import make_app
from tests.scripted_engine import Answer, Say
from tests.trainer.service.relay import relay
from tests.trainer.service.served import shut


@pytest.fixture
async def client(service):
    return rolltap.AsyncClient(service.url, service.token)


@pytest.fixture
async def passing(service, monkeypatch):
    """Yield a relay to the service. A client that gets no answer pauses for a moment only."""
    monkeypatch.setattr(module, "PAUSES", (3, 0.01, 0.01))
    async with relay(httpx.URL(service.url).port) as passing:
        yield passing


@pytest.fixture
def through(service, passing):
    """Return a client of the service behind the relay."""
    return rolltap.AsyncClient(passing.url, service.token)


@pytest.fixture
def held(scripted):
    """Let the engine's answers wait for `scripted.release()`."""
    answers = scripted.otherwise
    shut(scripted)
    scripted.otherwise = lambda request: Say("good.", hold_after=1)
    yield
    scripted.release()
    scripted.otherwise = answers


async def past(client):
    """Return the events up to now: those before a group that is submitted here."""
    marker = await client.cancel((await client.submit("words", sessions=1)).id)
    events = []
    async with aclosing(client.events()) as every:
        async for event in every:
            if event.data.get("id") == marker.id:
                await client.wait(marker.id)
                return events
            events.append(event)


async def test_a_wait_for_a_group_that_is_not_run_raises_its_problem(open_groups):
    await open_groups()
    groups = await open_groups(instruction="stop")  # the task has changed
    client = rolltap.AsyncClient("http://service", "token")
    client._http._transport = httpx.ASGITransport(make_app(groups, "token"))
    with pytest.raises(ServiceError, match=r"the group a is not run: .* another content now"):
        await client.wait("a")


async def test_all_that_a_group_can_have_is_sent(client, scripted):
    at = datetime.now(UTC) + timedelta(hours=1)
    how = {"priority": 90, "deadline": at, "sampling": {"temperature": 0.5}, "evaluation": True}
    view = await client.submit("words", sessions=["a"], id="k", **how)
    assert (view.id, view.session_ids) == ("k", ["k-a"])
    await client.wait("k")
    assert scripted.requests[-1]["sampling_params"]["temperature"] == 0.5
    assert (
        await client.submit("words", sessions=["a"], id="k", **how)
    ).accepted_at == view.accepted_at
    for other in ({"priority": 1}, {"deadline": None}, {"evaluation": False}):
        with pytest.raises(ServiceError, match="which another request has"):
            await client.submit("words", sessions=["a"], id="k", **how | other)


async def test_a_task_is_sent_with_its_fields(client):
    task = rolltap.Task(id="mine", instruction="Say it.", evaluate=["true"])
    with pytest.raises(
        ServiceError, match="task 'mine': the runtime process does not hold code from requests"
    ):
        await client.submit(task)


async def test_a_group_whose_answer_is_lost_is_submitted_once(client, through, passing):
    before = len(await past(client))
    passing.lost = 2
    view = await through.submit("words", sessions=1)
    assert passing.connections == 3
    accepted = []
    for event in (await past(client))[before:]:
        if event.kind == "accepted":
            accepted.append(event.data["id"])
    assert accepted[-1] == view.id
    assert len(accepted) == 2  # one is that of `past`


async def test_a_service_that_never_answers_is_an_error_with_the_advice_to_start_it(
    through, passing
):
    passing.lost = 100
    with pytest.raises(
        ServiceError, match=r"no rollout service answers at .*start it with `rolltap service`"
    ) as found:
        await through.get("g")
    assert found.value.status is None
    with pytest.raises(ServiceError, match="no rollout service answers"):
        await anext(through.events())


async def test_a_service_that_accepts_requests_and_answers_none_is_given_up(
    service, passing, monkeypatch
):
    passing.is_mute = True
    monkeypatch.setattr(module, "_TIMEOUT", httpx.Timeout(0.05, connect=None))
    client = rolltap.AsyncClient(passing.url, service.token)
    with pytest.raises(ServiceError, match="no rollout service answers"):
        await client.wait("g")
    assert passing.connections == 4  # with the retries


async def test_the_service_s_message_and_status_are_in_the_error(client, service):
    with pytest.raises(
        ServiceError, match=r"'task' is 'u', which is not loaded.* \(422\)"
    ) as found:
        await client.submit("u")
    assert found.value.status == 422
    with pytest.raises(ServiceError, match=r"there is no group 'unknown' .*\(404\)"):
        await client.get("unknown")
    with pytest.raises(ServiceError, match=r"the token is missing.*\(401\)"):
        await rolltap.AsyncClient(service.url).service()
    with pytest.raises(ServiceError, match=r"is it a rollout service\? \(404\)"):
        await rolltap.AsyncClient(f"{service.url}/elsewhere", service.token).health()


async def test_events_go_on_after_a_broken_connection_where_they_broke(client, through, passing):
    seen = await past(client)
    after = None
    if seen:
        after = seen[0].cursor
    view = await client.submit("words", sessions=1)
    events = through.events(after)
    async for event in events:
        if event.data.get("id") == view.id:
            break
    passing.cut()
    for kind in ("session", "ended"):
        event = await anext(events)
        assert (event.kind, event.data["id"]) == (kind, view.id)
    await events.aclose()


async def test_a_group_that_ends_while_the_connection_is_broken_is_waited_for(
    client, through, passing, held, scripted
):
    view = await client.submit("words", sessions=1)
    waiting = asyncio.create_task(through.wait(view.id))
    await passing.reached(1)
    passing.lost = 1
    passing.cut()
    scripted.release()
    assert (await waiting).state == "ended"


async def test_waiting_for_a_group_has_a_time_limit_and_it_can_be_cancelled(client, held):
    view = await client.submit("words")
    with pytest.raises(TimeoutError):
        await client.wait(view.id, timeout=0.01)
    assert (await client.cancel(view.id)).state == "cancelled"
    assert (await client.wait(view.id)).state == "cancelled"


async def test_the_policy_is_set_and_read(client, scripted):
    scripted.weight_version = "3"
    policy = await client.policy("3")
    assert policy.version == "3"
    assert policy == await client.policy()
    assert (await client.service())["policy"]["version"] == "3"


async def test_health_says_what_is_wrong_and_needs_no_token(service, scripted):
    health = rolltap.AsyncClient(service.url).health
    found = await health()
    while "the recorder is starting" in found["problems"]:
        await asyncio.sleep(0.01)
        found = await health()
    assert found == {"ok": True, "problems": [], "warnings": []}
    scripted.answers["/health"] = Answer(500, "")
    try:
        gone = f"the engine at {scripted.url} does not answer"
        assert await health() == {"ok": False, "problems": [gone], "warnings": []}
    finally:
        del scripted.answers["/health"]


async def test_traces_come_as_the_run_has_them(client):
    view = await client.wait((await client.submit("words", sessions=1)).id)
    traces, ledger = await client.traces(view.id)
    batch = rolltap.open_run(view.run).traces().batch(view.session_ids)
    assert (traces, ledger) == (batch.traces, batch.ledger)
    assert ledger.trained > 0


async def test_blocking_code_has_the_same_methods_also_beside_an_event_loop_and_in_several_threads(
    service,
):
    client = rolltap.Client(service.url, service.token)

    def work():
        view = client.submit("words", sessions=1)
        assert next(client.events()).cursor.endswith("-1")
        assert (view.task_id, view.state, view.ended_at) == ("words", "open", None)
        ended = client.wait(view.id)
        assert (ended.state, [each.reward for each in ended.sessions]) == ("ended", [1.0])
        again = client.get(view.id)
        cancelled = client.cancel(view.id)
        assert ended.sessions == again.sessions == cancelled.sessions
        assert ended.ended_at == again.ended_at == cancelled.ended_at
        assert client.policy().version
        assert client.health()["ok"]
        assert client.traces(view.id)[1].trained == ended.sampled
        return threading.current_thread()

    assert len(set(await asyncio.gather(*(asyncio.to_thread(work) for _ in range(3))))) > 1


def test_threads_that_ask_first_at_the_same_moment_have_one_loop(monkeypatch):
    """Two loops would take connections of one pool from each other: it is of a single loop."""
    monkeypatch.setattr(module, "_loops", {})
    ready = threading.Barrier(8)

    def loop():
        ready.wait()
        return module._loop()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = [threads.submit(loop) for _ in range(8)]
            assert len({each.result() for each in found}) == 1
    finally:
        sys.setswitchinterval(before)


def test_every_method_of_the_one_is_one_of_the_other():
    public = {name for name in dir(rolltap.AsyncClient) if not name.startswith("_")}
    assert public == {name for name in dir(rolltap.Client) if not name.startswith("_")}


def test_the_token_comes_from_a_file_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    client = rolltap.AsyncClient("http://127.0.0.1:1", token_file=tmp_path / "token")
    assert client._http.headers["authorization"] == "Bearer secret"
    with pytest.raises(InputError, match=r"token file .*missing cannot be read"):
        rolltap.Client("http://127.0.0.1:1", token_file=tmp_path / "missing")


def test_a_url_without_a_scheme_is_refused():
    with pytest.raises(InputError, match="begin it with http://"):
        rolltap.Client("localhost:8900")
