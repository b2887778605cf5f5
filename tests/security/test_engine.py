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

ROUTES = """
POST /pause?mode=abort
POST /sleep
POST /collective_rpc
POST /update_weights
POST /tokenize
POST /reset_prefix_cache
POST /v1/load_lora_adapter
POST /v1/unload_lora_adapter
POST /inference/v1/generate
POST /invocations
GET /server_info
GET /openapi.json
GET /metrics
""".strip().splitlines()


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
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


@pytest.mark.engine
def test_an_agent_cannot_operate_vllm(engine, start):
    """Neither directly nor through the proxy, though its host is allowed and its calls are
    answered."""
    recorder = start("rolltap_allow=127.0.0.1:*")
    with recorder.client() as proxied, httpx.Client(trust_env=False, timeout=30) as direct:
        for client in (proxied, direct):
            for route in ROUTES:
                method, path = route.split()
                body = {"token_ids": [1], "lora_name": "x"}
                answer = client.request(method, engine.url + path, json=body)
                assert answer.status_code in (401, 403, 404, 503), route
                assert "choices" not in answer.text
    assert engine.http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.engine
def test_no_process_of_vllm_shows_the_key(engine):
    pids = group(engine.process_group)
    assert len(pids) > 1
    assert not [pid for pid in pids if engine.key.encode() in seen_by_others(pid)]


def test_the_engine_server_shows_the_key_to_no_process(tmp_path, key, key_file, monkeypatch):
    monkeypatch.setenv("ROLLTAP_ENGINE_KEY_FILE", str(key_file))
    log = tmp_path / "vllm.log"
    vllm = fake_vllm(tmp_path, AS_VLLM)
    with EngineServer("m", vllm=vllm, port=free_port(), log=log) as server:
        assert key.encode() not in seen_by_others(server._process.pid)
    assert key not in log.read_text()


@pytest.mark.parametrize("by", cases(["environment", "option", "descriptor"]))
def test_the_key_is_used_and_is_nowhere_to_be_read(start, scripted_engine, key, key_file, by):
    """The recorder got the key in one of the documented ways, and logs all that it can."""
    options = ["termlog_verbosity=debug"]
    how = {}
    if by == "environment":
        how["env"] = {"ROLLTAP_ENGINE_KEY_FILE": str(key_file)}
    elif by == "option":
        options.append(f"rolltap_engine_key_file={key_file}")
    else:
        options.append("rolltap_engine_key_file=/dev/fd/7")
        how["command"] = ["sh", "-c", 'exec "$@" 7<"$0"', key_file]
    recorder = start(*options, **how)
    scripted_engine.otherwise = lambda request: Say("Hi.")
    scripted_engine.replies += [
        Say("Hi."),
        Answer(400, f"Bearer {key}"),
        Answer(200, json.dumps({"error": {"message": key, "code": 400}})),
        Answer(200, key),
        Say("Ho.", break_after=1),
    ]
    said = ""
    with recorder.client() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
        for number in range(4):
            said += client.post(CHAT, json={**HELLO, "user": str(number)}).text
    assert key.encode() not in seen_by_others(recorder.process.pid)
    assert recorder.stop() == 0
    files = [path for path in recorder.run.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if key.encode() in path.read_bytes()]
    for table in ("calls", "sessions", "events"):  # their files may be compressed
        said += str(recorder.rows(table))
    assert key not in recorder.log() + said


COMPRESSED = gzip.compress(bytes(100 << 20), 1)
BOMBS = {
    "an event": Answer(200, json.dumps({"error": {"message": "x" * (40 << 20), "code": 400}})),
    "lines": Answer(200, b":\n" * (20 << 20)),
    "a refusal": Answer(500, "x" * (40 << 20)),
    "a compressed stream": Answer(200, COMPRESSED, {"content-encoding": "gzip"}),
    "a compressed refusal": Answer(400, COMPRESSED, {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("bomb", cases(BOMBS, 0, 3))
def test_what_an_engine_sends_one_session_costs_that_call(start, scripted_engine, key_file, bomb):
    recorder = start("rolltap_patience=0", env={"ROLLTAP_ENGINE_KEY_FILE": str(key_file)})
    scripted_engine.otherwise = lambda request: Say("Hi.")
    scripted_engine.replies.append(BOMBS[bomb])
    memory = psutil.Process(recorder.process.pid).memory_info
    before = memory().rss
    with recorder.client() as bombed, recorder.client("s2") as other:
        # a reply that has begun, because the engine was slow, is cut off
        with suppress(httpx.RemoteProtocolError):
            assert bombed.post(CHAT, json=HELLO).status_code in (502, 400)
        assert other.post(CHAT, json=HELLO).status_code == 200
        assert memory().rss - before < 32 << 20
    recorder.stop()
    faults = [event for event in recorder.rows("events") if event["kind"] == "fault"]
    assert [event["session_id"] for event in faults] == ["s1"]


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
    engine = ["--engine", scripted_engine.url, "--model", tokenizer_folder]
    program = ["--", sys.executable, "-c", show]
    env = {**os.environ, "ROLLTAP_ENGINE_KEY_FILE": str(key_file)}
    ended = run_rolltap("record", "--out", tmp_path / "run", *engine, *program, env=env)
    assert ended.stdout == "[]\n"
