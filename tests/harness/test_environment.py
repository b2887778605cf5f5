"""Servers that programs start or reach on loopback, directly and not through the recorder; and
Node's own `fetch`."""

import json
import shutil
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
    node = shutil.which("node")
    version = (
        subprocess.run([node, "--version"], capture_output=True, text=True).stdout
        if node
        else "v0.0"
    )
    if tuple(int(number) for number in version[1:].split(".")[:2]) < (22, 21):
        pytest.skip("needs Node 22.21: tests/run.sh installs it")
    lead(lambda prompt: "Hi.")
    played = record(node, "-e", FETCH, keys={})
    assert played.log == "Hi.\n"
    (call,) = played.calls
    assert (call.host, call.status) == ("api.openai.com", "completed")


@pytest.mark.parametrize("name", cases(["codex", "mini-swe-agent"]))
async def test_a_shell_of_a_session_reaches_a_local_server(name, local_server, lead, play):
    harness = installed(name)
    end = (
        shell(harness, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        if name == "mini-swe-agent"
        else "It answered."
    )
    asks = shell(harness, f"curl -sS {local_server} > answer.txt")
    lead(lambda prompt: end if "<tool_response>" in prompt else asks)
    task = Task(
        id="ask", instruction="Ask the local server.", evaluate=["grep", "-q", "pong", "answer.txt"]
    )
    played = await play(harness, task)
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    assert [call.kind for call in played.calls] == ["root", "bridged"]
    assert not [
        event for event in played.of("refused") if event["host"] in ("localhost", "127.0.0.1")
    ]
