"""Programs that are neither harness nor SDK, recorded as a user does: servers of their own, and Node's own `fetch`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.traces.reader import RecordedCalls

pytestmark = pytest.mark.harness

HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
SERVER = """
import http.server, subprocess, sys, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the agent's own page")
    def log_message(self, *arguments):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for host in ("localhost", "127.0.0.1"):
    url = f"http://{host}:{server.server_port}/"
    print(urllib.request.urlopen(url).read().decode())
    print(subprocess.run(["curl", "-s", url], capture_output=True, text=True).stdout)
server.shutdown()
server.server_close()
try:
    urllib.request.urlopen(url)
except OSError as error:
    print(error.reason)
"""
FETCH = f"""
const asked = {{method: "POST", body: {json.dumps(json.dumps(HELLO))}}};
fetch("https://api.openai.com/v1/chat/completions", asked)
  .then(answer => answer.json()).then(reply => console.log(reply.choices[0].message.content));
"""


@pytest.fixture
def record(scripted_engine, tokenizer_folder, tmp_path):
    """Return a function that records a command and returns its output."""

    def run(*command):
        scripted_engine.otherwise = lambda request: Say("Hi.")
        options = ["--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder]
        ended = subprocess.run(
            [Path(sys.executable).with_name("rolltap"), "record", *options, "--", *command],
            env=clean_environment(tmp_path),
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def test_a_server_that_the_program_starts_is_reached_and_one_that_is_gone_is_refused_as_without_a_recorder(
    record, tmp_path
):
    pages = ["the agent's own page"] * 4
    assert record(sys.executable, "-c", SERVER).splitlines() == [*pages, "[Errno 111] Connection refused"]
    assert {event["kind"] for event in read_rows(tmp_path / "run", "events")} <= {"ended"}


def test_nodes_own_fetch_is_recorded(record, tmp_path):
    node = shutil.which("node")
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout if node else "v0.0"
    if tuple(int(number) for number in version[1:].split(".")[:2]) < (22, 21):
        pytest.skip("needs Node 22.21: tests/run.sh installs it")
    assert record(node, "-e", FETCH) == "Hi.\n"
    ((call,),) = RecordedCalls(tmp_path / "run").values()
    assert (call.host, call.status) == ("api.openai.com", "completed")
