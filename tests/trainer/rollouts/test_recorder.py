"""The recorder as child processes."""

import json
import os
import signal
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import pytest

from rolltap.addons.errors import InputError, RecorderError, RunError
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import read_rows, run_files
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.traces.reader import load_sessions
from tests.recorder_process import CHAT, HELLO
from tests.scripted_engine import Answer, Say, ScriptedEngine

NOWHERE = "http://127.0.0.1:9"


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    while not process.ended:
        time.sleep(0.01)


def ask(recorder, session_id, content="Hello"):
    """Send one model call of a session, as its harness would. Return the status of the answer."""
    environment = recorder.environment(session_id)
    context = ssl.create_default_context(cafile=environment["SSL_CERT_FILE"])
    proxy = environment["HTTPS_PROXY"]
    body = {**HELLO, "messages": [{"role": "user", "content": content}]}
    with httpx.Client(proxy=proxy, verify=context, trust_env=False, timeout=600) as client:
        return client.post(CHAT, json=body).status_code


def ended(session_id, **fields):
    """Return the row of a session that is completed."""
    return Session(session_id=session_id, **{"status": "completed", **fields})


@pytest.fixture(scope="module")
def running(tmp_path_factory, tokenizer_folder):
    with Recorder(
        tmp_path_factory.mktemp("run"), engine=NOWHERE, model=tokenizer_folder
    ) as recorder:
        yield recorder


def test_a_log_that_cannot_be_written_does_not_end_the_recorder(tmp_path, tokenizer_folder):
    (tmp_path / "recorder.log").symlink_to("/dev/full")
    with Recorder(tmp_path, engine=NOWHERE, model=str(tokenizer_folder)) as recorder:
        recorder.end(ended("s1"))
        recorder.check()


def test_a_recorder_that_dies_inside_the_block_is_an_error_at_its_end(tmp_path, tokenizer_folder):
    recorder = Recorder(tmp_path, engine=NOWHERE, model=tokenizer_folder)
    with pytest.raises(RecorderError, match="the recorder died with status -9"), recorder:
        kill(recorder._processes[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"session_id": ""}, "the session has an empty session_id"),
        ({"status": "done"}, "session s: status='done': choose completed, failed, timeout, budget"),
        ({"status": "unknown"}, "status='unknown': choose"),
        ({"reward": float("nan")}, "session s: the reward nan is not finite"),
        (
            {"status": "infrastructure", "reward": 1.0},
            "session s: a session with the status infrastructure has no reward",
        ),
    ],
)
def test_a_session_that_cannot_be_is_refused_and_not_recorded(running, fields, message):
    with pytest.raises(InputError, match=message):
        running.end(ended(**{"session_id": "s", **fields}))
    assert load_sessions(running.path) == {}


def test_outside_of_its_block_a_recorder_says_so(tmp_path, tokenizer_folder):
    recorder = Recorder(tmp_path, engine=NOWHERE, model=tokenizer_folder)
    with pytest.raises(RecorderError, match="the recorder is not running: use it inside"):
        recorder.environment("s")
    with recorder:
        recorder.end(ended("s"))
    with pytest.raises(RecorderError, match="the recorder is not running"):
        recorder.end(ended("t"))
    (session,) = load_sessions(tmp_path).values()
    assert session.finished_at >= session.started_at


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (
            {"options": {"rolltap_alow": "pypi.org"}},
            "rolltap_alow is no option .*: did you mean rolltap_allow",
        ),
        ({"options": {"rolltap_keep_adapter": "maybe"}}, "rolltap_keep_adapter is 'maybe'"),
        (
            {"options": {"rolltap_fsync": "sometimes"}},
            "rolltap_fsync is 'sometimes': Input should be",
        ),
        ({"processes": 0}, "processes=0: give at least 1"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name_before_the_folder_is_made(
    tmp_path, settings, refused
):
    with pytest.raises(InputError, match=refused):
        Recorder(tmp_path / "run", engine=NOWHERE, model="m", **settings)
    assert not (tmp_path / "run").exists()


def test_the_calls_of_a_program_end_before_its_result_is_judged(
    tmp_path, scripted_engine, tokenizer_folder
):
    scripted_engine.replies.extend([Say("Hi."), Say("Hi."), Answer(500, "broken")])
    options = {"rolltap_patience": "0"}
    with Recorder(
        tmp_path, engine=scripted_engine.url, model=tokenizer_folder, options=options
    ) as recorder:
        assert ask(recorder, "good") == ask(recorder, "bad") == 200
        assert ask(recorder, "bad", "More") == 502
        assert recorder.end_calls("good") is None
        assert "answered 500" in recorder.end_calls("bad")
        assert ask(recorder, "good", "More") == 410
        recorder.end(ended("good", reward=1.0))


class TestPolicyVersion:
    """The version in a session's row is that of the first token that was sampled in it."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tokenizer):
        with ScriptedEngine(tokenizer) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, engine, tmp_path_factory, tokenizer_folder):
        with Recorder(
            tmp_path_factory.mktemp("run"), engine=engine.url, model=tokenizer_folder
        ) as recorder:
            yield recorder

    @pytest.fixture(autouse=True)
    def _base_model(self, running):
        """Publish the base model after a test: the recorder keeps what it has read."""
        yield
        (running.path / "policy.json").write_text('{"version": "default", "model": null}')

    def publish(self, running, version):
        policy = {"version": version, "model": f"policy-{version}"}
        (running.path / "policy.json").write_text(json.dumps(policy))

    def version(self, recorder, session_id, **fields):
        """End a session. Return the version in its row."""
        recorder.end(ended(session_id, **fields))
        return load_sessions(recorder.path)[session_id].policy_version

    def test_it_is_what_the_calls_say_whatever_was_expected(self, running, engine):
        engine.replies.extend([Say("Hi.", weight_version="2"), Say("Ho.", weight_version="3")])
        ask(running, "asked twice")
        ask(running, "asked twice", "More")
        assert self.version(running, "asked twice", policy_version="1") == "2"

    def test_without_a_token_it_is_the_expected_or_the_published_one(self, running):
        assert self.version(running, "a") == "default"
        self.publish(running, "5")
        assert self.version(running, "b") == "5"
        assert self.version(running, "c", policy_version="1") == "1"

    @pytest.mark.parametrize("text", ["{", '{"model": null}', "[]"])
    def test_a_published_one_that_cannot_be_read_is_an_error(self, running, text):
        (running.path / "policy.json").write_text(text)
        with pytest.raises(RunError, match=r"(?s)policy\.json is not .*a session has no version"):
            running.end(ended(text, reward=1.0))
        session = load_sessions(running.path)[text]
        assert (session.reward, session.policy_version) == (1.0, None)

    def test_it_is_that_of_a_call_which_runs_when_the_session_ends(self, running, engine):
        self.publish(running, "5")
        engine.replies.append(Say("one two three", hold_after=2))
        asking = threading.Thread(target=ask, args=(running, "s"))
        asking.start()
        engine.holding.wait()
        assert self.version(running, "s", policy_version="1") == "5"
        asking.join()


COUNT_CAS = """
from mitmproxy import certs
make = certs.create_ca
def create_ca(**how):
    with open({made!r}, "a") as made:
        made.write("made\\n")
    return make(**how)
certs.create_ca = create_ca
"""
"""The start of Python in each recorder: it writes a line when it makes a CA."""


class TestSeveralProcesses:
    """Two processes that start on a folder without a CA."""

    SESSIONS = tuple(f"s{number}" for number in range(8))
    ENDED = SESSIONS[:4]
    GO_ON = SESSIONS[4:]

    @pytest.fixture
    def make(self, tmp_path, scripted_engine, tokenizer_folder):
        scripted_engine.otherwise = lambda request: Say("Hi.")

        def make(**options):
            options = {"confdir": str(tmp_path / "conf"), **options}
            engine, model = scripted_engine.url, tokenizer_folder
            return Recorder(
                tmp_path / "run", engine=engine, model=model, options=options, processes=2
            )

        return make

    def places(self, recorder):
        """Return session -> index of its process."""
        addresses = [proxy.url("any").rpartition("@")[2] for proxy in recorder._proxies]
        places = {}
        for name in self.SESSIONS:
            url = recorder.environment(name)["HTTPS_PROXY"]
            places[name] = addresses.index(url.rpartition("@")[2])
        return places

    def test_sessions_are_spread_by_id_and_recorded_together(self, make):
        with make() as recorder:
            places = self.places(recorder)
            assert set(places.values()) == {0, 1}
            for name in self.SESSIONS:
                assert ask(recorder, name) == 200
            for name in self.ENDED:
                recorder.end(ended(name, reward=1.0))
            assert {ask(recorder, name, "More") for name in self.ENDED} == {410}
            assert {ask(recorder, name, "More") for name in self.GO_ON} == {200}
        assert len(run_files(recorder.path, "calls")) == 2
        recorded = sorted(call["session_id"] for call in read_rows(recorder.path, "calls"))
        assert recorded == sorted([*self.SESSIONS, *self.GO_ON])
        assert load_sessions(recorder.path).keys() == {*self.ENDED}
        assert len(json.loads((recorder.path / "run.json").read_text())["recorders"]) == 1
        logs = sorted(path.name for path in recorder.path.glob("*.log"))
        assert logs == ["recorder-1.log", "recorder-2.log"]
        with make() as again:
            assert self.places(again) == places  # a restart reaches the same processes

    def test_another_process_than_its_own_refuses_a_session(self, make):
        """It would not know of the session's end."""
        with make() as recorder:
            own, other = recorder._proxies
            name = next(name for name, place in self.places(recorder).items() if place == 0)
            credentials = own.url(name).rpartition("@")[0]
            proxy = f"{credentials}@{other.url(name).rpartition('@')[2]}"
            with httpx.Client(proxy=proxy, trust_env=False, timeout=600) as client:
                assert client.get("http://a.example/").status_code == 407

    def test_the_death_of_one_is_an_error_that_names_it_and_all_end(self, make):
        died = "recorder 2 of 2 died with status -9"
        with suppress(RecorderError), make() as recorder:
            processes = recorder._processes
            kill(processes[1])
            with pytest.raises(RecorderError, match=died):
                recorder.check()
            lost = next(name for name, place in self.places(recorder).items() if place == 1)
            with pytest.raises(RecorderError, match=died):
                recorder.end(ended(lost))
        assert processes[0].ended

    def test_of_recorders_that_start_at_once_on_a_folder_without_a_ca_one_makes_it(
        self, tmp_path, make, monkeypatch
    ):
        (tmp_path / "sitecustomize.py").write_text(COUNT_CAS.format(made=str(tmp_path / "made")))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        recorders = [
            make(rolltap_out=str(tmp_path / name), key_size="4096")
            for name in ("one", "two", "three")
        ]
        with ExitStack() as stack, ThreadPoolExecutor(len(recorders)) as pool:
            starting = [pool.submit(recorder.__enter__) for recorder in recorders]
            for recorder, start in zip(recorders, starting, strict=True):
                start.result()
                stack.push(recorder)
            for recorder in recorders:
                for name in self.SESSIONS[:2]:
                    assert ask(recorder, name) == 200
        assert (tmp_path / "made").read_text() == "made\n"

    def test_a_process_that_does_not_start_is_named_and_none_stays(self, make):
        recorder = make(listen_prt="1")
        with pytest.raises(RecorderError, match="recorder 1 of 2 did not start"):
            recorder.__enter__()
        assert all(process.ended for process in recorder._processes)
