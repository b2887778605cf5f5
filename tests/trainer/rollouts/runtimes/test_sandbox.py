"""The sandbox: its view as data, and its boxes. `tests/security/test_boxes.py` attacks it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.runtime import Ended, Mount
from rolltap.trainer.rollouts.runtimes.sandbox import SandboxRuntime, View, write_etc
from rolltap.trainer.tasks.task import Limits
from tests.boxes import sandboxed, spec_in, wait_until_dead


async def run(folder, script, *, tools=(), hidden=(), timeout=60.0, env=(), command=None, **fields):
    async with SandboxRuntime(tools, hidden).box(spec_in(folder, **fields)) as box:
        env = {"PATH": "/usr/bin:/bin", "HOME": box.home, **dict(env)}
        ended = await box.run(command or ["sh", "-c", script], env=env, timeout=timeout, log=folder / "log")
        return ended, (folder / "log").read_text()


class TestArguments:
    """The options of bubblewrap, as data."""

    def view(self, tmp_path, tools=(), **fields):
        return View(spec_in(tmp_path, **fields), tmp_path / "etc", tools)

    def test_of_the_machine_only_system_folders_are_seen(self, tmp_path):
        arguments = self.view(tmp_path).arguments({})
        options = ("--ro-bind", "--ro-bind-try", "--bind")
        sources = {arguments[number + 1] for number, option in enumerate(arguments) if option in options}
        assert {Path(source).parts[1] for source in sources if not source.startswith(str(tmp_path))} <= {
            *("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
        }
        assert not sources & {"/etc", "/etc/ssl", "/etc/shadow", "/"}

    def test_a_tool_in_another_ones_folder_is_mounted_once(self, tmp_path):
        (tmp_path / "t" / "bin").mkdir(parents=True)
        view = self.view(tmp_path, (tmp_path / "t" / "bin", tmp_path / "t"))
        assert view.arguments({}).count(str(tmp_path / "t" / "bin")) == 0
        assert view.arguments({}).count(str(tmp_path / "t")) == 2

    def test_the_files_of_etc_name_one_user(self, tmp_path):
        assert (write_etc(tmp_path) / "passwd").read_text().startswith("agent:x:1000:1000:")


@sandboxed
class TestBox:
    async def test_a_program_runs_in_the_workspace_with_its_own_environment(self, tmp_path):
        ended, said = await run(tmp_path, "pwd; env | sort | head -1; touch made; exit 3", env={"A": "b"})
        assert (ended, said) == (Ended(3), "/testbed\nA=b\n")
        assert (tmp_path / "workspace" / "made").exists()

    async def test_a_signal_that_ends_a_program_is_its_status(self, tmp_path):
        ended, _ = await run(tmp_path, "kill -9 $$")
        assert ended == Ended(-9)

    async def test_a_program_that_takes_too_long_is_stopped(self, tmp_path):
        ended, _ = await run(tmp_path, "sleep 600", timeout=0.5)
        assert ended == Ended(None, "timeout")

    @pytest.mark.parametrize("program", ["no-such-program", "/testbed/none"])
    async def test_a_program_that_is_not_there_is_named(self, tmp_path, program):
        with pytest.raises(FileNotFoundError) as raised:
            await run(tmp_path, "", command=[program])
        assert raised.value.filename == program

    async def test_a_program_cannot_say_that_it_did_not_start(self, tmp_path):
        ended, _ = await run(tmp_path, "echo 'bwrap: execvp sh: No such file or directory' >&2; exit 1")
        assert ended == Ended(1)

    async def test_a_box_that_cannot_be_made_is_an_os_error(self, tmp_path):
        with pytest.raises(OSError, match=r"the sandbox could not be made: bwrap: .*nowhere"):
            await run(tmp_path, "true", mounts=[Mount(Path("/nowhere"), "/x")])

    async def test_mounts_are_seen_and_only_the_writable_can_be_written(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        mounts = [Mount(tmp_path / "a", "/testbed/tests"), Mount(tmp_path / "b", "/logs/b", writable=True)]
        ended, _ = await run(tmp_path, "touch tests/x || touch /logs/b/x", mounts=mounts)
        assert ended == Ended(0)
        assert not (tmp_path / "a" / "x").exists()
        assert (tmp_path / "b" / "x").exists()

    async def test_tools_are_seen_without_what_is_hidden_in_them(self, tmp_path):
        for name in ("tool/bin", "tool/run", "beside"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "file").write_text(name)
        (tmp_path / "tool" / "secret").write_text("secret")
        script = f"cd {tmp_path}; cat tool/bin/file tool/run/file tool/secret beside/file; touch tool/x; ls -A tool/run"
        hidden = [tmp_path / "tool" / "run", tmp_path / "tool" / "secret", tmp_path / "tool" / "none"]
        _, said = await run(tmp_path, script, tools=[tmp_path / "tool"], hidden=hidden)
        assert "tool/bincat" in said.replace("\n", "")
        assert "secret\n" not in said.replace("tool/secret", "")
        assert not (tmp_path / "tool" / "x").exists()

    async def test_a_program_that_is_found_shows_nothing_that_is_hidden(self, tmp_path):
        for name in ("node/lib/node_modules", "node/bin", "node/run"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "node" / "run" / "secret").write_text("s3cret")
        (tmp_path / "node" / "bin" / "agent").write_text(f"#!/bin/sh\nls {tmp_path}/node; cat {tmp_path}/node/run/*\n")
        (tmp_path / "node" / "bin" / "agent").chmod(0o755)
        runtime = SandboxRuntime()
        runtime.hide([tmp_path / "node" / "run"])
        async with runtime.box(spec_in(tmp_path)) as box:
            env = {"PATH": f"{tmp_path}/node/bin:/usr/bin:/bin"}
            await box.run(["agent"], env=env, timeout=60, log=tmp_path / "log")
        said = (tmp_path / "log").read_text()
        assert "lib" in said
        assert "s3cret" not in said

    async def test_what_is_written_to_a_mount_counts(self, tmp_path):
        (tmp_path / "out").mkdir()
        mounts = [Mount(tmp_path / "out", "/out", writable=True)]
        script = "for i in $(seq 30); do head -c 1M /dev/zero > /out/$i; done; sleep 60"
        ended, _ = await run(tmp_path, script, mounts=mounts, limits=Limits(disk_gib=0.02))
        assert ended == Ended(None, "disk")

    async def test_a_box_has_limits_without_being_asked(self, tmp_path):
        _, said = await run(tmp_path, "ulimit -f; df --output=size -B1 /tmp | tail -1")
        assert said.split() == [str(20 << 21), str(4 << 30)]  # blocks of 512 bytes; half of the memory

    async def test_a_box_with_cores_sees_so_many(self, tmp_path):
        _, said = await run(tmp_path, "nproc", limits=Limits(cpus=1))
        assert said == "1\n"

    async def test_a_tool_folder_that_holds_the_workspace_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="contains"):
            await run(tmp_path, "true", tools=[tmp_path])

    async def test_an_image_is_refused(self, tmp_path):
        with pytest.raises(InputError, match=r"has no images, and the task needs debian:12"):
            await run(tmp_path, "true", image="debian:12")


class TestCheck:
    def test_a_machine_without_bubblewrap_is_told_how_to_get_it(self, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(InputError, match="apt-get install bubblewrap"):
            SandboxRuntime().check()

    @pytest.mark.parametrize(
        ("words", "how"),
        [
            ("bwrap: Unknown option --disable-userns", r"0\.8 or newer"),
            ("bwrap: setting up uid map: Permission denied", "allow user namespaces"),
        ],
    )
    def test_a_machine_that_cannot_make_namespaces_is_told_why(self, tmp_path, monkeypatch, words, how):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        with pytest.raises(InputError, match=how):
            SandboxRuntime().check()

    def test_a_tool_folder_that_does_not_exist_is_named(self):
        with pytest.raises(InputError, match="the tool folder /nowhere does not exist"):
            SandboxRuntime([Path("/nowhere")]).check()


ROLLTAP = '''
import asyncio, sys
from pathlib import Path
from tests.trainer.rollouts.runtimes.test_sandbox import run
script = """
(setsid sh -c '(setsid sleep 3600.5 &)' &)
until pgrep sleep; do :; done
echo > fifo
sleep 3600.5
"""
asyncio.run(run(Path(sys.argv[1]), script))
'''


@sandboxed
def test_a_box_dies_with_rolltap(tmp_path):
    (tmp_path / "workspace").mkdir()
    os.mkfifo(tmp_path / "workspace" / "fifo")
    root = Path(__file__).resolve().parents[4]
    with subprocess.Popen([sys.executable, "-c", ROLLTAP, str(tmp_path)], cwd=root) as rolltap:
        (tmp_path / "workspace" / "fifo").read_text()
        sleeping = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.read_bytes().split(b"\0")[:2] == [b"sleep", b"3600.5"]
        ]
        rolltap.kill()
    assert sleeping
    assert all(wait_until_dead(pid) for pid in sleeping)
