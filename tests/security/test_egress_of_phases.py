"""A session and its judge in real boxes: what of either was left behind reaches nothing in the
other's phase."""

import json
import shlex
import sys

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions
from tests.boxes import sandboxed
from tests.scripted_engine import Say, ScriptedEngine
from tests.security.raw import listening
from tests.trainer.rollouts.contexts import ONE_CALL, context_of, run_groups

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
ASK = """
import json, os, sys, urllib.error, urllib.request

def ask(proxy, url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": proxy} if proxy else {}))
    try:
        return opener.open(url, timeout=300).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return "no network"

own = os.environ.get("HTTP_PROXY", "")
left = open("proxy.txt").read() if os.path.exists("proxy.txt") else ""
answers = {}
for name, url in json.loads(sys.argv[1]).items():
    answers[name] = [ask(own, url), ask(left, url) if left else None]
"""
LEAVE = """
open("proxy.txt", "w").write(own)
open("agent.json", "w").write(json.dumps(answers))
"""
SEE = """
print(json.dumps(answers))
assert json.load(open("agent.json")) == {"agent": [200, None], "judge": [404, None], "operator": [404, None]}
"""


@pytest.fixture
def hosts():
    """Yield a server for each kind of list."""
    with (
        listening("127.0.0.3", answer=OK) as operators,
        listening("127.0.0.4", answer=OK) as agents,
        listening("127.0.0.5", answer=OK) as judges,
    ):
        yield {"operator": operators, "agent": agents, "judge": judges}


@pytest.fixture
def judged(hosts, tmp_path, tokenizer, tokenizer_folder):
    urls = json.dumps({name: f"http://{server.name}/" for name, server in hosts.items()})

    async def judged(runtime, allow):
        """Run a session and its judge. Return the row, what the judge's program was answered, and
        the events."""
        options = {"rolltap_allow": hosts["operator"].name}
        judge = {
            "kind": "command",
            "command": [sys.executable, "-c", ASK + SEE, urls],
            "allow": allow,
        }
        task = Task(id="t", instruction="go", judge=judge, allow=[hosts["agent"].name])
        script = f"{ONE_CALL}; {shlex.join([sys.executable, '-c', ASK + LEAVE, urls])}"
        run = tmp_path / "run"
        with ScriptedEngine(tokenizer) as engine:
            engine.otherwise = lambda request: Say("Hi.")
            with Recorder(
                run, engine=engine.url, model=tokenizer_folder, options=options
            ) as recorder:
                context = context_of(recorder, tmp_path, script, runtime, timeout=600)
                await run_groups([Group(task, "g", ["g-0"])], context)
        row = load_sessions(run)["g-0"]
        assert row.reward is not None, row.error
        log = run / "logs" / "g-0.judge.log"
        return row, json.loads(log.read_text()), list(read_rows(run, "events"))

    return judged


@sandboxed
async def test_a_judge_in_a_box_reaches_its_hosts_and_the_agents_credentials_reach_none(
    judged, hosts, tmp_path
):
    row, answers, events = await judged(SandboxRuntime(), [hosts["judge"].name])
    assert (row.status, row.reward) == ("completed", 1.0)
    assert answers == {"operator": [404, 404], "agent": [404, 404], "judge": [200, 404]}
    # twice: the judge was tried on the untouched start, too
    assert [len(hosts[name].connections) for name in ("operator", "agent", "judge")] == [0, 1, 2]
    refused = [event for event in events if event["kind"] == "refused"]
    judges = {event["session_id"] for event in refused} - {"g-0"}
    assert len(judges) == 2
    assert all("/judge-" in name for name in judges)
    assert verify_run(tmp_path / "run", lambda *_: None).findings == []
    assert row.suspicions == {}


@sandboxed
async def test_a_judge_in_a_box_without_hosts_has_no_network_for_the_agents_credentials_either(
    judged, hosts
):
    row, answers, _ = await judged(SandboxRuntime(), [])
    assert (row.status, row.reward) == ("completed", 1.0)
    assert {name for answer in answers.values() for name in answer} == {"no network"}


async def test_a_judge_outside_of_a_box_has_its_hosts_by_its_variables(judged, hosts):
    row, answers, _ = await judged(ProcessRuntime(), [hosts["judge"].name])
    assert (row.status, row.reward) == ("completed", 1.0)
    assert answers == {"operator": [404, 404], "agent": [404, 404], "judge": [200, 404]}
