"""32 sessions of a real harness on a real engine, while agents, judges, recorder, rollout and
engine are killed."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import rolltap
from rolltap.addons.store.records import UNREWARDED
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.engine.serve import EngineServer
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.resume import STARTED_AGAIN
from tests.conftest import free_port, vllm_program
from tests.trainer.rollouts.soak import left

pytestmark = [pytest.mark.deep, pytest.mark.engine, pytest.mark.harness]

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart"
ACTS = ["judge", "agents", "recorder", "judge", "engine", "agents", "rollout", "judge"]
TASKS, SESSIONS = 4, 8


class Served:
    """An engine that is started again on its port whenever it is killed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._port = free_port()
        self._model, self._folder = model, folder
        self.url = f"http://127.0.0.1:{self._port}"
        self.up, self._over = threading.Event(), False
        self.starts = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over:
            log = self._folder / "vllm.log"
            vllm = vllm_program()
            with EngineServer(
                str(self._model), vllm=vllm, port=self._port, max_model_len=8192, log=log
            ) as self._server:
                self.starts += 1
                (self._folder / "engine.pid").write_text(str(self._server._process.pid))
                self.up.set()
                self._server.wait()
                self.up.clear()

    def end(self) -> None:
        self.up.wait()
        self._over = True
        self._server.stop()
        self._thread.join()


@pytest.fixture(scope="module")
def endured(engine_key, tiny_model, tmp_path_factory):
    """Roll out until it ends with status 0. Return the folder, the status of each start, and the
    engine's starts."""
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")
    folder = tmp_path_factory.mktemp("chaos")
    places = random.Random(0).sample(range(2, TASKS * SESSIONS - 2), len(ACTS))
    (folder / "acts.json").write_text(
        json.dumps(dict(zip(map(str, sorted(places)), ACTS, strict=True)))
    )
    command = [sys.executable, str(Path(__file__).with_name("chaos.py")), str(folder)]
    judge = {"kind": "command", "command": command, "result": "json"}
    task = {
        "instruction": "Count the lines of words.txt and write the number to answer.txt.",
        "judge": judge,
    }
    rows = [
        {"id": f"t{n}", "workspace": str(QUICKSTART / "workspace"), **task} for n in range(TASKS)
    ]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "tmp").mkdir()
    served, statuses = Served(tiny_model, folder), []
    arguments = ["--harness", "mini-swe-agent", "--engine", served.url, "--model", str(tiny_model)]
    arguments += ["--out", str(folder / "run"), "--sessions", str(SESSIONS), "--concurrency", "8"]
    try:
        with (folder / "rollout.log").open("ab") as log:
            while len(statuses) < len(ACTS) + 4 and 0 not in statuses:
                served.up.wait()
                statuses.append(
                    subprocess.run(
                        [
                            sys.executable,
                            "-m",
                            "rolltap",
                            "rollout",
                            str(folder / "tasks.jsonl"),
                            *arguments,
                        ],
                        env={**os.environ, "TMPDIR": str(folder / "tmp")},
                        stdout=log,
                        stderr=log,
                    ).returncode
                )
    finally:
        served.end()
    return folder, statuses, served.starts


def test_it_was_a_bad_day_and_every_session_came_to_its_end_once(endured):
    folder, statuses, starts = endured
    assert statuses[-1] == 0, (folder / "rollout.log").read_text()[-3000:]
    assert sorted((folder / "done").read_text().split()) == sorted(ACTS)
    assert (starts, statuses.count(-9)) == (2, 1)
    rows = list(read_rows(folder / "run", "sessions"))
    ids = [row["session_id"] for row in rows]
    assert len(set(ids)) == len(ids)
    ended = Counter(
        SessionName.parse(row["session_id"]).place
        for row in rows
        if row["status"] not in STARTED_AGAIN
    )
    assert (len(ended), set(ended.values())) == (TASKS * SESSIONS, {1})


def test_every_reward_is_the_judges_and_no_failure_of_others_has_one(endured):
    for row in read_rows(endured[0] / "run", "sessions"):
        if row["status"] in UNREWARDED or row["reward"] is None:
            assert row["reward"] is None
        else:
            assert row["reward"] == float(json.loads(row["parts"])["lines"] == 7), row["session_id"]


def test_every_sampled_token_is_accounted_for_and_nothing_is_left_behind(endured):
    folder = endured[0]
    run = rolltap.open_run(folder / "run")
    ledger = run.ledger()
    assert ledger.sampled == ledger.trained + sum(ledger.left_out.values()) > 0
    assert ledger.sampled == sum(
        len(call.completion_ids) for calls in run.calls.values() for call in calls
    )
    assert run.verify(progress=False).sound
    assert left(str(folder)) == {}
    assert list((folder / "tmp").glob("rolltap-*")) == []
