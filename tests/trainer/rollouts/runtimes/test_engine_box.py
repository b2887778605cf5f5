import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.trainer.rollouts.runtimes.container import ContainerRuntime
from rolltap.trainer.rollouts.runtimes.runtime import Ended, Mount
from tests.boxes import ENV, containers, in_box, make_spec, sh, wait_until_dead

pytestmark = pytest.mark.usefixtures("podman")


async def echo_server():
    """Return a server that answers a line with that line, and its port."""

    async def answer(reader, writer):
        writer.write(b"answer to " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_a_program_runs_in_the_workspace_with_its_own_home_and_environment(tmp_path):
    value = "two\nlines 'and' \"quotes\" $HOME"
    spec = make_spec(tmp_path, workdir="/a, b:c/workspace")
    async with ContainerRuntime().box(spec) as box:
        assert (box.workdir, box.home, box.proxy) == ("/a, b:c/workspace", "/home/agent", None)
        script = 'pwd; echo "$VALUE"; touch here ~/there; cat; exit 3'
        assert await sh(box, script, tmp_path / "log", VALUE=value) == (Ended(3), f"/a, b:c/workspace\n{value}\n")
    assert (spec.workspace / "here").stat().st_uid == (spec.home / "there").stat().st_uid == os.getuid()


async def test_the_lines_of_stdout_and_stderr_keep_their_order(tmp_path):
    _, output = await in_box(tmp_path, "for i in $(seq 1000); do echo $i; echo $i >&2; done")
    assert output.split() == [str(number) for number in range(1, 1001) for _ in range(2)]


async def test_a_box_has_none_of_this_machines_files_and_names(tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    script = f"ls / /home; cat {tmp_path}/secret /etc/passwd; cat /etc/hosts; hostname; ls /proc | grep -c '^[0-9]'"
    _, output = await in_box(tmp_path, script)
    assert "s3cret" not in output
    assert "root:" not in output
    assert socket.gethostname() not in output.split("\n")
    assert "127.0.0.1 localhost\n::1 localhost\nlocalhost\n" in output
    assert int(output.split()[-1]) < 8


async def test_a_program_has_no_rights_over_the_machine(tmp_path):
    script = "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; mount -t tmpfs x /tmp; mknod x c 1 3; "
    script += (
        "unshare -U echo escaped; unshare -n echo escaped; python3 -c 'import threading; threading.Thread().start()'"
    )
    ended, output = await in_box(tmp_path, script)
    assert ended == Ended(0)
    assert "escaped" not in output
    fields = dict(line.split(":\t") for line in output.splitlines()[:4])
    assert fields == {"CapBnd": "0" * 16, "CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    assert not list((tmp_path / "workspace").iterdir())


async def test_a_container_writes_to_a_copy_of_its_root_folder(tmp_path):
    ended, _ = await in_box(tmp_path, "echo changed > /etc/file && mkdir /folder && cat /etc/file /etc/hosts")
    assert ended == Ended(0)
    assert not list((tmp_path / "root" / "etc").iterdir())
    assert not (tmp_path / "root" / "folder").exists()


async def test_mounts_are_read_only_unless_they_are_writable(tmp_path):
    for name in ("kept", "written,to"):
        (tmp_path / name).mkdir()
    mounts = [Mount(tmp_path / "kept", "/opt/kept"), Mount(tmp_path / "written,to", "/opt/written", writable=True)]
    ended, output = await in_box(tmp_path, "touch /opt/written/x; touch /opt/kept/x", mounts=mounts)
    assert ended == Ended(1)
    assert "Read-only file system" in output
    assert not list((tmp_path / "kept").iterdir())
    assert (tmp_path / "written,to" / "x").exists()


async def test_tools_are_seen_without_what_is_hidden_in_them(tmp_path):
    (tmp_path / "tool" / "run").mkdir(parents=True)
    for name in ("seen", "run/secret", "secret"):
        (tmp_path / "tool" / name).write_text(f"content of {name}\n")
    runtime = ContainerRuntime(tools=[tmp_path / "tool"])
    runtime.hide([tmp_path / "tool" / "run", tmp_path / "tool" / "secret"])
    async with runtime.box(make_spec(tmp_path)) as box:
        _, said = await sh(box, f"cd {tmp_path}/tool; cat seen secret; ls -A run", tmp_path / "log")
    assert said == "content of seen\n"


async def test_the_only_way_out_is_the_relay(tmp_path):
    recorder, port = await echo_server()
    other, other_port = await echo_server()
    script = (
        "exec 3<>/dev/tcp/${PROXY/:/\\/}; echo hello >&3; cat <&3; "
        f"for port in {port} {other_port}; do (exec 3<>/dev/tcp/127.0.0.1/$port) || echo closed; done; "
        "grep -c : /proc/net/dev; python3 -c 'import socket; socket.getaddrinfo(\"example.com\", 80)'"
    )
    async with recorder, other, ContainerRuntime().box(make_spec(tmp_path, proxy=f"127.0.0.1:{port}")) as box:
        _, output = await sh(box, f"PROXY={box.proxy}; {script}", tmp_path / "log")
        # again with a network of its own
        await box.settle()
        _, again = await sh(box, f"PROXY={box.proxy}; {script}", tmp_path / "log")
    for each in (output, again):
        assert each.startswith("answer to hello\n")
        assert each.count("closed\n") == 2
        assert "\n1\n" in each  # the loopback
        assert "gaierror" in each


async def test_a_box_without_a_recorder_has_a_loopback_and_nothing_else(tmp_path):
    script = (
        "import socket\nserver = socket.create_server(('localhost', 0))\n"
        "client = socket.create_connection(server.getsockname())\nprint('connected')\n"
        "socket.create_connection(('127.0.0.1', 3128))"
    )
    _, output = await in_box(tmp_path, f'python3 -c "{script}"')
    assert "connected\n" in output
    assert "ConnectionRefusedError" in output


async def test_a_program_that_is_not_there_is_named_and_no_program_can_say_so(tmp_path):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        with pytest.raises(FileNotFoundError, match="no program no-such-program"):
            await box.run(["no-such-program"], env=ENV, timeout=60, log=tmp_path / "log")
        script = 'cat /.rolltap/*; tr "\\0" "\\n" </proc/self/cmdline; echo "$1"; exit 127'
        assert (await sh(box, script, tmp_path / "log"))[0] == Ended(127)
        assert (await sh(box, "kill -SEGV $$", tmp_path / "log"))[0] == Ended(-signal.SIGSEGV)


async def test_what_a_program_leaves_is_killed_by_settle_and_its_files_stay(tmp_path):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        script = "(setsid setsid sleep 4242 &); echo kept > /var/kept; echo kept > kept"
        await sh(box, script, tmp_path / "log")
        assert await sh(box, "pgrep -x sleep | wc -l", tmp_path / "log") == (Ended(0), "2\n")
        await box.settle()
        await box.settle()
        # one is that of the box's first process
        script = "pgrep -x sleep | wc -l; cat kept /var/kept"
        assert await sh(box, script, tmp_path / "log") == (Ended(0), "1\nkept\nkept\n")


async def test_a_program_that_takes_too_long_is_stopped_with_all_that_it_started(tmp_path):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        script = "trap '' TERM; (setsid sleep 4243 &); sleep 4243"
        assert (await sh(box, script, tmp_path / "log", timeout=1))[0] == Ended(None, "timeout")
        assert await sh(box, "pgrep -x sleep | wc -l", tmp_path / "log") == (Ended(0), "1\n")


async def test_cancelling_stops_the_program_and_removes_the_container(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    runtime = ContainerRuntime()
    mounts = [Mount(tmp_path / "fifo", "/fifo", writable=True)]

    async def session():
        async with runtime.box(make_spec(tmp_path, mounts=mounts)) as box:
            await sh(box, "echo started > /fifo; sleep 4244", tmp_path / "log")

    task = asyncio.create_task(session())
    await asyncio.to_thread((tmp_path / "fifo").read_text)
    assert len(containers(runtime)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert containers(runtime) == []


async def test_the_first_process_of_a_box_cannot_be_killed_from_inside(tmp_path):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        await sh(box, "kill -TERM 1; kill -KILL 1; kill -KILL -1", tmp_path / "log")
        assert await sh(box, "echo alive", tmp_path / "log") == (Ended(0), "alive\n")


async def test_a_program_whose_box_ends_has_failed_and_the_next_has_a_box(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    mounts = [Mount(tmp_path / "fifo", "/fifo", writable=True)]
    async with ContainerRuntime().box(make_spec(tmp_path, mounts=mounts)) as box:
        running = asyncio.create_task(sh(box, "echo started > /fifo; sleep 4246", tmp_path / "log"))
        await asyncio.to_thread((tmp_path / "fifo").read_text)
        os.kill(box._pid, signal.SIGKILL)
        ended, _ = await running
        assert ended.stopped is None
        assert ended.status not in (None, 0)
        assert await sh(box, "echo alive", tmp_path / "log") == (Ended(0), "alive\n")


async def test_a_box_that_has_ended_before_the_program_is_an_os_error(tmp_path, monkeypatch):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        monkeypatch.setattr(Path, "exists", lambda _: True)
        os.kill(box._pid, signal.SIGKILL)
        wait_until_dead(box._pid)
        with pytest.raises(OSError, match="bash could not be started in the container of"):
            await sh(box, "true", tmp_path / "log")


async def test_nothing_of_a_program_is_on_a_command_line_that_all_users_can_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    mounts = [Mount(tmp_path / "fifo", "/fifo", writable=True)]
    async with ContainerRuntime().box(make_spec(tmp_path, mounts=mounts)) as box:
        run = asyncio.create_task(sh(box, "echo started > /fifo; cat /fifo", tmp_path / "log", TOKEN="t0ken"))
        await asyncio.to_thread((tmp_path / "fifo").read_text)
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
        assert any(b"podman" in line for line in lines)
        assert not any(b"t0ken" in line for line in lines)
        await asyncio.to_thread((tmp_path / "fifo").write_text, "end")
        assert (await run)[0] == Ended(0)


KILLED = """
import asyncio, os, psutil, signal, sys
from pathlib import Path
from rolltap.trainer.rollouts.runtimes.container import ContainerRuntime
from tests.boxes import make_spec
async def main():
    runtime = ContainerRuntime()
    spec = make_spec(Path(sys.argv[1]))
    os.mkfifo(spec.workspace / "fifo")
    async with runtime.box(spec) as box:
        script = ["sh", "-c", "(setsid sleep 4245 &); echo > fifo; sleep 4245"]
        task = asyncio.create_task(box.run(script, env={}, timeout=600, log=spec.home / "log"))
        await asyncio.to_thread((spec.workspace / "fifo").read_text)
        print(box._folder, box._pid, *(child.pid for child in psutil.Process().children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_everything_dies_with_rolltap_when_it_is_killed(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, tmp_path, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path()}
    )
    output, _ = await process.communicate()
    folder, *pids = output.decode().split()
    assert process.returncode == -signal.SIGKILL
    assert len(pids) >= 3  # the box's first process, the supervisor and the engine's program; perhaps du
    assert all(wait_until_dead(int(pid)) for pid in pids)
    assert not Path(folder).exists()
    assert not any(tmp_path.name in name for name in containers())


def path():
    return os.pathsep.join([*sys.path, os.getcwd()])
