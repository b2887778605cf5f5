"""Promises that the boxes of sandboxes and containers keep alike. `tests/security` attacks both."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from tests.boxes import (
    ENV,
    accept_with,
    containers,
    make_docker_spec,
    make_spec,
    sandboxed,
    sh,
    spec_in,
    wait_until_dead,
)
from tests.deep import cases

KINDS = {
    "sandbox": (SandboxRuntime, spec_in),
    "podman": (ContainerRuntime, make_spec),
    "docker": (partial(ContainerRuntime, "docker"), make_docker_spec),
}


@pytest.fixture(params=[pytest.param("sandbox", marks=sandboxed), *cases(["podman", "docker"])])
def kind(request):
    if request.param != "sandbox":
        request.getfixturevalue(request.param)
    return request.param


@pytest.fixture
def make_box(kind, tmp_path):
    """Return a function that makes a box of a runtime with folders of its own."""
    runtime, spec = KINDS[kind]

    def make_box(tools=(), hidden=(), **fields):
        made = runtime(tools=tools)
        made.hide(hidden)
        return made.box(spec(tmp_path, **fields))

    return make_box


@pytest.fixture
def run(make_box, tmp_path):
    """Return a function that runs one script in a box of its own, and returns its end and its
    output."""

    async def run(script, *, timeout=60.0, env=(), **how):
        async with make_box(**how) as box:
            return await sh(box, script, tmp_path / "log", timeout=timeout, **dict(env))

    return run


async def test_a_program_runs_in_the_workspace_with_its_own_home_and_environment(
    make_box, tmp_path
):
    value = "two\nlines 'and' \"quotes\" $HOME"
    async with make_box(workdir="/a, b:c/workspace") as box:
        assert (box.workdir, box.home, box.proxy) == ("/a, b:c/workspace", "/home/agent", None)
        script = 'pwd; echo "$VALUE"; touch here ~/there; cat; exit 3'
        assert await sh(box, script, tmp_path / "log", VALUE=value) == (
            Ended(3),
            f"/a, b:c/workspace\n{value}\n",
        )
    made = [tmp_path / "workspace" / "here", tmp_path / "home" / "there"]
    assert [path.stat().st_uid for path in made] == [os.getuid()] * 2


async def test_the_lines_of_stdout_and_stderr_keep_their_order(run):
    _, output = await run("for i in $(seq 1000); do echo $i; echo $i >&2; done")
    assert output.split() == [str(number) for number in range(1, 1001) for _ in range(2)]


async def test_mounts_are_read_only_unless_they_are_writable(run, tmp_path):
    for name in ("kept", "written,to"):
        (tmp_path / name).mkdir()
    mounts = [
        Mount(tmp_path / "kept", "/opt/kept"),
        Mount(tmp_path / "written,to", "/opt/written", writable=True),
    ]
    ended, output = await run("touch /opt/written/x; touch /opt/kept/x", mounts=mounts)
    assert ended == Ended(1)
    assert "Read-only file system" in output
    assert not list((tmp_path / "kept").iterdir())
    assert (tmp_path / "written,to" / "x").exists()


async def test_tools_are_read_only_under_their_own_path_without_what_is_hidden_in_them(
    make_box, tmp_path
):
    tool = tmp_path / "tool"
    for name in ("tool/run", "tool/bin", "beside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(f"content of {name}\n")
    (tool / "secret").write_text("s3cret")
    (tool / "bin" / "agent").write_text(
        f"#!/bin/sh\ncd {tmp_path}; cat tool/bin/file tool/run/file tool/secret beside/file; ls -A"
        " tool/run; touch $0\n"
    )
    (tool / "bin" / "agent").chmod(0o755)
    async with make_box([tool], [tool / "run", tool / "secret", tool / "none"]) as box:
        env = {"PATH": f"{tool}/bin:/usr/bin"}
        assert await box.run(["agent"], env=env, timeout=60, log=tmp_path / "log") == Ended(1)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "content of tool/bin"
    assert lines[-1].startswith("touch: cannot touch")
    assert all(
        line.endswith(("No such file or directory", "Permission denied")) for line in lines[1:-1]
    )


async def test_a_tool_folder_that_holds_the_sessions_is_refused(run, tmp_path):
    with pytest.raises(InputError, match=r"the tool folder .* contains .*/workspace"):
        await run("true", tools=[tmp_path])


@pytest.mark.parametrize("program", ["no-such-program", "/testbed/none"])
async def test_a_program_that_is_not_there_is_named(make_box, tmp_path, program):
    async with make_box() as box:
        with pytest.raises(FileNotFoundError) as raised:
            await box.run([program], env=ENV, timeout=60, log=tmp_path / "log")
    assert raised.value.filename == program


async def test_no_program_can_say_that_it_did_not_start(make_box, tmp_path):
    async with make_box() as box:
        script = "echo 'bwrap: execvp sh: No such file or directory' >&2; cat /.rolltap/*; exit 127"
        assert (await sh(box, script, tmp_path / "log"))[0] == Ended(127)
        assert (await sh(box, "kill -SEGV $$", tmp_path / "log"))[0] == Ended(-signal.SIGSEGV)


async def test_a_program_that_takes_too_long_is_stopped_with_all_that_it_started(
    make_box, tmp_path
):
    async with make_box() as box:
        script = "trap '' TERM; (setsid sleep 4243 &); sleep 4243"
        assert (await sh(box, script, tmp_path / "log", timeout=1))[0] == Ended(None, "timeout")
        _, output = await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", tmp_path / "log")
        assert "4243" not in output


async def other_server():
    """Return a server of this machine, and its port."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def answer_line(client):
    client.sendall(b"answer to " + client.makefile("rb").readline())


async def test_the_only_way_out_is_the_recorder(make_box, tmp_path):
    other, port = await other_server()
    script = (
        "exec 3<>/dev/tcp/${PROXY/:/\\/}; echo hello >&3; cat <&3; (exec"
        f" 3<>/dev/tcp/127.0.0.1/{port}) || echo closed; grep -c : /proc/net/dev; python3 -c"
        " 'import socket; socket.getaddrinfo(\"example.com\", 80)'"
    )
    async with other, make_box(proxy=f"127.0.0.1:{port}", accept=accept_with(answer_line)) as box:
        for _ in range(2):  # the second time with a network of its own
            _, output = await sh(box, f"PROXY={box.proxy}; {script}", tmp_path / "log")
            assert output.startswith("answer to hello\n")
            assert output.count("closed\n") == 1
            assert "\n1\n" in output  # the loopback
            assert "gaierror" in output
            await box.settle()


async def test_a_box_without_a_recorder_has_a_loopback_and_nothing_else(run):
    script = (
        "import socket\nserver = socket.create_server(('localhost', 0))\n"
        "client = socket.create_connection(server.getsockname())\nprint('connected')\n"
        "socket.create_connection(('127.0.0.1', 3128))"
    )
    _, output = await run(f'python3 -c "{script}"')
    assert "connected\n" in output
    assert "ConnectionRefusedError" in output


@functools.cache
def starting_threads():
    """Return the list to which each start of a program from now on adds its thread."""
    threads = []

    def hook(event, _):
        if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
            threads.append(threading.get_ident())

    sys.addaudithook(hook)  # nothing can remove it
    return threads


async def test_no_program_is_started_in_the_thread_of_the_event_loop(make_box, tmp_path):
    threads = starting_threads()
    ours = make_box(proxy="127.0.0.1:1", accept=accept_with(answer_line))
    threads.clear()  # an image of the test was made
    async with ours as box:
        assert (await sh(box, "true", tmp_path / "log"))[0] == Ended(0)
        await box.settle()
    assert threads
    assert threading.get_ident() not in threads


KILLED = """
import asyncio, os, psutil, signal, sys
from pathlib import Path
from tests.trainer.boxes.test_box import KINDS
kind, folder, marker = sys.argv[1:]
script = f"(setsid sh -c 'echo > fifo; exec sleep {marker}' &); exec sleep {marker}"
async def main():
    runtime, spec = KINDS[kind]
    async with runtime().box(spec(Path(folder))) as box:
        os.mkfifo(folder + "/workspace/fifo")
        log, env = Path(folder, "log"), {"PATH": "/usr/bin:/bin"}
        asyncio.create_task(box.run(["sh", "-c", script], env=env, timeout=600, log=log))
        await asyncio.to_thread(Path(folder, "workspace", "fifo").read_text)
        processes = psutil.process_iter(["cmdline"])
        started = {p.pid for p in processes if marker in " ".join(p.info["cmdline"] or ())} - {os.getpid()}
        started |= {p.pid for p in psutil.Process().children()} | ({box._pid} if kind != "sandbox" else set())
        print(getattr(box, "_folder", ""), *started, sep=",", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_everything_dies_with_rolltap_when_it_is_killed(kind, tmp_path):
    root, marker = Path(__file__).resolve().parents[3], f"3600.{os.getpid()}"
    command = [sys.executable, "-c", KILLED, kind, tmp_path, marker]
    killed = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    folder, *pids = killed.stdout.strip().split(",")
    assert killed.returncode == -signal.SIGKILL
    assert len(pids) >= 3
    assert all(wait_until_dead(int(pid)) for pid in pids)
    if kind != "sandbox":
        assert not Path(folder).exists()
        assert not any(tmp_path.name in name for name in containers())
