"""Stand-ins for Slurm, and for programs that need GPUs: `python tests/recipes/slurm.py PROGRAM
ARGUMENTS`.

The nodes of the job are the words of `$SIMULATED`, all on this machine. A program that is called on
a node writes its arguments as a line of JSON to `$LOG`, an engine with its GPUs after the node.
Engines and Ray run until they are ended, and answer once they have begun; a model named `broken`
ends them, and an option `--fails` the training of the second node.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

PROGRAMS = ("srun", "scontrol", "sleep", "rolltap", "ray", "torchrun")
_SRUN = {
    "relative",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "overlap",
    "cpu-bind",
    "kill-on-bad-exit",
}


def srun(arguments: list[str]) -> int:
    """Run a command for each task of a step. If one fails, or the step is ended, all are ended."""
    options = {}
    while arguments[0].startswith("--"):
        name, _, options[name] = arguments.pop(0)[2:].partition("=")
    assert options.keys() == _SRUN
    each = int(options["ntasks-per-node"])
    assert int(options["ntasks"]) == each * int(options["nodes"])
    first = int(options["relative"])
    names = os.environ["SIMULATED"].split()[first : first + int(options["nodes"])]
    assert len(names) == int(options["nodes"])
    tasks = {}
    for number, name in enumerate(names):
        for local in range(each):
            own = {"SLURM_NODEID": str(number), "SLURM_LOCALID": str(local)}
            own["SLURMD_NODENAME"] = name
            task = subprocess.Popen(arguments, env=os.environ | own)
            tasks[task.pid] = task

    def end(*_: object) -> None:
        for task in tasks.values():
            task.terminate()

    signal.signal(signal.SIGTERM, end)
    failed = 0
    while tasks:
        process, status = os.wait()
        tasks.pop(process).returncode = status
        if status:
            failed = 1
            end()
    return failed


def called(program: str, arguments: list[str]) -> int:
    """Note a call, and do what the program would do: run, answer, or train."""
    log = Path(os.environ["LOG"])
    if arguments[:2] == ["engine", "status"]:
        url = urlsplit(arguments[2])
        return f'"serve", "--host", "{url.hostname}", "--port", "{url.port}"' not in log.read_text()
    if arguments[:2] == ["fleet", "status"]:
        return log.read_text().count('"ray", "start"') != len(os.environ["SIMULATED"].split())
    if "broken" in arguments:
        return 1
    place = os.environ.get("SLURMD_NODENAME", "batch")
    if arguments[0] == "serve":
        place += " " + os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    with log.open("a") as file:
        file.write(json.dumps([place, program, *arguments]) + "\n")
    if "--fails" in arguments and os.environ["SLURM_NODEID"] == "1":
        return 1
    if arguments[0] in ("serve", "start") or "--fails" in arguments:
        signal.pause()
    return 0


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program == "srun":
        sys.exit(srun(arguments))
    if program == "scontrol":
        print(os.environ["SIMULATED"].replace(" ", "\n"))
    elif program != "sleep":
        sys.exit(called(program, arguments))
