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
from rolltap.trainer.tasks.task import Limits
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
from tests.machines import SshMachine

pytestmark = sandboxed


@pytest.fixture
def machine(tmp_path):
    return SshMachine(tmp_path / "machine")


def below(process):
    """Return the processes of a machine that a client of ssh is connected to."""
    found = []
    for client in process.children(recursive=True):
        if client.name() == "ssh":  # a fixture of other tests may have processes too
            found += [child for child in client.children(recursive=True) if child.name() != "ssh"]
    return list(dict.fromkeys(found))


def listening(processes):
    """Return the TCP ports at which processes listen."""
    connections = []
    for process in processes:
        connections += process.net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def stamp(path):
    status = path.stat()
    return status.st_ino, status.st_ctime_ns


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


async def test_what_a_program_changes_in_the_workspace_comes_back(machine, tmp_path):
    spec = spec_in(tmp_path)
    for name in ("kept", "changed", "gone", "folder/gone"):
        (spec.workspace / name).parent.mkdir(exist_ok=True)
        (spec.workspace / name).write_text(name)
    kept = stamp(spec.workspace / "kept")
    async with machine.runtime().box(spec) as box:
        script = (
            "cat kept; echo new > new; echo more >> changed; rm -r gone folder; ln -s kept link;"
            " exit 3"
        )
        assert await sh(box, script, tmp_path / "log") == (Ended(3), "kept")
        assert (spec.workspace / "changed").read_text() == "changedmore\n"
        assert (await sh(box, "rm new; touch ~/there", tmp_path / "log"))[0] == Ended(0)
    assert sorted(os.listdir(spec.workspace)) == ["changed", "kept", "link"]
    assert stamp(spec.workspace / "kept") == kept
    assert not list(spec.home.iterdir())
    assert machine.left() == []


@pytest.mark.deep
async def test_the_output_comes_while_the_program_runs(machine, tmp_path):
    async with machine.runtime().box(spec_in(tmp_path)) as box:
        running = await started(box, "sleep 3600", tmp_path)
        running.cancel()
        await asyncio.wait([running])


async def test_only_the_folders_of_a_box_are_on_the_machine(machine, tmp_path):
    spec = spec_in(tmp_path, mounts=[Mount(tmp_path / "ca", "/etc/rolltap/ca.pem")])
    (tmp_path / "ca").write_text("certificate")
    (tmp_path / "run.json").write_text("secret")
    async with machine.runtime().box(spec) as box:
        script = "cat /etc/rolltap/ca.pem; echo x >> /etc/rolltap/ca.pem"
        _, output = await sh(box, script, tmp_path / "log")
        assert output.startswith("certificate")
        [far_side] = machine.temporary.iterdir()
        [workspace] = far_side.glob("*/workspace")
        sent = {path.name for path in workspace.parent.iterdir()}
        assert sent == {"workspace", "home", "mounts", "log"}
    assert (tmp_path / "ca").read_text() == "certificate"


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


async def test_a_verdict_comes_through_a_pipe_and_its_writers_are_counted(machine, tmp_path):
    async with Channel(tmp_path / "pipe") as channel:
        spec = spec_in(tmp_path, mounts=[Mount(tmp_path / "pipe", "/verdict")])
        async with machine.runtime().box(spec) as box:
            assert (await sh(box, "true", tmp_path / "log"))[0] == Ended(0)
            channel.read()
            assert (channel.opened, bytes(channel.content)) == (0, b"")
            await sh(box, "echo 1 > /verdict", tmp_path / "log")
            channel.read()
            assert (channel.opened, bytes(channel.content)) == (1, b"1\n")
            await sh(box, "echo 2 > /verdict; echo 3 > /verdict", tmp_path / "log")
            channel.read()
            assert (channel.opened, bytes(channel.content)) == (3, b"1\n2\n3\n")


async def test_the_recorder_is_reached_through_the_connection_and_by_no_port(machine, tmp_path):
    machine.settings.append("GatewayPorts yes")

    async def answer(reader, writer):
        writer.write(b"answer to " + await reader.readline())
        writer.close()

    recorders = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    runtime = machine.runtime()
    for recorder in recorders:
        port = recorder.sockets[0].getsockname()[1]
        async with recorder, runtime.box(spec_in(tmp_path, proxy=f"127.0.0.1:{port}")) as box:
            way = box.proxy.replace(":", "/")
            script = (
                f"exec 3<>/dev/tcp/{way}; echo hello >&3; cat <&3; (exec"
                f" 3<>/dev/tcp/127.0.0.1/{port}) || echo closed"
            )
            _, output = await sh(box, script, tmp_path / "log")
            assert output.startswith("answer to hello\n")
            assert output.endswith("closed\n")
            assert listening(below(psutil.Process())) == []
            [far_side] = machine.temporary.iterdir()
            assert stat.S_IMODE(far_side.stat().st_mode) == 0o700
            assert [path for path in far_side.iterdir() if path.is_socket()]


@pytest.mark.deep
async def test_boxes_share_a_connection_and_run_at_the_same_time(machine, tmp_path):
    runtime = machine.runtime()

    async def run(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "workspace").mkdir()
        (folder / "workspace" / "own").write_text("x" * 300_000 + str(number))
        async with runtime.box(spec_in(folder, name=f"box-{number}")) as box:
            _, output = await sh(box, "cat own; cp own copy", folder / "log")
            assert output == (folder / "workspace" / "copy").read_text()
            await both.wait()
            assert len(clients()) == 1

    both = asyncio.Barrier(2)
    await asyncio.gather(run(1), run(2))
    assert machine.left() == []


@pytest.mark.deep
async def test_a_program_that_fills_the_disk_is_stopped_by_its_limit(machine, tmp_path):
    spec = spec_in(tmp_path, limits=Limits(disk_gib=0.01))
    async with machine.runtime().box(spec) as box:
        script = "for i in $(seq 20); do head -c 2000000 /dev/zero > $i; done; sleep 1000"
        ended, _ = await sh(box, script, tmp_path / "log")
    assert ended == Ended(None, "disk")


@pytest.mark.deep
async def test_a_cancelled_program_ends_on_the_machine(machine, tmp_path):
    runtime = machine.runtime()
    async with runtime.box(spec_in(tmp_path)):  # keeps the connection
        async with runtime.box(spec_in(tmp_path, name="other")) as box:
            running = await started(box, "sleep 3601", tmp_path)
            [program] = [p for p in below(psutil.Process()) if p.cmdline()[:2] == ["sleep", "3601"]]
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()
        assert wait_until_dead(program.pid)
        assert len(clients()) == 1


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
    """Return a function that stops processes. They go on after the test, and can end."""
    stopped = []

    def stop_them(processes):
        for process in processes:
            stopped.append(process)
            process.suspend()

    yield stop_them
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()


async def test_a_program_of_a_silent_far_side_is_lost(machine, tmp_path, stop, monkeypatch):
    async with machine.runtime().box(spec_in(tmp_path)) as box:
        running = await started(box, "sleep 3607", tmp_path)
        stop(below(psutil.Process()))
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


async def test_a_workspace_for_a_silent_far_side_is_lost(machine, tmp_path, stop, monkeypatch):
    runtime = machine.runtime()
    spec = spec_in(tmp_path, name="large")
    with (spec.workspace / "file").open("wb") as file:
        file.truncate(20 << 20)
    (tmp_path / "first").mkdir()
    async with runtime.box(spec_in(tmp_path / "first")):
        stop(below(psutil.Process()))
        monkeypatch.setattr(frames, "SILENT_SECONDS", 0.1)
        with pytest.raises(ConnectionError, match=r"@machine was lost: it was silent"):
            async with runtime.box(spec):
                pass


async def test_a_silent_machine_without_a_forward_is_named(machine, tmp_path, stop, monkeypatch):
    runtime = machine.runtime()
    (tmp_path / "first").mkdir()
    async with runtime.box(spec_in(tmp_path / "first")):
        stop(below(psutil.Process()))
        monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.1)
        with pytest.raises(OSError, match=r"the machine .*@machine did not answer within 0\.1 s"):
            async with runtime.box(spec_in(tmp_path, name="next", proxy="127.0.0.1:9")):
                pass
        monkeypatch.setattr(frames, "SILENT_SECONDS", 0.1)


async def test_all_that_a_killed_far_side_left_is_removed_by_the_next_one(machine, tmp_path):
    runtime = machine.runtime()
    async with runtime.box(spec_in(tmp_path)) as box:
        running = await started(box, "sleep 3604", tmp_path)
        there = below(psutil.Process())
        [far_side] = [
            p
            for p in there
            if p.name().startswith("python")
            and p.ppid() in {q.pid for q in there if q.name() == "sshd"}
        ]
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
    root = Path(__file__).resolve().parents[4]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert killed.returncode == -signal.SIGKILL
    temporary, *pids = killed.stdout.split()
    assert len(pids) > 4
    assert all(wait_until_dead(int(pid)) for pid in pids)
    Path(temporary).rmdir()  # it is empty


@pytest.mark.deep
def test_words_of_the_login_shell_do_no_harm(machine):
    machine.settings.append('ForceCommand echo Welcome; eval "$SSH_ORIGINAL_COMMAND"')
    machine.runtime().check()


@pytest.mark.deep
def test_a_machine_that_is_not_reached_is_refused(machine):
    machine.settings[1] = "AuthorizedKeysFile /nowhere"
    message = r"(?s)@machine is not reached by ssh: .*Permission denied.*`ssh .*@machine true` must"
    with pytest.raises(InputError, match=message):
        machine.runtime().check()


def test_a_python_without_the_packages_is_refused_with_the_remedy(machine, tmp_path):
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(
        InputError, match=r"(?s)cannot have boxes: .*psutil.* and name its Python with --ssh-python"
    ):
        machine.runtime(ssh_python=str(bare)).check()
    with pytest.raises(InputError, match=r"^the machine .* cannot have boxes: .*no-python"):
        machine.runtime(ssh_python="no-python").check()
    assert machine.left() == []


@pytest.mark.deep
async def test_an_sshd_that_forwards_no_socket_is_named(machine, tmp_path):
    machine.settings.append("AllowStreamLocalForwarding no")
    message = r"@machine forwards no socket to the recorder (?s:.*)AllowStreamLocalForwarding"
    with pytest.raises(OSError, match=message):
        async with machine.runtime().box(spec_in(tmp_path, proxy="127.0.0.1:9")):
            pass


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_refused(machine, tmp_path):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    machine.settings.append(f"SetEnv TMPDIR={folder}")
    machine.settings.remove(f"SetEnv TMPDIR={machine.temporary}")
    with pytest.raises(InputError, match=r"@machine cannot have boxes: .* set TMPDIR there"):
        machine.runtime().check()
    assert list(folder.iterdir()) == []


@pytest.mark.deep
def test_what_the_runtime_there_lacks_is_said_with_the_machine(machine, tmp_path):
    with pytest.raises(InputError, match=r'on the machine .*@machine: tools names ".*/none"'):
        machine.runtime(tools=[tmp_path / "none"]).check()


@pytest.mark.deep
async def test_a_program_that_is_not_there_is_named(machine, tmp_path):
    async with machine.runtime().box(spec_in(tmp_path)) as box:
        with pytest.raises(FileNotFoundError) as raised:
            await box.run(["no-such-program"], env=ENV, timeout=60, log=tmp_path / "log")
        assert raised.value.filename == "no-such-program"
        assert (await sh(box, "true", tmp_path / "log"))[0] == Ended(0)


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
        ended, output = await sh(box, "cat /src/file; echo 1 > new; sleep 3606 &", tmp_path / "log")
        assert (ended, output) == (Ended(0), "of the image")
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
async def verdict(folder):
    """Yield the parts of a box that has a pipe for a verdict, and its reader."""
    async with Channel(folder / "verdict") as channel:
        yield spec_in(folder, mounts=[Mount(folder / "verdict", "/verdict")]), channel


MADE = {"workdir": "/", "home": "/", "proxy": None}
ENDED = {"status": 0, "stopped": None, "gone": [], "pipes": [1]}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {**ENDED, "status": "0"},
        {**ENDED, "stopped": "by me"},
        {**ENDED, "gone": None},
        {**ENDED, "gone": [1]},
        {**ENDED, "pipes": []},
        {**ENDED, "pipes": [[]]},
        {"error": "no"},
        {"error": {}},
        {"error": {"text": "no", "errno": "no"}},
    ],
    ids=range(10),
)
async def test_what_a_hostile_machine_tells_is_a_fault_of_the_machine(tmp_path, told):
    async with verdict(tmp_path) as (spec, _):
        box = SshBox("that", Hostile(b"", told, b"", b""), spec, MADE)
        with pytest.raises(ConnectionError, match="the connection to the machine that was lost"):
            await box.run(["true"], env=ENV, timeout=60, log=tmp_path / "log")


async def test_what_a_hostile_machine_sends_leads_nowhere_and_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "_TAKEN_BYTES", 5)
    (tmp_path / "secret").write_text("kept")
    gone = ["../secret", "/etc/passwd", "a\0b", "\ud800", "file"]
    sent = [b"aaa", b"bbb", b"", {**ENDED, "gone": gone}, b"no archive", b"", b"0.55", b"555", b""]
    async with verdict(tmp_path) as (spec, channel):
        (spec.workspace / "file").write_text("gone")
        box = SshBox("that", Hostile(*sent), spec, MADE)
        ended = await box.run(["true"], env=ENV, timeout=60, log=tmp_path / "log")
        channel.read()
    assert ended == Ended(None, "disk")
    assert (tmp_path / "log").read_text() == "aaabb"
    assert channel.content == b"0.555"
    assert (tmp_path / "secret").exists()
    assert not (spec.workspace / "file").exists()
