"""Groups that evaluate, groups of forks, and sessions that are cancelled alone."""

import json

import pytest

import rolltap
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.groups import QueueFullError
from rolltap.trainer.service.requests import GroupRequest
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.service.served import (
    GOOD,
    TWO_CALLS,
    hold,
    program,
    require_refused,
    say_good,
    serving,
)


@pytest.fixture(scope="module")
def engine(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = say_good
        yield engine


@pytest.fixture(scope="module")
def service(engine, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    harness = program(folder, TWO_CALLS)
    tasks = [{"id": name, "instruction": "go", "evaluate": GOOD} for name in ("words", "others")]
    with serving(folder / "run", engine.url, tokenizer_folder, harness, tasks=tasks) as service:
        yield service


def test_an_evaluation_is_recorded_in_a_run_of_its_own_and_its_view_says_so(service):
    service.complete("trained", sessions=1)
    service.complete("held-out", sessions=2, evaluation=True)
    view = service.view("held-out")
    own = {*view["session_ids"]}
    assert view["run"] == str(service.run / EVALUATION)
    assert {each["reward"] for each in view["sessions"]} == {1.0}
    evaluation = rolltap.open_run(view["run"])
    assert own <= {session.session_id for session in evaluation.sessions()}
    assert view["sampled"] == evaluation.traces().batch(view["session_ids"]).ledger.sampled > 0
    for name in view["shards"]["calls"]:
        assert (service.run / EVALUATION / name).is_file()
    trained = {session.session_id for session in rolltap.open_run(service.run).sessions()}
    assert "trained-0" in trained
    assert not trained & own
    traces = service.client.get("/groups/held-out/traces").json()["traces"]
    assert {trace["session_id"] for trace in traces} == own
    assert len(service.client.get("/groups/held-out/messages").json()) == 2


def test_an_evaluation_goes_on_after_a_kill(service, engine):
    hold(engine)
    service.submit(id="cut", sessions=1, evaluation=True)
    engine.holding.wait()
    service.kill()
    engine.release()
    service.start()
    events = service.events_of("cut")
    outcomes = {data["session_id"]: data["status"] for _, kind, data in events if kind == "session"}
    assert outcomes == {"cut-0": "cancelled", "cut-0~1": "completed"}
    recorded = rolltap.open_run(service.run / EVALUATION).sessions()
    rows = {session.session_id: session.status for session in recorded}
    assert outcomes.items() <= rows.items()


def test_an_evaluation_begins_with_the_published_weights(service, engine):
    engine.weight_version = "7"
    engine.otherwise = lambda request: Say("good.", weight_version="7")
    assert service.client.post("/policy", json={"version": "7"}).status_code == 200
    service.complete("newest", sessions=1, evaluation=True)
    (session,) = service.view("newest")["sessions"]
    assert session["policy_version"] == "7"
    policy = json.loads((service.run / EVALUATION / "policy.json").read_text())
    assert policy["version"] == "7"


def calls_of(service, session):
    calls = rolltap.open_run(service.run).calls[session]
    return sorted(calls, key=lambda call: call.started_at)


def test_sessions_fork_a_recorded_one_at_a_call(service, engine):
    service.complete("source", sessions=1)
    first, second = calls_of(service, "source-0")
    asked = len(engine.requests)
    fork = {"session": "source-0", "call": second.call_id}
    view = service.submit(id="forks", sessions=2, fork=fork).json()
    service.events_of("forks")
    assert len(engine.requests) == asked + 2  # the first call of each answers as it did
    for session in view["session_ids"]:
        (own,) = calls_of(service, session)
        assert own.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    again = service.submit(id="forks", sessions=2, fork=fork)
    assert (again.status_code, again.json()["state"]) == (200, "ended")
    assert service.submit(id="forks", sessions=2).status_code == 409


@pytest.mark.parametrize(
    ("fork", "task", "status", "message"),
    [
        ({"session": "none-0", "call": "a"}, "words", 404, "'fork.session'"),
        ({"session": "trained-0", "call": "a"}, "others", 422, "'fork.session'"),
        ({"session": "trained-0", "call": "none"}, "words", 422, "'fork.call'"),
        ({"session": "trained-0"}, "words", 422, "'fork.call' is missing"),
    ],
    ids=["no session", "another task", "no call", "no field"],
)
def test_what_cannot_be_forked_is_refused_by_its_field(service, fork, task, status, message):
    if service.client.get("/groups/trained").status_code == 404:
        service.complete("trained", sessions=1)
    require_refused(service.submit(task=task, sessions=1, fork=fork), status, message)


def test_one_session_is_cancelled_and_the_others_of_its_group_go_on(service, engine):
    hold(engine)
    service.submit(id="one", sessions=["a"])
    engine.holding.wait()
    service.submit(id="two", sessions=["a", "b"])
    path = "/groups/one/sessions/one-a"
    assert service.client.delete(path).json()["state"] == "open"
    assert service.client.delete(path).json()["state"] in ("open", "ended")
    engine.release()
    events = service.events_of("one")
    assert [kind for _, kind, _ in events] == ["accepted", "cancelled", "session", "ended"]
    assert (events[1][2]["session_id"], events[2][2]["status"]) == ("one-a", "cancelled")
    assert events[-1][2]["state"] == "ended"
    assert service.events_of("two")[-1][2]["rewards"] == {"two-a": 1.0, "two-b": 1.0}
    assert service.client.delete(path).json()["state"] == "ended"
    unknown = service.client.delete("/groups/one/sessions/one-b")
    require_refused(unknown, 404, "has no session 'one-b'")
    assert service.client.delete("/groups/none/sessions/one-a").status_code == 404


@pytest.mark.deep  # the short suite has a kill above, and a start's reading of the event below
def test_a_session_that_was_cancelled_is_not_run_after_a_kill(service, engine):
    hold(engine)
    service.submit(id="killed", sessions=["a", "b"])
    engine.holding.wait()
    service.client.delete("/groups/killed/sessions/killed-a")
    service.kill()
    engine.release()
    service.start()
    events = service.events_of("killed")
    attempts = [data["session_id"] for _, kind, data in events if kind == "session"]
    assert "killed-a~1" not in attempts
    assert "killed-b" in events[-1][2]["rewards"] or "killed-b~1" in events[-1][2]["rewards"]


async def test_a_start_knows_of_a_session_that_was_cancelled(open_groups):
    for _ in range(2):
        groups = await open_groups(sessions=2)
        await groups.cancel_session("a", "a-0")
        assert groups.book.open["a"].stopped == {"a-0"}
    assert groups.book.open["a"].unfinished() == {"a-1"}
    assert len(groups.journal) == 2


async def test_a_session_whose_attempt_is_retried_still_waits(open_groups):
    groups = await open_groups(sessions=2, most=2)
    groups.book.open["a"].known |= {"a-0": "infrastructure", "a-1": "completed"}
    assert groups.book.waiting() == {50: 1}
    with pytest.raises(QueueFullError, match="beside 1 that wait or run"):
        await groups.submit(GroupRequest(id="b", task="words", sessions=2))
