"""The recorder as users start it: a real mitmdump with TLS, a real client, a scripted engine."""

import importlib.util
import json
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

from rolltap.addons.secret import password
from rolltap.trainer.boxes.environment import SESSION_END
from tests.addons.harness import said, user
from tests.recorder_process import CHAT, HELLO
from tests.scripted_engine import Say


def of_kind(recorder, kind):
    """Return the events of a kind."""
    return [event for event in recorder.rows("events") if event["kind"] == kind]


def test_a_model_call_is_answered_over_tls_and_everything_else_is_refused(start, scripted_engine):
    recorder = start()
    assert recorder.address.startswith("127.0.0.1:")
    scripted_engine.replies += [Say("Hi."), Say("Ho.")]
    with recorder.client() as client:
        key = {"authorization": "Bearer sk-very-secret"}
        assert said(client.post(CHAT, json=HELLO, headers=key).json()) == "Hi."
        with client.stream("POST", CHAT, json={**HELLO, "stream": True}) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"
        for method, url in [
            ("GET", "https://api.openai.com/files"),
            ("POST", "https://telemetry.example.com/chat"),
            ("GET", "http://169.254.169.254/latest"),
        ]:
            refused = client.request(method, url)
            assert (refused.status_code, refused.content) == (404, b"{}")
        (model,) = client.get("https://api.openai.com/v1/models").json()["data"]
        assert model["id"] == "scripted"
    libraries = Path(f"/proc/{recorder.process.pid}/maps").read_text()
    assert "pyarrow" in libraries
    assert not re.search("/(torch|pandas)/", libraries)
    assert recorder.stop() == 0
    assert [call["session_id"] for call in recorder.rows("calls")] == ["s1", "s1"]
    refusals = of_kind(recorder, "refused")
    assert [(event["method"], event["host"], event["path"]) for event in refusals] == [
        ("GET", "api.openai.com", "/files"),
        ("POST", "telemetry.example.com", "/chat"),
        ("GET", "169.254.169.254", "/latest"),
    ]
    for path in recorder.run.iterdir():
        assert b"sk-very-secret" not in path.read_bytes()
    assert "sk-very-secret" not in recorder.log()


def test_another_script_may_import_what_the_recorder_does_not_need(start, tmp_path):
    script = tmp_path / "other.py"
    installed = [name for name in ("torch", "openai", "pandas") if importlib.util.find_spec(name)]
    script.write_text(
        "import importlib.util\n"
        "def done():\n"
        f"    found = [importlib.util.find_spec(name) for name in {installed}]\n"
        f"    open({str(tmp_path / 'found')!r}, 'w').write(str(None not in found))\n"
    )
    recorder = start(scripts=("-s", script))
    libraries = Path(f"/proc/{recorder.process.pid}/maps").read_text()
    assert not re.search("/(torch|pandas)/", libraries)
    assert recorder.stop() == 0
    assert (tmp_path / "found").read_text() == "True"


def test_only_an_allowed_host_is_connected_to_even_when_no_addon_answers_a_request(start, tmp_path):
    (tmp_path / "fail.py").write_text("def request(flow): flow.response = None")
    with socket.create_server(("127.0.0.2", 0)) as other:
        recorder = start("rolltap_allow=127.0.0.1:*", scripts=["-s", tmp_path / "fail.py"])
        with recorder.client() as client:
            port = other.getsockname()[1]
            for url in (f"http://127.0.0.2:{port}/x", f"https://127.0.0.2:{port}/x"):
                refused = client.get(url)
                assert refused.status_code == 502
                assert "does not let sessions connect" in refused.text
            # no server listens there, so this error comes from a connection attempt
            assert "Connect call failed" in client.get("http://127.0.0.1:9/x").text
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
    recorder.stop()
    # the two requests, and the two connections for them; only a tunnel tells the session of a
    # connection
    events = [(event["kind"], event["session_id"]) for event in recorder.rows("events")]
    # compaction sorts them by session
    assert events == [("refused", "s1")] * 3 + [("refused", None)]


def test_with_a_secret_only_the_sessions_own_token_opens_the_proxy(
    start, scripted_engine, tmp_path
):
    (tmp_path / "secret").write_text("hidden")
    (tmp_path / "secret").chmod(0o600)
    recorder = start(f"rolltap_secret_file={tmp_path / 'secret'}")
    scripted_engine.replies.append(Say("Hi."))
    with recorder.client("s1", password("hidden", "s1")) as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
    for session, given in [("s2", password("hidden", "s1")), ("s1", "x"), (None, None)]:
        with (
            recorder.client(session, given) as client,
            pytest.raises(httpx.ProxyError, match="407"),
        ):
            client.post(CHAT, json=HELLO)
    recorder.stop()
    assert [call["session_id"] for call in recorder.rows("calls")] == ["s1"]
    assert len(of_kind(recorder, "unauthorised")) == 2
    assert "hidden" not in recorder.log()


def test_a_session_ends_itself_and_no_other(start, scripted_engine):
    recorder = start()
    scripted_engine.replies += [Say("Hi."), Say("one two three", hold_after=1), Say("Ho.")]
    with recorder.client() as client, recorder.client("s2") as other:
        assert other.post(CHAT, json=HELLO).status_code == 200
        with client.stream("POST", CHAT, json={**HELLO, "stream": True}):
            scripted_engine.holding.wait()
        # the call still runs: its harness hung up less than LINGER_SECONDS ago
        assert client.post(SESSION_END).status_code == 200
        assert client.post(CHAT, json=HELLO).json()["error"]["code"] == "session_ended"
        ended = {call["session_id"]: call["status"] for call in recorder.rows("calls")}
        assert ended == {"s2": "completed", "s1": "aborted"}
        messages = [*HELLO["messages"], {"role": "assistant", "content": "Hi."}, user("More")]
        assert other.post(CHAT, json={**HELLO, "messages": messages}).status_code == 200
        for method, url in [("GET", SESSION_END), ("POST", "http://session.rolltap/other")]:
            assert client.request(method, url).status_code == 404
    recorder.stop()
    others = [call for call in recorder.rows("calls") if call["session_id"] == "s2"]
    assert [call["kind"] for call in others] == ["root", "bridged"]


def test_kill_9_in_the_middle_of_a_rollout_loses_no_committed_call(start, scripted_engine):
    recorder = start()
    scripted_engine.replies += [Say(f"Reply {i}.") for i in range(5)]
    scripted_engine.replies.append(Say("one two three", hold_after=2))
    told = []
    with recorder.client() as client:
        for _ in range(5):
            told.append(client.post(CHAT, json=HELLO).json()["id"].removeprefix("chatcmpl-"))
        with client.stream("POST", CHAT, json={**HELLO, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            scripted_engine.holding.wait()
            recorder.stop(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                list(lines)
    calls = recorder.rows("calls")
    assert [call["call_id"] for call in calls] == told
    for call in calls:
        assert len(call["completion_ids"]) == len(call["logprobs"]) > 0
    started = [event["call_id"] for event in of_kind(recorder, "call_started")]
    assert len(started) == 6
    assert set(told) < set(started)


def test_a_recorder_whose_disk_is_full_refuses_calls_until_there_is_room(
    start, scripted_engine, small_disk, tmp_path
):
    (tmp_path / "run").mkdir()
    recorder = start(command=small_disk("8m", tmp_path / "run"))
    # only that process sees the disk
    recorder.run = Path(f"/proc/{recorder.process.pid}/root{recorder.run}")
    scripted_engine.replies += [Say("Hi."), Say("one " * 3000, hold_after=2), Say("Ho.")]
    with recorder.client() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
        with client.stream("POST", CHAT, json={**HELLO, "stream": True}) as response:
            scripted_engine.holding.wait()
            with pytest.raises(OSError, match="No space left"):
                (recorder.run / "ballast").write_bytes(bytes(8 << 20))
            scripted_engine.release()
            last = list(filter(None, response.iter_lines()))[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith(
            "the recorder cannot write this call: [Errno 28] No space left"
        )
        refused = client.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
        assert "less than 4 MiB are free" in refused.json()["error"]["message"]
        assert len(recorder.rows("calls")) == 1
        (recorder.run / "ballast").unlink()
        assert client.post(CHAT, json=HELLO).status_code == 200
        replies = [json.loads(call["reply"]) for call in recorder.rows("calls")]
        assert [reply["content"] for reply in replies] == ["Hi.", "Ho."]
        faults = " ".join(sorted(event["detail"] for event in of_kind(recorder, "fault")))
        assert re.findall("No space|less than", faults) in (
            ["No space", "less than"],
            ["less than", "No space"],
        )
    recorder.stop()
    log = recorder.log()
    assert re.search(r"cannot write call \w+ to .*No space left", log)
    assert re.search(r"session s1: .*less than 4 MiB are free", log)


@pytest.mark.parametrize(
    "messages",
    [
        {
            "rolltap_out=": "rolltap_out is not set",
            "rolltap_engine=localhost:8000": "rolltap_engine is 'localhost:8000': give a URL",
            "rolltap_fsync=daily": "rolltap_fsync is 'daily': Input should be 'never'",
            'rolltap_sampling={"temprature": 1}': "rolltap_sampling.temprature is unknown: use",
        },
        {
            "rolltap_renderer=none": "rolltap_renderer, rolltap_tool_parser: ",
            "listen_host=0.0.0.0": "on '0.0.0.0', which other machines can reach: set rolltap_s",
        },
    ],
    ids=["by themselves", "with others"],
)
def test_bad_options_end_mitmdump_with_a_message_for_each_and_no_traceback(start, messages):
    recorder = start(*messages)
    assert recorder.address is None
    assert recorder.process.wait() == 1
    log = recorder.log()
    for message in messages.values():
        assert message in log
    assert "Traceback" not in log


def test_misspelt_options_and_values_of_another_type_end_mitmdump_before_anything_is_written(
    start, tmp_path
):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(
        "rolltap_patience: soon\nconsole_palette: dark\n"
    )
    recorder = start("rolltap_keep_adapter=perhaps", "rolltap_samplin={}", "listen_prt=1")
    assert recorder.process.wait() == 1
    log = recorder.log()
    assert "error: rolltap_patience is 'soon': Input should be a valid integer" in log
    assert "error: rolltap_keep_adapter is 'perhaps': Input should be a valid boolean" in log
    assert (
        "error: rolltap_samplin is no option of the recorder: did you mean rolltap_sampling?" in log
    )
    assert "error: listen_prt is no option of the recorder: did you mean listen_port?" in log
    assert "console_palette" not in log
    assert "Traceback" not in log
    assert not recorder.run.exists()
