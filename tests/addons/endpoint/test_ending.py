"""The end of a session, and the reward that may come with it."""

import json

import pytest

from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from tests.addons.harness import recording, user


@pytest.fixture
async def trusting(harness, rendering, scripted_engine):
    """Yield a client of a second recorder of the run, which accepts rewards."""
    async with recording(rendering, harness.run, scripted_engine.url, accept_rewards=True) as client:
        yield client


@pytest.fixture(autouse=True)
def replies(scripted_engine):
    scripted_engine.otherwise = lambda request: Say("Hello.", weight_version="7")


async def end(harness, body, session="s1"):
    headers = harness.endpoint.headers(session, "session.rolltap", None)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with harness.client.post(harness.url("/end"), data=data, headers=headers) as response:
        return response.status, await response.text()


async def test_a_session_that_rewards_itself_is_refused_and_recorded(harness):
    await harness.ask(user("Hi"))
    status, why = await end(harness, {"reward": 1.0})
    assert (status, "accepts no rewards" in why) == (403, True)
    assert session_rows(harness.run, "s1") == []
    (event,) = harness.events("refused")
    assert (event["session_id"], event["path"]) == ("s1", "/end")
    assert harness.events("ended") == []
    assert (await harness.ask(user("Ho")))[0] == 200


async def test_the_reward_of_a_session_comes_with_its_end(trusting):
    await trusting.ask(user("Hi"))
    body = {"reward": 0.5, "parts": {"speed": 1}, "task": "sort", "group": "sort-1"}
    assert await end(trusting, body) == (200, "")
    (session,) = session_rows(trusting.run, "s1")
    assert (session.status, session.reward, session.parts) == ("completed", 0.5, '{"speed": 1.0}')
    assert (session.task_id, session.group_id, session.policy_version) == ("sort", "sort-1", "7")
    assert json.loads(session.evidence) == {"reward_from": "/end"}
    assert (await trusting.ask(user("Ho")))[0] == 410


async def test_the_first_reward_counts(trusting):
    await trusting.ask(user("Hi"))
    assert (await end(trusting, {"reward": 0}))[0] == 200
    status, why = await end(trusting, {"reward": 1})
    assert (status, "has the reward 0 already" in why) == (409, True)
    assert [session.reward for session in session_rows(trusting.run, "s1")] == [0.0]
    assert await trusting.end() == (200, "")


async def test_a_session_without_a_completed_call_has_no_reward(trusting):
    status, why = await end(trusting, {"reward": 1})
    assert (status, "no session" in why) == (409, True)
    assert list(read_rows(trusting.run, "sessions")) == []


@pytest.mark.parametrize(
    "body",
    [
        b"1.0",
        b"{",
        b'{"reward": NaN}',
        b'{"reward": 1e999}',
        b'{"reward": 1' + b"0" * 400 + b"}",
        b'{"reward": true}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"parts": {"speed": 1}}',
        b'{"reward": 1, "parts": {"speed": Infinity}}',
        b'{"reward": 1, "parts": [1]}',
        b'{"reward": 1, "session": "s2"}',
        b'{"reward": 1, "task": "a\\u001b[2J"}',
        b'{"reward": 1, "group": 5}',
        b"[" * 100_000,
        b'\xff{"reward": 1}',
    ],
)
async def test_a_body_that_is_no_reward_changes_nothing(trusting, body):
    await trusting.ask(user("Hi"))
    assert (await end(trusting, body))[0] == 400
    assert session_rows(trusting.run, "s1") == []
    assert len(trusting.events("refused")) == 1
    assert (await trusting.ask(user("Ho")))[0] == 200


async def test_a_session_cannot_name_another_one(trusting):
    await trusting.ask(user("Hi"))
    async with trusting.post({"model": "m", "messages": [user("Hi")]}, session="s2") as response:
        assert response.status == 200
    await end(trusting, {"reward": 1, "task": "t"})
    assert session_rows(trusting.run, "s2") == []
