"""Servers that programs start or reach on loopback, directly and not through the recorder; and
Node's own `fetch`."""

import json
import subprocess
import sys

import pytest

from rolltap.trainer.tasks.task import Task
from tests.deep import cases
from tests.harness.play import installed, shell

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


def test_a_server_that_the_program_starts_is_reached_and_one_that_is_gone_is_refused_as_without_a_recorder(
    record,
):
    played = record(sys.executable, "-c", SERVER)
    pages = ["the agent's own page"] * 4
    assert played.log.splitlines() == [*pages, "[Errno 111] Connection refused"]
    assert played.kinds <= {"ended"}


def test_nodes_own_fetch_is_recorded(record, lead):
    command = "node --version || echo v0.0.0"
    version = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
    major, minor, _ = version[1:].split(".")
    if (int(major), int(minor)) < (22, 21):
        pytest.skip("needs Node 22.21: tests/run.sh installs it")
    lead(lambda prompt: "Hi.")
    played = record("node", "-e", FETCH, keys={})
    assert played.log == "Hi.\n"
    (call,) = played.calls
    assert (call.host, call.status) == ("api.openai.com", "completed")


@pytest.mark.parametrize("name", cases(["codex", "mini-swe-agent"]))
async def test_a_shell_of_a_session_reaches_a_local_server(name, local_server, lead, play):
    harness = installed(name)
    asks = shell(harness, f"curl -sS {local_server} -o answer.txt; cat answer.txt")
    end = "It answered."
    if name == "mini-swe-agent":
        end = shell(harness, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    # on a slow machine Codex tells first that the command still runs: then it asks once more
    lead(lambda prompt: end if "pong" in prompt else asks)
    judge = ["grep", "-q", "pong", "answer.txt"]
    task = Task(id="ask", instruction="Ask the local server.", evaluate=judge)
    played = await play(harness, task)
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    first, *later = [call.kind for call in played.calls]
    assert (first, set(later)) == ("root", {"bridged"})
    assert {"localhost", "127.0.0.1"}.isdisjoint(event["host"] for event in played.of("refused"))
