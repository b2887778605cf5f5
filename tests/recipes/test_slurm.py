"""The batch files for Slurm, run on one machine that stands for several nodes."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.conftest import ROOT, free_port
from tests.recipes import slurm
from tests.trainer.training.test_nodes import recorded_training
from tests.trainer.training.trainings import apart, running

SLURM = ROOT / "recipes" / "slurm"
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")


class Job:
    """A folder from which jobs are submitted, and the programs that they call."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(SLURM, folder / "recipes" / "slurm")
        (folder / "bin").mkdir()
        (folder / "log").touch()
        for name in slurm.PROGRAMS:
            self.program(name, f'exec "{sys.executable}" "{slurm.__file__}" {name} "$@"')

    def program(self, name, line):
        """Write a program on the job's PATH."""
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)

    def run(self, batch, *arguments, nodes=NODES, **variables):
        """Run a batch file, and make sure that all that it has started ends. Returns its status and
        what it said."""
        mark = secrets.token_hex(8)
        environment = {
            **os.environ,
            **variables,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SIMULATED": " ".join(nodes),
            "LOG": str(self.folder / "log"),
            "ROLLTAP_MARK": mark,
            "SLURM_JOB_ID": str(free_port() - 20_000),
            "SLURM_JOB_NODELIST": "nodes[1-4]",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }
        command = ["bash", self.folder / "recipes" / "slurm" / batch, *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        how = {"env": environment, "start_new_session": True, **output}
        with subprocess.Popen(command, **how) as process:
            try:
                said, _ = process.communicate(timeout=1200)  # until all have closed it
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert running(mark) == []
        return process.returncode, said

    def calls(self):
        """Return the node, the program and the arguments of each call, by program and node."""
        calls = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
        return sorted(calls, key=lambda call: (call[1], call[0]))


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_each_file_is_bash():
    for file in SLURM.iterdir():
        if file.suffix != ".md":
            ended = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
            assert ended.stderr == ""


def engines_on(nodes, *arguments, gpus=range(8)):
    """Return the calls that start an engine on each GPU of some nodes."""
    calls = []
    for node in nodes:
        for gpu in gpus:
            where = ["--host", node, "--port", str(8000 + gpu)]
            serve = ["rolltap", "serve", *where, "models/Qwen3-8B", *arguments]
            calls.append([f"{node} {gpu}", *serve])
    return calls


def urls_on(nodes, gpus=range(8)):
    return ",".join(f"http://{node}:{8000 + gpu}" for node in nodes for gpu in gpus)


RAY = ["ray", "start"]
RAY_OPTIONS = ["--num-gpus=0", "--disable-usage-stats", "--block"]
ADDRESS = f"{NODES[0]}:6379"
FLEET = [[NODES[0], *RAY, "--head", "--port=6379", *RAY_OPTIONS]]
FLEET += [[node, *RAY, f"--address={ADDRESS}", *RAY_OPTIONS] for node in NODES[1:]]


def test_a_training_has_its_nodes_an_engine_on_each_other_gpu_and_a_fleet_on_all(job):
    status, said = job.run("train.sbatch", "recipe.toml", "--out", "runs/grpo")
    assert status == 0, said
    fleet = job.calls()[:4]
    engines = job.calls()[4:20]
    trainers = job.calls()[20:]
    assert fleet == FLEET
    assert engines == engines_on(NODES[2:], "--lora-rank", "16")
    port = trainers[0][trainers[0].index("--master-port") + 1]
    launched = f"--master-addr {NODES[0]} --master-port {port} --nproc-per-node 8 -m rolltap train"
    online = ["--engine", urls_on(NODES[2:]), "--ray", ADDRESS]
    trained = [*launched.split(), "recipe.toml", "--out", "runs/grpo", *online]
    assert trainers == [
        [node, "torchrun", "--nnodes", "2", "--node-rank", str(rank), *trained]
        for rank, node in enumerate(NODES[:2])
    ]
    key = job.folder / "engine.key"
    assert (len(key.read_text()), key.stat().st_mode & 0o777) == (45, 0o600)


def test_rollouts_run_on_the_first_node_with_engines_and_a_fleet_on_all(job):
    given = ["rollout", "tasks.jsonl", "--out", "runs/first"]
    status, said = job.run("rollout.sbatch", *given, PER_NODE="2")
    assert status == 0, said
    (rolled_out,) = (call for call in job.calls() if call[2] == "rollout")
    given += ["--model", "models/Qwen3-8B", "--engine", urls_on(NODES, range(2))]
    assert rolled_out == ["batch", "rolltap", *given, "--ray", ADDRESS]
    others = [call for call in job.calls() if call != rolled_out]
    assert others == FLEET + engines_on(NODES, gpus=range(2))


def test_one_engine_of_a_node_has_all_its_gpus(job):
    large = {"PER_NODE": "1", "SERVE": "-- --tensor-parallel-size 8"}
    status, said = job.run("rollout.sbatch", "rollout", nodes=NODES[:1], **large)
    assert status == 0, said
    (engine,) = (call for call in job.calls() if call[2] == "serve")
    assert engine[0] == "127.0.0.1 all"
    assert engine[-3:] == ["--", "--tensor-parallel-size", "8"]


def test_a_job_ends_when_an_engine_has_ended_or_the_training_of_a_node_fails(job):
    status, said = job.run("train.sbatch", "recipe.toml", MODEL="broken")
    assert (status, "a part of the job has ended" in said) == (1, True)
    assert not any("torchrun" in call for call in job.calls())
    assert job.run("train.sbatch", "recipe.toml", "--fails")[0] == 1
    # the other node's may end before it has begun
    assert any("torchrun" in call for call in job.calls())


@pytest.mark.deep  # short, the lines are those that test_nodes.py runs
def test_recorded_runs_are_trained_on_by_two_nodes_as_by_one_process(job, monkeypatch):
    training, recorded = recorded_training(job.folder)
    (job.folder / "bin" / "torchrun").unlink()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"nodes": NODES[:2], "TRAINERS": "2", "PROCESSES": "1"}
    status, said = job.run("train.sbatch", "recipe.toml", "--out", "run", *recorded, **options)
    assert status == 0, said
    assert job.calls() == []
    assert training.here(monkeypatch, "alone", more=recorded).exit_code == 0
    base = training.base()
    assert apart(training.weights("alone"), training.weights(), base) < 0.01
