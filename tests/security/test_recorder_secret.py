"""A session reads all that its user may read of other processes. It finds neither the recorder's
secret nor the credentials of an earlier session.

Root may read every process, so a rollout that root starts here gives up the capabilities of root.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

SECRET = "the-secret-that-the-test-knows"
ROLLTAP = f"""
import secrets
secrets.token_urlsafe = lambda size: {SECRET[::-1]!r}[::-1]  # reversed: the secret is not on this command line
from rolltap.trainer.cli.main import main
main()
"""
THIEF = f"""
import os, re, stat
from pathlib import Path

SECRET = {SECRET[::-1].encode()!r}[::-1]
CREDENTIALS = re.compile(rb"http://[^@/\\s]+:[0-9a-f]{{64}}@")

def examine(where, read):
    try:
        for data in read():
            if SECRET in data:
                print("found the secret in", where)
            for found in CREDENTIALS.findall(data):
                print("found", found.decode())
    except OSError:
        pass

def pipes(folder):
    for link in (folder / "fd").iterdir():
        if not stat.S_ISFIFO(link.stat().st_mode):
            continue
        descriptor = os.open(link, os.O_RDONLY | os.O_NONBLOCK)
        try:
            yield os.read(descriptor, 65536)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)

def memory(folder):
    with (folder / "mem").open("rb", 0) as memory:
        for area in (folder / "maps").read_text().splitlines():
            if area.split()[1].startswith("rw"):
                start, end = (int(number, 16) for number in area.split()[0].split("-"))
                memory.seek(start)
                yield memory.read(end - start)

def parent(pid):
    return int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])

def is_of_the_rollout(folder):
    pid = int(folder.name)
    try:
        while pid and pid != ROLLOUT:
            pid = parent(pid)
    except OSError:
        pass  # it has ended, as programs beside the test do
    return pid == ROLLOUT

ROLLOUT = parent(os.getppid())  # between them is the supervisor
print("mine", os.environ["HTTPS_PROXY"].partition("@")[0] + "@")
for folder in Path("/proc").glob("[0-9]*"):
    if int(folder.name) != os.getpid():
        examine(folder / "environ", lambda: [(folder / "environ").read_bytes()])
        examine(folder / "cmdline", lambda: [(folder / "cmdline").read_bytes()])
        if is_of_the_rollout(folder):  # what is in the pipes of other programs is theirs
            examine(folder / "fd", lambda: pipes(folder))
            examine(folder / "mem", lambda: memory(folder))
print("looked everywhere")
"""


@pytest.fixture
def without_privileges():
    """Return the prefix of a command line. The command may not read processes by the privileges of
    root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root gives up its privileges with setpriv, which is not installed")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


def test_a_session_finds_no_secret_and_no_credentials_of_another_in_proc(
    without_privileges, scripted_engine, tokenizer_folder, tmp_path
):
    (tmp_path / "thief.py").write_text(THIEF)
    preset = {"program": sys.executable, "headless": [str(tmp_path / "thief.py")]}
    (tmp_path / "thief.toml").write_text(
        'name = "thief"\nversion = "1"\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in preset.items())
    )
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"id": "theft", "instruction": "Steal.", "evaluate": ["true"]})
    )
    command = [
        *without_privileges,
        sys.executable,
        "-c",
        ROLLTAP,
        "rollout",
        tmp_path / "tasks.jsonl",
    ]
    command += [
        "--harness",
        tmp_path / "thief.toml",
        "-n",
        "2",
        "--concurrency",
        "1",
        "--out",
        tmp_path / "run",
    ]
    command += ["--engine", scripted_engine.url, "--model", tokenizer_folder]
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "2 of 2 sessions have no reward" in ended.stderr  # it makes no model call
    logs = [
        path
        for path in (tmp_path / "run" / "logs").glob("*.log")
        if not path.name.endswith(".judge.log")
    ]
    assert len(logs) == 6  # a session without a call is tried twice more
    for log in logs:
        mine, *found = log.read_text().splitlines()
        assert mine.startswith("mine http://theft-")
        assert found.pop() == "looked everywhere"
        # programs beside the test have credentials of their own recorders
        assert not [line for line in found if "secret" in line or "http://theft-" in line]
