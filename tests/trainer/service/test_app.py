"""The service by HTTP, as a process with a recorder and a scripted scripted."""

from datetime import UTC, datetime, timedelta

import httpx
import pytest

import rolltap
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.app import BODY_BYTES
from tests.scripted_engine import Answer, Say
from tests.trainer.service.served import hold


def test_a_group_comes_back_with_rewards_and_where_its_calls_are(service):
    answer = service.submit(id="first", sessions=2)
    assert (answer.status_code, answer.json()["state"]) == (201, "open")
    kinds = [kind for _, kind, _ in service.events_of("first")]
    assert kinds == ["accepted", "session", "session", "ended"]
    view = service.client.get("/groups/first").json()
    assert (view["state"], view["session_ids"]) == ("ended", ["first-0", "first-1"])
    assert {each["session_id"]: each["reward"] for each in view["sessions"]} == {
        "first-0": 1.0,
        "first-1": 1.0,
    }
    run = rolltap.open_run(view["run"])
    batch = run.traces().batch(view["session_ids"])
    assert batch.ledger.sampled == view["sampled"] > 0
    assert {(service.run / name).is_file() for name in view["shards"]["calls"]} == {True}


def test_the_same_request_is_the_same_group_and_another_one_of_its_id_is_refused(service):
    first, again = service.submit(id="twice"), service.submit(id="twice")
    assert (first.status_code, again.status_code) == (201, 200)
    other = service.submit(id="twice", sessions=3)
    assert (other.status_code, other.json()["error"]) == (
        409,
        "'id' is 'twice', which another request has: choose another id",
    )
    service.events_of("twice")
    assert service.submit(id="twice").json()["state"] == "ended"


WRONG = {
    "an unknown key": ({"task": "words", "sesions": 2}, "unknown key 'sesions'"),
    "no task": ({"sessions": 2}, "'task' is missing"),
    "a task that is not loaded": (
        {"task": "nowhere"},
        "'task' is 'nowhere', which is not loaded; the service has words",
    ),
    "no session": (
        {"task": "words", "sessions": 0},
        "'sessions' is 0: give a number from 1 to 1024",
    ),
    "names that are the same": (
        {"task": "words", "sessions": ["a", "a"]},
        "give each session a name of its own",
    ),
    "an id that no file can have": (
        {"task": "words", "id": "g" * 100, "sessions": ["s" * 200]},
        (
            "has 301 characters: give a shorter 'id' or shorter names in 'sessions', of at most 200"
            " together"
        ),
    ),
    "a name that is a path": ({"task": "words", "id": "../x"}, "'id' is '../x'"),
    "a priority": ({"task": "words", "priority": 101}, "'priority' is 101"),
    "a deadline in the past": (
        {"task": "words", "deadline": "2001-01-01T00:00:00Z"},
        "which is past: give a later",
    ),
    "a deadline without a zone": (
        {"task": "words", "deadline": "2099-01-01T00:00:00"},
        "'deadline' is",
    ),
    "sampling": (
        {"task": "words", "sampling": {"temprature": 1}},
        "rolltap_sampling.temprature is unknown: use",
    ),
    "temperature": (
        {"task": "words", "sampling": {"temperature": -3}},
        "rolltap_sampling.temperature is -3.0: Input should be greater",
    ),
    "a task of the client's": (
        {"task": {"id": "own", "instruction": "go", "evaluate": ["true"]}},
        "the runtime process does not hold code from requests: send the id",
    ),
    "a task with a loaded id": (
        {"task": {"id": "words", "instruction": "go", "evaluate": ["true"]}},
        "'task.id' is 'words', a loaded task",
    ),
    "a task that is none": ({"task": {"id": "own"}}, "'instruction' is missing"),
    "more than may wait": (
        {"task": "words", "sessions": 1024},
        "start the service with a larger --queue",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_names_the_field_and_the_fix(service, case):
    body, message = WRONG[case]
    answer = service.client.post("/groups", json=body)
    assert message in answer.json()["error"]
    assert answer.status_code == {"a task with a loaded id": 409, "more than may wait": 429}.get(
        case, 422
    )


def test_what_is_no_json_or_too_large_is_refused(service):
    broken = service.client.post(
        "/groups", content=b'{"task"', headers={"content-type": "application/json"}
    )
    assert (broken.status_code, "JSON" in broken.json()["error"]) == (422, True)
    large = service.client.post("/groups", json={"task": "x" * BODY_BYTES})
    assert (large.status_code, "load large tasks with --tasks" in large.json()["error"]) == (
        413,
        True,
    )


@pytest.mark.parametrize("path", ["/service", "/groups/first", "/events", "/policy", "/metrics"])
@pytest.mark.parametrize(("token", "what"), [(None, "missing"), ("no", "wrong")])
def test_every_route_needs_the_token(service, path, token, what):
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(service.url + path, headers=headers, trust_env=False)
    assert (answer.status_code, answer.json()["error"]) == (
        401,
        (
            f"the token is {what}: send the header 'Authorization: Bearer TOKEN' with what the"
            " service's token file has"
        ),
    )


def test_its_health_and_its_interface_need_none(service):
    answers = iter(lambda: httpx.get(f"{service.url}/health", trust_env=False), None)
    health = next(
        answer for answer in answers if "the recorder is starting" not in answer.json()["problems"]
    )
    assert (health.status_code, health.json()) == (
        200,
        {"ok": True, "problems": [], "warnings": []},
    )
    interface = httpx.get(f"{service.url}/openapi.json", trust_env=False).json()
    assert {"/groups", "/groups/{name}", "/events", "/policy", "/metrics"} <= interface[
        "paths"
    ].keys()


def test_the_token_can_be_read_by_this_user_alone(service):
    assert (service.run / "service.token").stat().st_mode & 0o777 == 0o600


def test_a_cursor_goes_on_behind_its_event_and_one_of_another_run_is_refused(service):
    service.submit(id="cursor")
    events = service.events_of("cursor")
    assert service.events(events[0][0])[: len(events) - 1] == events[1:]
    other = service.client.get("/events", params={"after": "00000000-1"})
    assert (other.status_code, "is no cursor of this run" in other.json()["error"]) == (422, True)
    future = service.client.get("/events", params={"after": events[0][0].split("-")[0] + "-99999"})
    assert future.status_code == 422


def test_what_a_group_said_comes_as_traces_and_as_messages(service):
    service.submit(id="small", sessions=1)
    service.events_of("small")
    traces = service.client.get("/groups/small/traces").json()
    assert [trace["session_id"] for trace in traces["traces"]] == ["small-0"]
    own = rolltap.open_run(service.run).traces().batch(["small-0"])
    assert traces["traces"][0]["completion_ids"] == own.traces[0].completion_ids
    assert traces["ledger"]["sampled"] == own.ledger.sampled
    (line,) = service.client.get("/groups/small/messages").json()
    assert line["messages"][-1]["content"] == "good."


def test_a_group_that_is_not_there_or_has_not_ended_has_no_traces(service, scripted):
    assert service.client.get("/groups/none/traces").status_code == 404
    hold(scripted)
    service.submit(id="held", sessions=1)
    scripted.holding.wait()
    early = service.client.get("/groups/held/traces")
    assert (early.status_code, "has not ended: wait for its event" in early.json()["error"]) == (
        409,
        True,
    )
    scripted.release()
    service.events_of("held")


def test_a_group_that_is_cancelled_ends_once_and_stays_so(service, scripted):
    hold(scripted)
    service.submit(id="cancelled", sessions=["a"])
    scripted.holding.wait()
    answers = [service.client.delete("/groups/cancelled").json()["state"] for _ in range(2)]
    events = service.events_of("cancelled")
    assert [kind for _, kind, _ in events] == ["accepted", "cancelled", "session", "ended"]
    assert (answers, events[-1][2]["state"], events[-1][2]["rewards"]) == (
        ["cancelled"] * 2,
        "cancelled",
        {},
    )
    view = service.client.delete("/groups/cancelled").json()
    assert (view["state"], view["sessions"][0]["error"]) == ("cancelled", "its group was cancelled")
    scripted.release()


def test_sessions_are_stopped_at_their_deadline(service, scripted):
    for seconds in (2, 8, 32, 128):  # the first deadline before which the session runs
        name = f"late-{seconds}"
        hold(scripted)
        deadline = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        service.submit(id=name, sessions=1, deadline=deadline)
        events = service.events_of(name)
        assert (events[-1][1], events[-1][2]["state"]) == ("ended", "expired")
        scripted.replies.clear()
        sessions = service.client.get(f"/groups/{name}").json()["sessions"]
        if sessions:
            break
    (session,) = sessions
    assert (session["status"], session["error"]) == (
        "cancelled",
        "the deadline of its group had passed",
    )
    scripted.release()


def test_a_group_has_the_sampling_that_it_asks_for_and_others_have_the_services(service, scripted):
    service.submit(id="warm", sessions=1, sampling={"temperature": 0.25, "seed": 7})
    service.submit(id="usual", sessions=1, evaluation=True)
    service.events_of("warm"), service.events_of("usual")
    warm = rolltap.open_run(service.run).calls["warm-0"][0].parsed_sampling
    usual = rolltap.open_run(service.run / EVALUATION).calls["usual-0"][0].parsed_sampling
    assert (warm["temperature"], warm["seed"], usual["temperature"]) == (0.25, 7, 1.0)


def test_weights_from_outside_are_those_of_the_sessions_after_them(service, scripted):
    assert service.client.get("/policy").json() == {"version": "default", "model": None}
    gone = service.client.post("/policy", json={"version": "3", "adapter": "policy-3"})
    assert (
        gone.status_code,
        "does not serve: load it into every engine first" in gone.json()["error"],
    ) == (422, True)
    scripted.weight_version = "3"
    scripted.otherwise = lambda request: Say("good.", weight_version="3")
    assert service.client.post("/policy", json={"version": "3"}).json()["version"] == "3"
    service.submit(id="newer", sessions=1)
    service.events_of("newer")
    (session,) = service.client.get("/groups/newer").json()["sessions"]
    assert session["policy_version"] == "3"


def test_a_policy_that_cannot_be_written_is_an_error_that_says_so(service):
    file = service.run / "policy.json"
    same = {"version": service.client.get("/policy").json()["version"]}
    assert service.client.post("/policy", json=same).status_code == 200
    file.rename(file.with_suffix(".before"))
    file.mkdir()
    answer = service.client.post("/policy", json=same)
    file.rmdir()
    file.with_suffix(".before").rename(file)
    assert (answer.status_code, "the policy is the previous one" in answer.json()["error"]) == (
        500,
        True,
    )


LOAD = """vllm:num_requests_running 1.0
vllm:num_requests_waiting 2.0
vllm:kv_cache_usage_perc 0.5
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total 0.0
"""


def test_metrics_count_what_the_run_has(service, scripted):
    hold(scripted)
    service.submit(id="left-out", sessions=1)
    scripted.holding.wait()
    service.client.delete("/groups/left-out")
    service.events_of("left-out")
    scripted.release()
    service.submit(id="measured", sessions=1, evaluation=True)
    is_end = ("ended", "measured")
    events = service.events(until=lambda kind, data: (kind, data.get("id")) == is_end)
    published = {data["version"] for _, kind, data in events if kind == "policy"}
    scripted.answers["/metrics"] = Answer(200, LOAD)
    text = service.client.get("/metrics").text
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }
    runs = [rolltap.open_run(folder) for folder in (service.run, service.run / EVALUATION)]
    rows = [session for run in runs for session in run.sessions() if session.status == "completed"]
    assert (
        found['rolltap_sessions_total{status="completed"}']
        == len(rows)
        == found["rolltap_reward_count"]
    )
    ledger = runs[0].ledger() + runs[1].ledger()
    left_out = {
        f'rolltap_left_out_tokens_total{{reason="{name}"}}': number
        for name, number in ledger.left_out.items()
    }
    assert (found["rolltap_sampled_tokens_total"], bool(left_out)) == (ledger.sampled, True)
    assert {
        name: number for name, number in found.items() if "left_out_tokens_total" in name
    } == left_out
    assert found["rolltap_reward_sum"] == sum(session.reward for session in rows)
    assert found["rolltap_judge_seconds_count"] == len(rows)
    assert (found["rolltap_engine_waiting"], found["rolltap_engine_cache"]) == (2, 0.5)
    assert found["rolltap_policies"] == len(published)
    assert found["rolltap_recorder_lag_seconds"] > 0
    assert found['rolltap_phase_sessions{phase="running"}'] == 0


def test_the_run_is_shown_in_the_browser_with_the_token_of_the_service(service):
    service.submit(id="shown")
    service.events_of("shown")
    with httpx.Client(base_url=service.url, trust_env=False) as browser:
        assert browser.get("/view/api/run").status_code == 401
        answer = browser.get(f"/view/?token={service.token}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/view/")
        assert browser.get("/view/").headers["content-type"] == "text/html; charset=utf-8"
        rows = browser.get("/view/api/sessions").json()["sessions"]
        assert {row["group_id"] for row in rows} >= {"shown"}
        assert (
            browser.get(f"/view/api/sessions/{rows[0]['session_id']}").json()["session"]["reward"]
            == 1.0
        )
