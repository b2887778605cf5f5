"""Boxes on a machine behind ssh. The promises that all boxes keep alike are in `test_box.py`."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.images import path_digest
from rolltap.trainer.boxes.far_side.__main__ import PREFIX
from rolltap.trainer.boxes.inside import frames
from rolltap.trainer.boxes.remote import connection, ssh
from rolltap.trainer.boxes.remote.ssh import SshBox
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.judges.channel import Channel
from tests.boxes import (
    ENV,
    containers,
    copy_programs,
    make_spec,
    sandboxed,
    sh,
    spec_in,
    wait_until_dead,
)
from tests.deep import cases
from tests.trainer.boxes.remote.conftest import ROOT

pytestmark = sandboxed


def below(process):
    """Return the processes of a machine that a client of ssh is connected to."""
    found = {}
    for client in process.children(recursive=True):
        if client.name() == "ssh":  # a fixture of other tests may have processes too
            for child in client.children(recursive=True):
                if child.name() != "ssh":
                    found[child] = None
    return list(found)


def listening(processes):
    """Return the TCP ports at which processes listen."""
    connections = []
    for process in processes:
        connections += process.net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def clients():
    return [child for child in psutil.Process().children() if child.name() == "ssh"]


async def started(box, script, folder):
    """Start a script in a box, and return its task when its first output has come."""
    os.mkfifo(folder / "output")
    command = ["bash", "-c", f"echo runs; {script}"]
    running = asyncio.create_task(box.run(command, env=ENV, timeout=600, log=folder / "output"))

    def first_line():
        with (folder / "output").open() as output:
            return output.readline()

    assert await asyncio.to_thread(first_line) == "runs\n"
    return running


async def test_only_the_folders_of_a_box_are_on_the_machine(machine, tmp_path):
    (tmp_path / "ca").write_text("certificate")
    (tmp_path / "run.json").write_text("secret")
    async with machine.runtime().box(spec_in(tmp_path, mounts=[Mount(tmp_path / "ca", "/ca")])):
        [workspace] = machine.temporary.glob("*/*/workspace")
        sent = {path.name for path in workspace.parent.iterdir()}
        assert sent == {"workspace", "home", "mounts"}


@pytest.mark.deep
async def test_a_file_of_the_workspace_is_read_only_where_a_mount_says_so(machine, tmp_path):
    spec = spec_in(tmp_path)
    (spec.workspace / "test.py").write_text("assert False")
    mount = Mount(spec.workspace / "test.py", f"{spec.workdir}/test.py")
    async with machine.runtime().box(spec_in(tmp_path, mounts=[mount])) as box:
        ended, output = await sh(box, "rm -f test.py; echo > test.py", tmp_path / "log")
    assert ended.status == 1
    assert "Read-only" in output
    assert (spec.workspace / "test.py").read_text() == "assert False"


async def test_the_recorder_is_reached_through_the_connection_and_by_no_port(machine, tmp_path):
    machine.settings.append("GatewayPorts yes")

    async def answer(reader, writer):
        writer.write(b"answer to " + await reader.readline())
        writer.close()

    runtime = machine.runtime()
    for _ in range(2):
        recorder = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = recorder.sockets[0].getsockname()[1]
        async with recorder, runtime.box(spec_in(tmp_path, proxy=f"127.0.0.1:{port}")) as box:
            way = box.proxy.replace(":", "/")
            script = (
                f"exec 3<>/dev/tcp/{way}; echo hello >&3; cat <&3;"
                f" (exec 3<>/dev/tcp/127.0.0.1/{port}) || echo closed"
            )
            _, output = await sh(box, script, tmp_path / "log")
            assert output.startswith("answer to hello\n")
            assert output.endswith("closed\n")
            assert listening(below(psutil.Process())) == []
            [far_side] = machine.temporary.iterdir()
            assert stat.S_IMODE(far_side.stat().st_mode) == 0o700
            assert [path for path in far_side.iterdir() if path.is_socket()]


@pytest.mark.deep
async def test_boxes_share_a_connection_and_a_cancelled_program_ends_alone(machine, tmp_path):
    runtime = machine.runtime()
    (tmp_path / "other").mkdir()
    async with runtime.box(spec_in(tmp_path)) as kept:
        async with runtime.box(spec_in(tmp_path / "other", name="other")) as box:
            running = await started(box, "sleep 3601", tmp_path)
            assert await sh(kept, "echo runs too", tmp_path / "log") == (Ended(0), "runs too\n")
            assert len(clients()) == 1
            [program] = [p for p in below(psutil.Process()) if p.cmdline()[:2] == ["sleep", "3601"]]
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()
        assert wait_until_dead(program.pid)
        assert (await sh(kept, "true", tmp_path / "log"))[0] == Ended(0)
    assert machine.left() == []


async def test_a_box_of_a_lost_connection_fails_and_the_next_one_has_a_new_connection(
    machine, tmp_path
):
    runtime = machine.runtime()
    async with runtime.box(spec_in(tmp_path)) as box:
        running = await started(box, "sleep 3602", tmp_path)
        there = below(psutil.Process())
        next(process for process in there if process.name() == "sshd").kill()
        with pytest.raises(OSError, match=r"the connection to the machine .*@machine was lost"):
            await running
        assert all(wait_until_dead(process.pid) for process in there)
        assert machine.left() == []
        async with runtime.box(spec_in(tmp_path, name="next")) as box:
            assert (await sh(box, "true", tmp_path / "log"))[0] == Ended(0)


@pytest.fixture
def stop():
    """Return a function that stops the far side. It goes on after the test, and can end."""
    stopped = []

    def stop():
        for process in below(psutil.Process()):
            stopped.append(process)
            process.suspend()

    yield stop
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()


async def test_a_program_of_a_silent_far_side_is_lost(machine, tmp_path, stop, monkeypatch):
    async with machine.runtime().box(spec_in(tmp_path)) as box:
        running = await started(box, "sleep 3607", tmp_path)
        stop()
        monkeypatch.setattr(frames, "SILENT_SECONDS", 0.1)
        message = r"the connection to the machine .*@machine was lost: it was silent for 0\.1 s"
        with pytest.raises(ConnectionError, match=message):
            await running


async def test_a_program_of_which_a_far_side_that_is_alive_tells_no_end_is_lost(
    machine, tmp_path, monkeypatch
):
    monkeypatch.setattr(ssh, "LATE_SECONDS", -599.9)
    async with machine.runtime().box(spec_in(tmp_path)) as box:
        message = r"@machine was lost: it is alive, and sent nothing for 0\.1 s"
        with pytest.raises(ConnectionError, match=message):
            await box.run(["sleep", "3609"], env=ENV, timeout=600, log=tmp_path / "log")
    assert machine.left() == []


@pytest.mark.parametrize("without", ["a forward", "room for a workspace"])
async def test_a_box_that_a_silent_machine_does_not_make_is_lost(
    machine, tmp_path, stop, monkeypatch, without
):
    runtime = machine.runtime()
    (tmp_path / "first").mkdir()
    async with runtime.box(spec_in(tmp_path / "first")):
        stop()
        if without == "a forward":
            monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.1)
            spec = spec_in(tmp_path, name="next", proxy="127.0.0.1:9")
            message = r"the machine .*@machine did not answer within 0\.1 s"
        else:
            monkeypatch.setattr(frames, "SILENT_SECONDS", 0.1)
            spec = spec_in(tmp_path, name="large")
            (spec.workspace / "file").touch()
            os.truncate(spec.workspace / "file", 20 << 20)
            message = r"@machine was lost: it was silent"
        with pytest.raises(OSError, match=message):
            async with runtime.box(spec):
                pass
        monkeypatch.setattr(frames, "SILENT_SECONDS", 0.1)


async def test_all_that_a_killed_far_side_left_is_removed_by_the_next_one(machine, tmp_path):
    runtime = machine.runtime()
    async with runtime.box(spec_in(tmp_path)) as box:
        running = await started(box, "sleep 3604", tmp_path)
        there = below(psutil.Process())
        daemons = {process.pid for process in there if process.name() == "sshd"}
        pythons = [process for process in there if process.name().startswith("python")]
        [far_side] = [process for process in pythons if process.ppid() in daemons]
        far_side.kill()
        with pytest.raises(OSError, match="was lost"):
            await running
    assert all(wait_until_dead(process.pid) for process in there)
    [left] = machine.left()
    assert left.startswith(PREFIX)
    young = machine.temporary / f"{PREFIX}young"
    young.mkdir()
    os.utime(machine.temporary / left, (0, 0))
    async with runtime.box(spec_in(tmp_path)):
        assert left not in machine.left()
        assert young.exists()


SLOW = """
import os, subprocess, sys, threading, time
daemon = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def copy(source, target):
    while chunk := os.read(source, 8192):
        time.sleep(len(chunk) / 400_000)
        os.write(target, chunk)
    os.close(target)
there = threading.Thread(target=copy, args=(0, daemon.stdin.fileno()))
there.daemon = True
there.start()
copy(daemon.stdout.fileno(), 1)
"""


@pytest.mark.deep
async def test_a_slow_line_brings_all_there_and_back(machine, tmp_path):
    machine.through = [sys.executable, "-c", SLOW]
    spec = spec_in(tmp_path)
    content = os.urandom(200_000)
    (spec.workspace / "file").write_bytes(content)
    async with machine.runtime().box(spec) as box:
        assert (await sh(box, "cp file copy", tmp_path / "log"))[0] == Ended(0)
    assert (spec.workspace / "copy").read_bytes() == content


KILLED = """
import asyncio, os, psutil, signal, sys
from pathlib import Path
from tests.boxes import spec_in
from tests.machines import SshMachine
from tests.trainer.boxes.remote.test_ssh import started
folder = Path(sys.argv[1])
async def main():
    machine = SshMachine(folder / "machine")
    async with machine.runtime().box(spec_in(folder)) as box:
        await started(box, "sleep 3605", folder)
        print(machine.temporary)
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_everything_ends_on_the_machine_when_rolltap_is_killed(tmp_path):
    command = [sys.executable, "-c", KILLED, tmp_path]
    killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    temporary, *pids = killed.stdout.split()
    assert len(pids) > 4
    assert all(wait_until_dead(int(pid)) for pid in pids)
    Path(temporary).rmdir()  # it is empty


@pytest.mark.deep
def test_words_of_the_login_shell_do_no_harm(machine):
    machine.settings.append('ForceCommand echo Welcome; eval "$SSH_ORIGINAL_COMMAND"')
    machine.runtime().check()


WITHOUT_PACKAGES = f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n'
REFUSED = {
    "no packages": ("", {"ssh_python": "{tmp}/bare"}, "cannot have boxes: .*psutil.* --ssh-python"),
    "no Python": (
        "",
        {"ssh_python": "no-python"},
        "^the machine .* cannot have boxes: .*no-python",
    ),
    "no room for a socket": (
        "SetEnv TMPDIR={tmp}/" + "long" * 20,
        {},
        "@machine cannot have boxes: .* set TMPDIR there",
    ),
    "a tool that is not there": (
        "",
        {"tools": ["/no/such"]},
        'on the machine .*@machine: tools names "/no/such"',
    ),
    "no access": (
        "AuthorizedKeysFile /nowhere",
        {},
        "@machine is not reached by ssh: .*Permission denied.*`ssh .*@machine true` must",
    ),
}


@pytest.mark.parametrize("why", cases(REFUSED, 0, 1, 2))
def test_a_machine_that_cannot_have_boxes_is_refused_with_the_remedy(machine, tmp_path, why):
    (tmp_path / "bare").write_text(WITHOUT_PACKAGES)
    (tmp_path / "bare").chmod(0o755)
    long = tmp_path / ("long" * 20)
    long.mkdir()
    line, keys, message = REFUSED[why]
    machine.settings.insert(
        0, line.replace("{tmp}", str(tmp_path))
    )  # the first one of a name counts
    if "ssh_python" in keys:
        keys = {"ssh_python": keys["ssh_python"].replace("{tmp}", str(tmp_path))}
    with pytest.raises(InputError, match=f"(?s){message}"):
        machine.runtime(**keys).check()
    assert list(long.iterdir()) == machine.left() == []


@pytest.mark.deep
async def test_an_sshd_that_forwards_no_socket_is_named(machine, tmp_path):
    machine.settings.append("AllowStreamLocalForwarding no")
    message = r"@machine forwards no socket to the recorder (?s:.*)AllowStreamLocalForwarding"
    with pytest.raises(OSError, match=message):
        async with machine.runtime().box(spec_in(tmp_path, proxy="127.0.0.1:9")):
            pass


@pytest.mark.deep
async def test_containers_of_images_that_the_machine_has(podman, machine, tmp_path):
    runtime = machine.runtime("container", container_engine="podman")
    spec = replace(make_spec(tmp_path), mounts=())
    root = Path(spec.image)
    for name in ("lib", "lib32", "lib64", "libx32", "sbin"):
        (root / "usr" / name).mkdir(parents=True)
    (root / "usr" / "bin").symlink_to("../programs")
    (root / "programs").mkdir()
    copy_programs(root, "sh", "bash", "cat", "sleep", "tr")
    digest = await asyncio.to_thread(runtime.image_digest, spec.image)
    assert digest == path_digest(spec.image)
    (root / "src").mkdir()
    (root / "src" / "file").write_text("of the image")
    runtime.copy_out(spec.image, "/src", tmp_path / "start")
    assert (tmp_path / "start" / "file").read_text() == "of the image"
    with pytest.raises(InputError, match="has no folder /none"):
        runtime.copy_out(spec.image, "/none", tmp_path / "none")
    async with runtime.box(spec) as box:
        script = "cat /src/file; echo 1 > new; sleep 3606 &"
        assert await sh(box, script, tmp_path / "log") == (Ended(0), "of the image")
        assert (spec.workspace / "new").read_text() == "1\n"
        _, output = await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", tmp_path / "log")
        assert "3606" not in output
    assert not any(tmp_path.name in name for name in containers())
    assert machine.left() == []


class Hostile:
    """The stream of a box on a machine that sends what it wants."""

    def __init__(self, *received):
        self.received = [*received]

    async def send(self, message):
        pass

    async def receive(self):
        return self.received.pop(0)

    receive_bytes = receive


@asynccontextmanager
async def hostile_box(folder, *received):
    """Yield a box that has a pipe for a verdict, on a machine that sends what it wants, and the
    reader of the pipe."""
    async with Channel(folder / "verdict") as channel:
        spec = spec_in(folder, mounts=[Mount(folder / "verdict", "/verdict")])
        made = {"workdir": "/", "home": "/", "proxy": None}
        yield SshBox("that", Hostile(*received), spec, made), channel


ENDED = {"status": 0, "stopped": None, "gone": [], "pipes": [1]}
WRONG = [
    {"status": "0"},
    {"stopped": "by me"},
    {"gone": None},
    {"gone": [1]},
    {"pipes": []},
    {"pipes": [[]]},
    {"error": "no"},
    {"error": {}},
    {"error": {"text": "no", "errno": "no"}},
]


@pytest.mark.parametrize("told", [{}, *(ENDED | wrong for wrong in WRONG)], ids=str)
async def test_what_a_hostile_machine_tells_is_a_fault_of_the_machine(tmp_path, told):
    async with hostile_box(tmp_path, b"", told, b"", b"") as (box, _):
        with pytest.raises(ConnectionError, match="the connection to the machine that was lost"):
            await box.run(["true"], env=ENV, timeout=60, log=tmp_path / "log")


async def test_what_a_hostile_machine_sends_leads_nowhere_and_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "_TAKEN_BYTES", 5)
    (tmp_path / "secret").write_text("kept")
    gone = ["../secret", "/etc/passwd", "a\0b", "\ud800", "file"]
    sent = [b"aaa", b"bbb", b"", {**ENDED, "gone": gone}, b"no archive", b"", b"0.55", b"555", b""]
    async with hostile_box(tmp_path, *sent) as (box, channel):
        (tmp_path / "workspace" / "file").write_text("gone")
        ended = await box.run(["true"], env=ENV, timeout=60, log=tmp_path / "log")
        channel.read()
    assert ended == Ended(None, "disk")
    assert (tmp_path / "log").read_text() == "aaabb"
    assert channel.content == b"0.555"
    assert (tmp_path / "secret").exists()
    assert not (tmp_path / "workspace" / "file").exists()
