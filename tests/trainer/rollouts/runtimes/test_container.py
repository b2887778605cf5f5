import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes import container
from rolltap.trainer.rollouts.runtimes.container import ContainerRuntime
from rolltap.trainer.rollouts.runtimes.container_engine import LABEL, find_engine
from rolltap.trainer.rollouts.runtimes.runtime import Ended, Mount
from rolltap.trainer.rollouts.tasks.limits import Limits
from tests.containers import make_spec, podman  # noqa: F401

pytestmark = pytest.mark.usefixtures("podman")

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/home/agent"}


async def sh(box, script, log, *, timeout=120.0, **env):
    """Run a script of bash in a box. Return its end and its output."""
    ended = await box.run(["bash", "-c", script], env={**ENV, **env}, timeout=timeout, log=log)
    return ended, log.read_text()


async def in_box(tmp_path, script, *, env=None, **settings):
    """Run one script in a box of its own."""
    async with ContainerRuntime().box(make_spec(tmp_path, **settings)) as box:
        return await sh(box, script, tmp_path / "log", **(env or {}))


async def echo_server():
    """Return a server that answers a line with that line, and its port."""

    async def answer(reader, writer):
        writer.write(b"answer to " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def containers(runtime=None):
    """Return the names of the containers with rolltap's label."""
    label = LABEL if runtime is None else f"{LABEL}={runtime.id}"
    command = ["podman", "ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


async def test_a_program_runs_in_the_workspace_with_its_own_home_and_environment(tmp_path):
    value = "two\nlines 'and' \"quotes\" $HOME"
    spec = make_spec(tmp_path, workdir="/a, b:c/workspace")
    async with ContainerRuntime().box(spec) as box:
        assert (box.workdir, box.home, box.proxy) == ("/a, b:c/workspace", "/home/agent", None)
        script = 'pwd; echo "$VALUE"; touch here ~/there; cat; exit 3'
        assert await sh(box, script, tmp_path / "log", VALUE=value) == (Ended(3), f"/a, b:c/workspace\n{value}\n")
    assert (spec.workspace / "here").stat().st_uid == (spec.home / "there").stat().st_uid == os.getuid()


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


async def test_a_program_that_is_not_there_is_named(tmp_path):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        with pytest.raises(FileNotFoundError, match="no program no-such-program"):
            await box.run(["no-such-program"], env=ENV, timeout=60, log=tmp_path / "log")


async def test_a_program_that_exits_like_one_that_is_not_there_is_there(tmp_path):
    ended, _ = await in_box(tmp_path, 'cat /.rolltap/*; tr "\\0" "\\n" </proc/self/cmdline; echo "$1"; exit 127')
    assert ended == Ended(127)


async def test_a_signal_that_ends_a_program_is_its_status(tmp_path):
    assert (await in_box(tmp_path, "kill -SEGV $$"))[0] == Ended(-signal.SIGSEGV)


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
import asyncio, os, signal, sys
from pathlib import Path
from rolltap.trainer.rollouts.runtimes.container import ContainerRuntime
from tests.containers import make_spec
async def main():
    runtime = ContainerRuntime()
    spec = make_spec(Path(sys.argv[1]))
    os.mkfifo(spec.workspace / "fifo")
    async with runtime.box(spec) as box:
        script = ["sh", "-c", "(setsid sleep 4245 &); echo > fifo; sleep 4245"]
        task = asyncio.create_task(box.run(script, env={}, timeout=600, log=spec.home / "log"))
        await asyncio.to_thread((spec.workspace / "fifo").read_text)
        print(box._pid, box._folder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_everything_dies_with_rolltap_when_it_is_killed(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, tmp_path, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path()}
    )
    output, _ = await process.communicate()
    pid, folder = output.decode().split()
    assert process.returncode == -signal.SIGKILL
    await asyncio.wait_for(asyncio.to_thread(wait_until, lambda: not Path(folder).exists()), 60)
    assert not Path(f"/proc/{pid}").exists()
    assert not any(tmp_path.name in name for name in containers())


def path():
    return os.pathsep.join([*sys.path, os.getcwd()])


def wait_until(true):
    while not true():
        pass


@pytest.fixture(params=["control groups", "watched"])
def held_by(request, monkeypatch):
    """Hold limits by control groups, where the engine can use them, and by looking at what a box uses."""
    engine = find_engine("podman", ())
    if request.param == "control groups" and not engine.controllers:
        pytest.skip("Podman can use no control groups here")
    if request.param == "watched":
        without = replace(engine, controllers=frozenset())
        monkeypatch.setattr(container, "find_engine", lambda program, arguments: without)
    return request.param


@pytest.mark.usefixtures("held_by")
async def test_memory_is_limited(tmp_path):
    script = "exec python3 -c 'import time; x = bytearray(600 << 20); time.sleep(600)'"
    ended, _ = await in_box(tmp_path, script, limits=Limits(memory_gib=0.2))
    assert ended == Ended(None, "memory")


@pytest.mark.usefixtures("held_by")
async def test_processes_are_limited(tmp_path):
    script = "import os, time\nfor _ in range(80):\n    if not os.fork(): time.sleep(600)\ntime.sleep(600)"
    ended, _ = await in_box(tmp_path, f"python3 -c '{script}'", limits=Limits(processes=60))
    assert ended == Ended(None, "processes")


async def test_a_program_that_forks_faster_than_it_is_watched_does_not_fill_the_machine(tmp_path):
    if not find_engine("podman", ()).controllers:
        pytest.skip("Podman can use no control groups here")
    script = "import os, time\nfor _ in range(1000):\n    if not os.fork(): time.sleep(600)"
    _, output = await in_box(tmp_path, f"python3 -c '{script}'", limits=Limits(processes=10))
    assert "BlockingIOError" in output


@pytest.mark.parametrize("where", [".", "~", "/var/tmp"])
async def test_the_space_on_disk_is_limited_wherever_it_is_written(tmp_path, where):
    script = f"cd {where}; for i in $(seq 30); do head -c 2000000 /dev/zero > $i; done; sleep 600"
    ended, _ = await in_box(tmp_path, script, limits=Limits(disk_gib=0.02))
    assert ended == Ended(None, "disk")


async def test_a_file_cannot_be_larger_than_the_disk_limit(tmp_path):
    await in_box(tmp_path, "head -c 40000000 /dev/zero > large", limits=Limits(disk_gib=0.02))
    assert (tmp_path / "workspace" / "large").stat().st_size <= 0.02 * 2**30


async def test_a_box_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path):
    runtime = ContainerRuntime()
    mounts = [Mount(tmp_path / "absent", "/absent")]
    with pytest.raises(OSError, match="absent"):
        async with runtime.box(make_spec(tmp_path, mounts=mounts)):
            pass
    assert containers(runtime) == []


async def test_a_task_without_an_image_is_refused_with_the_fix(tmp_path):
    with pytest.raises(InputError, match="set `image` of its task"):
        async with ContainerRuntime().box(make_spec(tmp_path, image=None)):
            pass


async def test_a_root_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="/no/such/folder is no folder"):
        async with ContainerRuntime().box(make_spec(tmp_path, image="/no/such/folder")):
            pass


async def test_a_root_folder_that_holds_the_sessions_is_refused(tmp_path):
    with pytest.raises(InputError, match="the root folder / contains the workspace"):
        async with ContainerRuntime().box(make_spec(tmp_path, image="/")):
            pass


async def test_a_tool_folder_that_holds_the_sessions_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"the tool folder .* contains .*/workspace"):
        async with ContainerRuntime(tools=[tmp_path]).box(make_spec(tmp_path)):
            pass


async def test_tool_folders_are_read_only_under_their_own_path(tmp_path):
    tool = tmp_path / "tool" / "bin" / "agent"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho hello; touch $0\n")
    tool.chmod(0o755)
    async with ContainerRuntime(tools=[tmp_path / "tool"]).box(make_spec(tmp_path)) as box:
        env = {"PATH": f"{tool.parent}:/usr/bin"}
        ended = await box.run(["agent"], env=env, timeout=60, log=tmp_path / "log")
    assert ended == Ended(1)
    assert (tmp_path / "log").read_text().startswith("hello\ntouch: cannot touch")


async def test_docker_has_no_root_folders(tmp_path):
    with pytest.raises(InputError, match="Docker has no containers of a root folder"):
        async with ContainerRuntime("docker").box(make_spec(tmp_path)):
            pass


def test_an_oci_runtime_that_fails_is_named_with_the_fix(tmp_path):
    (tmp_path / "broken").write_text("#!/bin/sh\necho is broken >&2; exit 1\n")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(InputError, match=r"(?s)podman cannot start containers here: .*broken.*container_arguments = "):
        ContainerRuntime("podman", ["--runtime", str(tmp_path / "broken")]).check()
    with pytest.raises(InputError, match=r"podman does not work here: .*no-such-runtime"):
        ContainerRuntime("podman", ["--runtime", "no-such-runtime"]).check()


def test_another_oci_runtime_is_taken_where_the_default_one_fails(tmp_path, monkeypatch):
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    settings = f'[engine]\nruntime = "broken"\n[engine.runtimes]\nbroken = ["{tmp_path}/broken"]\n'
    (tmp_path / "containers.conf").write_text(settings)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    find_engine.cache_clear()
    try:
        assert find_engine("podman", ()).command == ("podman", "--runtime", "runc")
    finally:
        find_engine.cache_clear()


def test_a_runtime_that_works_is_looked_for_once():
    ContainerRuntime().check()
    hits = find_engine.cache_info().hits
    ContainerRuntime().check()
    assert find_engine.cache_info().hits == hits + 1


@pytest.fixture
def image(tmp_path_factory):
    """An image with a shell, three programs and an environment of its own."""
    folder = tmp_path_factory.mktemp("image")
    for name in ("sh", "sleep", "cat", "env"):
        copy_program(Path("/usr/bin", name).resolve(), folder, name)
    (folder / "testbed").mkdir()
    (folder / "testbed" / "start").write_text("of the image")
    (folder / "testbed" / "link").symlink_to("start")
    archive, name = folder.parent / "image.tar", f"localhost/rolltap-test-{os.getpid()}"
    subprocess.run(["tar", "-C", folder, "-cf", archive, "."], check=True)
    changes = ["--change", "ENV PATH=/programs", "--change", "ENV OF_IMAGE=kept"]
    command = ["podman", "import", "--quiet", *changes, archive, name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    yield name
    subprocess.run(["podman", "image", "rm", "--force", name], check=True, stdout=subprocess.DEVNULL)


def copy_program(program, root, name):
    """Copy a program of this machine with its libraries."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    libraries = [word for word in listed.split() if word.startswith("/")]
    for source, target in [(program, f"programs/{name}"), *((library, library.lstrip("/")) for library in libraries)]:
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / target).write_bytes(Path(source).read_bytes())
        (root / target).chmod(0o755)
    (root / "bin").mkdir(exist_ok=True)
    if name == "sh":
        (root / "bin" / "sh").write_bytes((root / "programs/sh").read_bytes())
        (root / "bin" / "sh").chmod(0o755)


async def test_a_box_of_an_image_keeps_the_images_variables_and_its_path_first(tmp_path, image):
    async with ContainerRuntime().box(make_spec(tmp_path, image=image, mounts=[], workdir="/testbed")) as box:
        ended = await box.run(["env"], env=ENV, timeout=60, log=tmp_path / "log")
    variables = dict(line.split("=", 1) for line in (tmp_path / "log").read_text().splitlines())
    assert ended == Ended(0)
    assert (variables["PATH"], variables["OF_IMAGE"]) == ("/programs:/usr/bin:/bin", "kept")


def test_the_folder_of_an_image_is_copied_out(tmp_path, image):
    runtime = ContainerRuntime()
    runtime.copy_out(image, "/testbed", tmp_path / "start")
    assert (tmp_path / "start" / "start").read_text() == "of the image"
    assert (tmp_path / "start" / "link").readlink() == Path("start")
    with pytest.raises(InputError, match="/absent of the image"):
        runtime.copy_out(image, "/absent", tmp_path / "absent")


def test_the_digest_of_an_image_is_that_of_its_configuration(image):
    inspected = json.loads(subprocess.run(["podman", "image", "inspect", image], capture_output=True).stdout)
    assert ContainerRuntime().image_digest(image) == f"sha256:{inspected[0]['Id']}"


def test_an_image_that_cannot_be_had_is_named():
    with pytest.raises(InputError, match="the image localhost/no-such-image is not here and cannot be pulled"):
        ContainerRuntime().image_digest("localhost/no-such-image")
