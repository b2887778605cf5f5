"""Boxes of the sandbox, beyond what all boxes keep: `tests/security/test_boxes.py` attacks them."""

from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.tasks.task import Limits
from tests.boxes import sandboxed, sh, spec_in


async def run(folder, script, **fields):
    async with SandboxRuntime().box(spec_in(folder, **fields)) as box:
        return await sh(box, script, folder / "log")


@sandboxed
async def test_a_box_that_cannot_be_made_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"the sandbox could not be made: bwrap: .*nowhere"):
        await run(tmp_path, "true", mounts=[Mount(Path("/nowhere"), "/x")])


@sandboxed
async def test_a_tool_in_another_ones_folder_is_seen_and_what_is_written_to_a_mount_counts(
    tmp_path,
):
    bin = tmp_path / "t" / "bin"
    bin.mkdir(parents=True)
    (bin / "tool").write_text("a tool")
    (tmp_path / "out").mkdir()
    mounts = [Mount(tmp_path / "out", "/out", writable=True)]
    spec = spec_in(tmp_path, mounts=mounts, limits=Limits(disk_gib=0.02))
    async with SandboxRuntime([bin, tmp_path / "t"]).box(spec) as box:
        assert await sh(box, f"cat {bin}/tool", tmp_path / "log") == (Ended(0), "a tool")
        script = "for i in $(seq 30); do head -c 1M /dev/zero > /out/$i; done; sleep 600"
        ended, _ = await sh(box, script, tmp_path / "log")
    assert ended == Ended(None, "disk")


@sandboxed
async def test_a_box_has_limits_without_being_asked_and_sees_its_cores(tmp_path):
    script = "ulimit -f; df --output=size -B1 /tmp | tail -1; nproc"
    _, said = await run(tmp_path, script, limits=Limits(cpus=1))
    blocks, memory, cores = map(int, said.split())
    assert blocks == 20 << 20  # of 1 KiB
    assert memory == 4 << 30  # half of it
    assert cores == 1


@sandboxed
async def test_an_image_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no images, and the task needs debian:12"):
        await run(tmp_path, "true", image="debian:12")


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(monkeypatch):
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
def test_a_machine_that_cannot_make_namespaces_is_told_why(tmp_path, monkeypatch, words, how):
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(InputError, match=how):
        SandboxRuntime().check()


def test_a_tool_folder_that_does_not_exist_is_named():
    with pytest.raises(InputError, match="the tool folder /nowhere does not exist"):
        SandboxRuntime([Path("/nowhere")]).check()
