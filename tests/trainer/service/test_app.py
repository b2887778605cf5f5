"""The service by HTTP, as a process with a recorder and a scripted engine."""

import httpx
import pytest

import rolltap
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.app import BODY_BYTES
from tests.scripted_engine import Answer, Say
from tests.trainer.service.served import hold, program, require_refused, serving


def test_a_group_comes_back_with_rewards_and_where_its_calls_are(service):
    answer = service.submit(id="first", sessions=2)
    assert (answer.status_code, answer.json()["state"]) == (201, "open")
    kinds = [kind for _, kind, _ in service.events_of("first")]
    assert kinds == ["accepted", "session", "session", "ended"]
    view = service.view("first")
    assert (view["state"], view["session_ids"]) == ("ended", ["first-0", "first-1"])
    rewards = {each["session_id"]: each["reward"] for each in view["sessions"]}
    assert rewards == {"first-0": 1.0, "first-1": 1.0}
    batch = rolltap.open_run(view["run"]).traces().batch(view["session_ids"])
    assert batch.ledger.sampled == view["sampled"] > 0
    for name in view["shards"]["calls"]:
        assert (service.run / name).is_file()
    messages = service.client.get("/groups/first/messages").json()
    assert [line["messages"][-1]["content"] for line in messages] == ["good.", "good."]


def test_the_same_request_is_the_same_group_and_another_one_of_its_id_is_refused(service):
    assert service.submit(id="twice").status_code == 201
    assert service.submit(id="twice").status_code == 200
    other = service.submit(id="twice", sessions=3)
    require_refused(other, 409, "'id' is 'twice', which another request has")
    service.events_of("twice")
    assert service.submit(id="twice").json()["state"] == "ended"


OWN = {"instruction": "go", "evaluate": ["true"]}
WRONG = {
    "an unknown key": ({"sesions": 2}, 422, "unknown key 'sesions'"),
    "a task that is not loaded": ({"task": "nowhere"}, 422, "'task' is 'nowhere', which is not"),
    "no session": ({"sessions": 0}, 422, "'sessions' is 0: give a number from 1 to 1024"),
    "names that are the same": ({"sessions": ["a", "a"]}, 422, "give each session a name of its"),
    "an id that no file can have": (
        {"id": "g" * 100, "sessions": ["s" * 200]},
        422,
        "has 301 characters: give a shorter 'id' or shorter names in 'sessions'",
    ),
    "a name that is a path": ({"id": "../x"}, 422, "'id' is '../x'"),
    "a priority": ({"priority": 101}, 422, "'priority' is 101"),
    "a deadline in the past": ({"deadline": "2001-01-01T00:00:00Z"}, 422, "which is past"),
    "a deadline without a zone": ({"deadline": "2099-01-01T00:00:00"}, 422, "'deadline' is"),
    "sampling": ({"sampling": {"temprature": 1}}, 422, "rolltap_sampling.temprature is unknown"),
    "temperature": ({"sampling": {"temperature": -3}}, 422, "rolltap_sampling.temperature is -3.0"),
    "a task with a loaded id": ({"task": {"id": "words", **OWN}}, 409, "'task.id' is 'words', a"),
    "a task that is none": ({"task": {"id": "own"}}, 422, "'instruction' is missing"),
    "more than may wait": ({"sessions": 1024}, 429, "start the service with a larger --queue"),
}


@pytest.mark.parametrize(("body", "status", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_names_the_field_and_the_fix(service, body, status, message):
    require_refused(service.submit(**body), status, message)


def test_what_is_no_json_or_too_large_is_refused(service):
    kind = {"content-type": "application/json"}
    require_refused(service.client.post("/groups", content=b'{"task"', headers=kind), 422, "JSON")
    require_refused(service.client.post("/groups", json={}), 422, "'task' is missing")
    large = service.submit(task="x" * BODY_BYTES)
    require_refused(large, 413, "load large tasks with --tasks")


@pytest.mark.parametrize("path", ["/service", "/groups/first", "/events", "/policy", "/metrics"])
@pytest.mark.parametrize(("token", "what"), [(None, "missing"), ("no", "wrong")])
def test_every_route_needs_the_token(service, path, token, what):
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(service.url + path, headers=headers, trust_env=False)
    require_refused(answer, 401, f"the token is {what}: send the header 'Authorization: Bearer")


def test_its_interface_needs_no_token(service):
    interface = httpx.get(f"{service.url}/openapi.json", trust_env=False).json()
    paths = {"/groups", "/groups/{name}", "/events", "/policy", "/metrics"}
    assert paths <= interface["paths"].keys()


def test_the_token_can_be_read_by_this_user_alone(service):
    assert (service.run / "service.token").stat().st_mode & 0o777 == 0o600


def test_a_cursor_goes_on_behind_its_event_and_one_of_another_run_is_refused(service):
    events = service.complete("cursor")
    assert service.events(events[0][0])[: len(events) - 1] == events[1:]
    future = events[0][0].split("-")[0] + "-99999"
    for wrong in ("00000000-1", future):
        answer = service.client.get("/events", params={"after": wrong})
        require_refused(answer, 422, "is no cursor of this run")


def test_a_group_that_is_not_there_or_has_not_ended_has_no_traces(service, scripted):
    assert service.client.get("/groups/none/traces").status_code == 404
    hold(scripted)
    service.submit(id="held", sessions=1)
    scripted.holding.wait()
    early = service.client.get("/groups/held/traces")
    require_refused(early, 409, "has not ended: wait for its event")
    scripted.release()
    service.events_of("held")


def test_a_group_that_is_cancelled_ends_once_and_stays_so(service, scripted):
    hold(scripted)
    service.submit(id="cancelled", sessions=["a"])
    scripted.holding.wait()
    for _ in range(2):
        assert service.client.delete("/groups/cancelled").json()["state"] == "cancelled"
    events = service.events_of("cancelled")
    assert [kind for _, kind, _ in events] == ["accepted", "cancelled", "session", "ended"]
    assert (events[-1][2]["state"], events[-1][2]["rewards"]) == ("cancelled", {})
    view = service.client.delete("/groups/cancelled").json()
    assert (view["state"], view["sessions"][0]["error"]) == ("cancelled", "its group was cancelled")
    scripted.release()


def test_sessions_are_stopped_at_their_deadline(service, scripted):
    sessions = []
    for seconds in (2, 8, 32, 128):  # the first deadline before which the session runs
        name = f"late-{seconds}"
        hold(scripted)
        if service.submit_before(name, seconds, sessions=1):
            assert service.events_of(name)[-1][2]["state"] == "expired"
            sessions = service.view(name)["sessions"]
        scripted.replies.clear()
        if sessions:
            break
    (session,) = sessions
    assert session["status"] == "cancelled"
    assert session["error"] == "the deadline of its group had passed"
    scripted.release()


def test_a_group_has_the_sampling_that_it_asks_for_and_others_have_the_services(service):
    service.complete("warm", sessions=1, sampling={"temperature": 0.25, "seed": 7})
    service.complete("usual", sessions=1, evaluation=True)
    warm = rolltap.open_run(service.run).calls["warm-0"][0].parsed_sampling
    usual = rolltap.open_run(service.run / EVALUATION).calls["usual-0"][0].parsed_sampling
    assert (warm["temperature"], warm["seed"], usual["temperature"]) == (0.25, 7, 1.0)


def test_weights_from_outside_are_those_of_the_sessions_after_them(service, scripted):
    assert service.client.get("/policy").json() == {"version": "default", "model": None}
    gone = service.client.post("/policy", json={"version": "3", "adapter": "policy-3"})
    require_refused(gone, 422, "does not serve: load it into every engine first")
    scripted.weight_version = "3"
    scripted.otherwise = lambda request: Say("good.", weight_version="3")
    assert service.client.post("/policy", json={"version": "3"}).json()["version"] == "3"
    service.complete("newer", sessions=1)
    (session,) = service.view("newer")["sessions"]
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
    require_refused(answer, 500, "the policy is the previous one")


LOAD = """vllm:num_requests_running 1.0
vllm:num_requests_waiting 2.0
vllm:kv_cache_usage_perc 0.5
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total 0.0
"""


def metrics_of(service):
    """Return the samples of the service's metrics: name and labels -> value."""
    found = {}
    for line in service.client.get("/metrics").text.splitlines():
        if line[0] != "#":
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_metrics_count_what_the_run_has(service, scripted):
    hold(scripted)
    service.submit(id="left-out", sessions=1)
    scripted.holding.wait()
    service.client.delete("/groups/left-out")
    service.events_of("left-out")
    scripted.release()
    service.complete("measured", sessions=1, evaluation=True)
    events = service.events(until=lambda kind, data: kind == "ended" and data["id"] == "measured")
    published = {data["version"] for _, kind, data in events if kind == "policy"}
    runs = [rolltap.open_run(service.run), rolltap.open_run(service.run / EVALUATION)]
    rows = [session for run in runs for session in run.sessions() if session.status == "completed"]
    ledger = runs[0].ledger() + runs[1].ledger()
    expected = {
        'rolltap_sessions_total{status="completed"}': len(rows),
        "rolltap_reward_count": len(rows),
        "rolltap_reward_sum": sum(session.reward for session in rows),
        "rolltap_judge_seconds_count": len(rows),
        "rolltap_sampled_tokens_total": ledger.sampled,
        "rolltap_engine_waiting": 2,
        "rolltap_engine_cache": 0.5,
        "rolltap_policies": len(published),
        'rolltap_phase_sessions{phase="running"}': 0,
    }
    assert ledger.left_out
    for reason, number in ledger.left_out.items():
        expected[f'rolltap_left_out_tokens_total{{reason="{reason}"}}'] = number
    scripted.answers["/metrics"] = Answer(200, LOAD)
    found = metrics_of(service)
    named = {name for name in found if "left_out_tokens_total" in name}
    assert {name: found[name] for name in {*expected, *named}} == expected
    assert found["rolltap_recorder_lag_seconds"] > 0


def test_the_run_is_shown_in_the_browser_with_the_token_of_the_service(service):
    service.complete("shown")
    with httpx.Client(base_url=service.url, trust_env=False) as browser:
        assert browser.get("/view/api/run").status_code == 401
        answer = browser.get(f"/view/?token={service.token}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/view/")
        assert browser.get("/view/").headers["content-type"] == "text/html; charset=utf-8"
        rows = browser.get("/view/api/sessions").json()["sessions"]
        assert "shown" in {row["group_id"] for row in rows}
        shown = browser.get(f"/view/api/sessions/{rows[0]['session_id']}").json()
        assert shown["session"]["reward"] == 1.0


def test_a_service_on_ipv6_prints_a_url_that_a_client_can_use(scripted, tokenizer_folder, tmp_path):
    how = (tmp_path / "run", scripted.url, tokenizer_folder, program(tmp_path))
    with serving(*how, "--host", "::1") as service:
        assert service.url.startswith("http://[::1]:")
        assert service.client.get("/service").status_code == 200
    assert "is reached from other machines" not in service.said
