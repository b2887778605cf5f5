"""Groups on a bad day: each has one end, no event is lost or comes twice, and nothing is left
behind."""

import json
import random
from collections import Counter

import pytest

import rolltap
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.resume import STARTED_AGAIN
from rolltap.trainer.runs.views.training import EVALUATION
from tests.trainer.rollouts.soak import left
from tests.trainer.service.bad_day import BadDay

KILLS = [
    "kill the service",
    "kill the follower",
    "kill the recorder",
    "kill a judge",
    "kill the agents",
]
ACTS = [*KILLS, *KILLS, "kill the service", "kill a judge", "replace the engine"]
GROUPS, SESSIONS, SEED = 12, 4, 1


def submission(number, **fields):
    return (
        "POST",
        "/groups",
        {"id": f"g{number}", "task": f"t{number % 4}", "sessions": SESSIONS, **fields},
    )


def short_day():
    return [submission(0, sessions=2), submission(1, sessions=2)], {3: "kill the service"}, 1


def long_day():
    """Return steps, of which some are taken again, the acts, and the number of requests from one
    step to the next."""
    chance = random.Random(SEED)
    steps = [
        submission(n, priority=chance.choice([0, 50, 100]), evaluation=n == 7)
        for n in range(GROUPS)
    ]
    steps[2][2].update(sampling={"temperature": 0.5})
    steps[3][2].update(task="endless", deadline=60)
    cancels = [("DELETE", f"/groups/{name}", {}) for name in ("g4", "g8")]
    steps = [*steps[:5], cancels[0], steps[0], *steps[5:9], cancels[1], *steps[9:], steps[5]]
    places = sorted(chance.sample(range(3, 66), len(ACTS)))
    return steps, dict(zip(places, chance.sample(ACTS, len(ACTS)), strict=True)), 3


@pytest.fixture(scope="module", params=[short_day, pytest.param(long_day, marks=pytest.mark.deep)])
def day(request, tokenizer, tokenizer_folder, tmp_path_factory):
    day = BadDay(tokenizer, tokenizer_folder, tmp_path_factory.mktemp("chaos"), *request.param())
    day.endure()
    return day


@pytest.fixture(scope="module")
def runs(day):
    """Return the run of the service, and that of its evaluations if there was one."""
    folders = [day.service.run, day.service.run / EVALUATION]
    return [rolltap.open_run(folder) for folder in folders if folder.is_dir()]


@pytest.fixture(scope="module")
def sessions(runs):
    return [session for run in runs for session in run.sessions()]


@pytest.fixture(scope="module")
def calls(runs):
    return {name: calls for run in runs for name, calls in run.calls.items()}


@pytest.fixture(scope="module")
def ends(day):
    return [data for _, kind, data in day.seen if kind == "ended"]


def test_it_was_a_bad_day_and_the_service_went_on(day):
    assert Counter(day.done) == Counter(day.acts.values())
    assert day.statuses == [-9] * day.done.count("kill the service") + [130], day.said
    assert "Traceback" not in day.said


def test_the_follower_got_each_event_of_the_journal_once(day):
    head, *lines = map(json.loads, (day.service.run / "service.jsonl").read_text().splitlines())
    expected = []
    for number, line in enumerate(lines, 1):
        shown = {key: line[key] for key in line.keys() - {"kind", "request", "task_digest"}}
        expected.append((f"{head['journal']}-{number}", line["kind"], shown))
    assert day.seen == expected


def test_each_group_was_accepted_once_and_ended_once_after_its_sessions(day, ends):
    for name in day.groups:
        kinds = [kind for _, kind, data in day.seen if data["id"] == name]
        assert (kinds[0], kinds[-1]) == ("accepted", "ended")
        assert kinds.count("accepted") == kinds.count("ended") == 1
    states = dict.fromkeys(day.groups, "ended")
    if len(day.groups) == GROUPS:
        states |= {"g3": "expired", "g4": "cancelled", "g8": "cancelled"}
    assert {end["id"]: end["state"] for end in ends} == states


def test_each_session_of_a_group_has_one_outcome_and_each_attempt_one_event(day, sessions, ends):
    told = Counter(data["session_id"] for _, kind, data in day.seen if kind == "session")
    assert told == Counter(session.session_id for session in sessions)
    assert told == Counter(name for end in ends for name in end["session_ids"])
    attempts = {}
    for session in sorted(
        sessions, key=lambda session: SessionName.parse(session.session_id).attempt
    ):
        attempts.setdefault(SessionName.parse(session.session_id).place, []).append(session.status)
    for end in ends:
        for number in range(day.groups[end["id"]]["sessions"]) if end["state"] == "ended" else ():
            *earlier, last = attempts[f"{end['id']}-{number}"]
            assert {*earlier} <= STARTED_AGAIN
            assert last not in STARTED_AGAIN


def test_every_reward_is_the_judges(sessions, calls, ends, tokenizer):
    rewards = {}
    for session in sessions:
        if session.status == "completed":
            said = tokenizer.decode(calls[session.session_id][-1].completion_ids)
            assert session.reward == float("good" in said)
        if session.reward is not None:
            assert session.status not in STARTED_AGAIN
            rewards[session.session_id] = session.reward
    assert rewards == {name: reward for end in ends for name, reward in end["rewards"].items()}


def test_the_ledger_is_the_sum_of_the_groups_and_the_runs_are_sound(runs, calls, ends):
    sampled = sum(len(call.completion_ids) for each in calls.values() for call in each)
    ledgers = [run.ledger() for run in runs]
    assert sum(ledger.sampled for ledger in ledgers) == sampled > 0
    assert sampled == sum(end["sampled"] for end in ends)
    left_out = Counter()
    for ledger in ledgers:
        left_out.update(ledger.left_out)
        assert ledger.sampled == ledger.trained + sum(ledger.left_out.values())
    told = Counter()
    for end in ends:
        told.update(end["left_out"])
    assert left_out == told
    for run in runs:
        assert run.verify(progress=False).sound


def test_no_process_and_no_workspace_is_left(day):
    assert left(str(day.folder)) == {}
    assert list((day.folder / "tmp").glob("rolltap-*")) == []
