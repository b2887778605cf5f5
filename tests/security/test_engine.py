"""An agent tries to operate the engine that samples for it, or to find the engine's key."""

import gzip
import json
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from rolltap.trainer.engine.serve import EngineServer
from tests.conftest import free_port
from tests.deep import cases
from tests.recorder_process import CHAT, HELLO
from tests.scripted_engine import Answer, Say, ScriptedEngine
from tests.trainer.cli.program import run_rolltap
from tests.trainer.engine.answering import AS_VLLM
from tests.trainer.engine.test_serve import fake_vllm

ROUTES = [
    *(
        ("POST", "/" + path)
        for path in ("pause?mode=abort", "sleep", "collective_rpc", "update_weights", "tokenize")
    ),
    *(
        ("POST", "/" + path)
        for path in ("reset_prefix_cache", "v1/load_lora_adapter", "v1/unload_lora_adapter")
    ),
    *(("POST", "/" + path) for path in ("inference/v1/generate", "invocations")),
    *(("GET", "/" + path) for path in ("server_info", "openapi.json", "metrics")),
]
TABLES = ("calls", "sessions", "events")


@pytest.fixture
def key():
    return secrets.token_urlsafe(32)


@pytest.fixture
def key_file(tmp_path, key):
    file = tmp_path / "engine.key"
    file.write_text(key + "\n")
    return file


@pytest.fixture
def scripted_engine(tokenizer, key):
    with ScriptedEngine(tokenizer, key=key) as engine:
        yield engine


def seen_by_others(pid):
    """Return what other processes of the same user read of a process without stopping it."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def group(leader):
    """Return the ids of the processes of a process group."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            found += [pid] * (os.getpgid(pid) == leader)
    return found


@pytest.mark.engine
def test_an_agent_cannot_operate_vllm(engine, start):
    """Neither directly nor through the proxy, though its host is allowed and its calls are
    answered."""
    recorder = start("rolltap_allow=127.0.0.1:*")
    with recorder.client() as proxied, httpx.Client(trust_env=False, timeout=30) as direct:
        for client in (proxied, direct):
            for method, path in ROUTES:
                answer = client.request(
                    method, engine.url + path, json={"token_ids": [1], "lora_name": "x"}
                )
                assert answer.status_code in (401, 403, 404, 503), (method, path)
                assert "choices" not in answer.text
    assert engine.http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.engine
def test_no_process_of_vllm_shows_the_key(engine):
    pids = group(engine.process_group)
    assert len(pids) > 1
    assert not [pid for pid in pids if engine.key.encode() in seen_by_others(pid)]


def test_the_engine_server_shows_the_key_to_no_process(tmp_path, key, key_file, monkeypatch):
    monkeypatch.setenv("ROLLTAP_ENGINE_KEY_FILE", str(key_file))
    with EngineServer(
        "m", vllm=fake_vllm(tmp_path, AS_VLLM), port=free_port(), log=tmp_path / "vllm.log"
    ) as server:
        assert key.encode() not in seen_by_others(server._process.pid)
    assert key not in (tmp_path / "vllm.log").read_text()


class TestRecorder:
    @pytest.fixture(params=cases(["environment", "option", "descriptor"]))
    def recorder(self, request, start, key_file):
        """Yield a recorder that got the key in one of the documented ways, and logs all that it
        can."""
        verbose = "termlog_verbosity=debug"
        if request.param == "environment":
            return start(verbose, env={"ROLLTAP_ENGINE_KEY_FILE": str(key_file)})
        if request.param == "option":
            return start(verbose, f"rolltap_engine_key_file={key_file}")
        shell = ["sh", "-c", 'exec "$@" 7<"$0"', key_file]
        return start(verbose, "rolltap_engine_key_file=/dev/fd/7", command=shell)

    def test_the_key_is_used_and_is_nowhere_to_be_read(self, recorder, scripted_engine, key):
        quotes = [
            Answer(400, f"Bearer {key}"),
            Answer(200, json.dumps({"error": {"message": key, "code": 400}})),
        ]
        scripted_engine.replies += [
            Say("Hi."),
            *quotes,
            Answer(200, key),
            Say("Ho.", break_after=1),
        ]
        scripted_engine.otherwise = lambda request: Say("Hi.")
        with recorder.client() as client:
            assert client.post(CHAT, json=HELLO).status_code == 200
            answers = [
                client.post(CHAT, json={**HELLO, "user": str(number)}) for number in range(4)
            ]
        assert key.encode() not in seen_by_others(recorder.process.pid)
        assert recorder.stop() == 0
        files = [path for path in recorder.run.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if key.encode() in path.read_bytes()]
        # the files of the tables may be compressed
        assert key not in "".join(str(recorder.rows(table)) for table in TABLES)
        assert key not in recorder.log() + "".join(answer.text for answer in answers)


BOMBS = {
    "an event": Answer(200, json.dumps({"error": {"message": "x" * (40 << 20), "code": 400}})),
    "lines": Answer(200, b":\n" * (20 << 20)),
    "a refusal": Answer(500, "x" * (40 << 20)),
    "a compressed stream": Answer(
        200, gzip.compress(bytes(100 << 20), 1), {"content-encoding": "gzip"}
    ),
    "a compressed refusal": Answer(
        400, gzip.compress(bytes(100 << 20), 1), {"content-encoding": "gzip"}
    ),
}


@pytest.mark.parametrize("bomb", cases(BOMBS.values(), 0, 3), ids=cases(BOMBS, 0, 3))
def test_what_an_engine_sends_one_session_costs_that_call(start, scripted_engine, key_file, bomb):
    recorder = start("rolltap_patience=0", env={"ROLLTAP_ENGINE_KEY_FILE": str(key_file)})
    scripted_engine.otherwise = lambda request: Say("Hi.")
    scripted_engine.replies.append(bomb)
    before = psutil.Process(recorder.process.pid).memory_info().rss
    with recorder.client() as bombed, recorder.client("s2") as other:
        with suppress(
            httpx.RemoteProtocolError
        ):  # a reply that has begun, because the engine was slow, is cut off
            assert bombed.post(CHAT, json=HELLO).status_code in (502, 400)
        assert other.post(CHAT, json=HELLO).status_code == 200
        assert psutil.Process(recorder.process.pid).memory_info().rss - before < 32 << 20
    recorder.stop()
    assert [
        event["session_id"] for event in recorder.rows("events") if event["kind"] == "fault"
    ] == ["s1"]


def test_a_refused_key_is_an_error_that_does_not_show_it(start, scripted_engine, tmp_path):
    (tmp_path / "wrong.key").write_text("a-wrong-key")
    recorder = start(f"rolltap_engine_key_file={tmp_path / 'wrong.key'}")
    with recorder.client() as client:
        answer = client.post(CHAT, json=HELLO)
    recorder.stop()
    assert answer.status_code == 502
    assert "does not accept the key (401): set ROLLTAP_ENGINE_KEY_FILE" in answer.text
    assert "a-wrong-key" not in answer.text + recorder.log() + str(recorder.rows("events"))


def test_a_recorder_without_a_readable_key_file_does_not_start(start, tmp_path):
    recorder = start(f"rolltap_engine_key_file={tmp_path / 'missing'}")
    assert recorder.address is None
    assert "rolltap_engine_key_file: the engine's key file" in recorder.log()


def test_the_recorded_program_does_not_learn_where_the_key_is(
    scripted_engine, tokenizer_folder, tmp_path, key_file
):
    show = "import os; print([name for name, value in os.environ.items() if 'engine.key' in value])"
    options = (
        "--out",
        tmp_path / "run",
        "--engine",
        scripted_engine.url,
        "--model",
        tokenizer_folder,
    )
    env = {**os.environ, "ROLLTAP_ENGINE_KEY_FILE": str(key_file)}
    ended = run_rolltap("record", *options, "--", sys.executable, "-c", show, env=env)
    assert ended.stdout == "[]\n"
