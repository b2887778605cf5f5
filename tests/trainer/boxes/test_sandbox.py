"""The sandbox: its view as data, and its boxes. `tests/security/test_boxes.py` attacks it."""

import os
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.boxes.sandbox import SandboxRuntime, View, write_etc
from rolltap.trainer.tasks.task import Limits
from tests.boxes import sandboxed, sh, spec_in


async def run(folder, script, **fields):
    async with SandboxRuntime().box(spec_in(folder, **fields)) as box:
        return await sh(box, script, folder / "log")


class TestArguments:
    """The options of bubblewrap, as data."""

    def view(self, tmp_path, tools=(), **fields):
        return View(spec_in(tmp_path, **fields), tmp_path / "etc", SandboxRuntime(tools).layers())

    def test_of_the_machine_only_system_folders_are_seen(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        arguments = self.view(tmp_path).arguments({})
        options = ("--ro-bind", "--ro-bind-try", "--bind")
        sources = {
            arguments[number + 1] for number, option in enumerate(arguments) if option in options
        }
        assert {
            Path(source).parts[1] for source in sources if not source.startswith(str(tmp_path))
        } <= {*("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")}
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
    async def test_a_box_that_cannot_be_made_is_an_os_error(self, tmp_path):
        with pytest.raises(OSError, match=r"the sandbox could not be made: bwrap: .*nowhere"):
            await run(tmp_path, "true", mounts=[Mount(Path("/nowhere"), "/x")])

    async def test_a_program_that_is_found_shows_nothing_that_is_hidden(
        self, tmp_path, monkeypatch
    ):
        for name in ("node/lib/node_modules", "node/bin", "node/run"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "node" / "run" / "secret").write_text("s3cret")
        (tmp_path / "node" / "bin" / "agent").write_text(
            f"#!/bin/sh\nls {tmp_path}/node; cat {tmp_path}/node/run/*\n"
        )
        (tmp_path / "node" / "bin" / "agent").chmod(0o755)
        runtime = SandboxRuntime()
        runtime.hide([tmp_path / "node" / "run"])
        async with runtime.box(spec_in(tmp_path)) as box:
            monkeypatch.setenv("PATH", f"{tmp_path}/node/bin:/usr/bin:/bin")
            await box.run(
                ["agent"], env={"PATH": os.environ["PATH"]}, timeout=60, log=tmp_path / "log"
            )
        said = (tmp_path / "log").read_text()
        assert "lib" in said
        assert "s3cret" not in said

    async def test_what_is_written_to_a_mount_counts(self, tmp_path):
        (tmp_path / "out").mkdir()
        mounts = [Mount(tmp_path / "out", "/out", writable=True)]
        script = "for i in $(seq 30); do head -c 1M /dev/zero > /out/$i; done; sleep 60"
        ended, _ = await run(tmp_path, script, mounts=mounts, limits=Limits(disk_gib=0.02))
        assert ended == Ended(None, "disk")

    async def test_a_box_has_limits_without_being_asked_and_sees_its_cores(self, tmp_path):
        _, said = await run(
            tmp_path, "ulimit -f; df --output=size -B1 /tmp | tail -1; nproc", limits=Limits(cpus=1)
        )
        assert said.split() == [
            str(20 << 20),
            str(4 << 30),
            "1",
        ]  # blocks of 1 KiB; half of the memory

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
    def test_a_machine_that_cannot_make_namespaces_is_told_why(
        self, tmp_path, monkeypatch, words, how
    ):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        with pytest.raises(InputError, match=how):
            SandboxRuntime().check()

    def test_a_tool_folder_that_does_not_exist_is_named(self):
        with pytest.raises(InputError, match="the tool folder /nowhere does not exist"):
            SandboxRuntime([Path("/nowhere")]).check()
