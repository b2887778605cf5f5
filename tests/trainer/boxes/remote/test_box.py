"""Promises that boxes elsewhere keep alike: their programs work on a copy of the workspace."""

import os
import signal

import pytest

from rolltap.trainer.boxes.remote.harbor import HarborRuntime
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.judges.channel import Channel
from rolltap.trainer.tasks.task import Limits
from tests.boxes import ENV, sh, spec_in
from tests.harbor import PYTHON, environment, limits_of_podman, podman_image, projects

CHANGES = """
pwd; cat kept >&2; echo $HOME
echo more >> changed
echo new > new; chmod +x new; ln -s new link; ln new hard
rm -r gone folder
exit 3
"""


async def check_changes(runtime, spec, log):
    """Run programs that change a workspace, and check what they found and what came back."""
    for name in ("kept", "changed", "gone", "folder/gone"):
        (spec.workspace / name).parent.mkdir(exist_ok=True)
        (spec.workspace / name).write_text(f"{name}\n")
    kept = (spec.workspace / "kept").stat()
    async with runtime.box(spec) as box:
        assert await sh(box, CHANGES, log) == (Ended(3), "/testbed\nkept\n/home/agent\n")
        assert (spec.workspace / "changed").read_text() == "changed\nmore\n"
        assert os.access(spec.workspace / "new", os.X_OK)
        ended, _ = await sh(box, "rm hard; touch ~/there; kill -SEGV $$", log)
        assert ended == Ended(-signal.SIGSEGV)
        with pytest.raises(FileNotFoundError) as raised:
            await box.run(["no-such-program"], env=ENV, timeout=60, log=log)
        assert raised.value.filename == "no-such-program"
        assert await sh(box, "cat changed", log) == (Ended(0), "changed\nmore\n")
    assert sorted(os.listdir(spec.workspace)) == ["changed", "kept", "link", "new"]
    assert os.readlink(spec.workspace / "link") == "new"
    after = (spec.workspace / "kept").stat()
    assert (after.st_ino, after.st_ctime_ns) == (kept.st_ino, kept.st_ctime_ns)
    assert not list(spec.home.iterdir())


async def test_what_programs_change_in_the_workspace_comes_back_from_a_machine(machine, tmp_path):
    await check_changes(machine.runtime(), spec_in(tmp_path), tmp_path / "log")
    assert machine.left() == []


async def test_what_programs_change_in_the_workspace_comes_back_from_harbor(
    harbor, harbor_spec, tmp_path
):
    await check_changes(harbor(), harbor_spec(), tmp_path / "log")
    assert os.listdir(tmp_path / "boxes") == []


@pytest.mark.deep
async def test_harbors_podman_environment_is_such_a_box_and_nothing_of_it_is_left(
    harbor, harbor_spec, tmp_path, monkeypatch
):
    monkeypatch.setenv("CONTAINERS_CONF", str(limits_of_podman(tmp_path)))
    with podman_image(tmp_path / "image") as image:
        runtime = HarborRuntime(PYTHON, environment(tmp_path), "recorder.example:8443")
        spec = harbor_spec(image, proxy="127.0.0.1:1", limits=Limits(memory_gib=0.5))
        await check_changes(runtime, spec, tmp_path / "log")
        assert projects(spec.name) == []


@pytest.mark.parametrize("kind", ["ssh", "harbor"])
async def test_mounts_are_copies_and_a_verdict_comes_through_a_pipe_whose_writers_are_counted(
    request, tmp_path, kind
):
    (tmp_path / "ca").write_text("certificate\n")
    pipe = tmp_path / "pipe"
    mounts = [Mount(tmp_path / "ca", "/etc/rolltap/ca.pem"), Mount(pipe, "/verdict")]
    async with Channel(pipe) as channel:
        if kind == "ssh":
            runtime = request.getfixturevalue("machine").runtime()
            spec = spec_in(tmp_path, mounts=mounts)
        else:
            runtime = request.getfixturevalue("harbor")()
            spec = request.getfixturevalue("harbor_spec")(mounts=mounts)
        async with runtime.box(spec) as box:
            script = "cat /etc/rolltap/ca.pem; echo x >> /etc/rolltap/ca.pem"
            _, output = await sh(box, script, tmp_path / "log")
            assert output.startswith("certificate\n")
            channel.read()
            assert (channel.opened, bytes(channel.content)) == (0, b"")
            await sh(box, "echo 1 > /verdict", tmp_path / "log")
            channel.read()
            assert (channel.opened, bytes(channel.content)) == (1, b"1\n")
            await sh(box, "true", tmp_path / "log")
            channel.read()
            assert channel.opened == 1
            if kind == "ssh":  # Harbor's boxes do not count those of one program
                await sh(box, "echo 2 > /verdict; echo 3 > /verdict", tmp_path / "log")
                channel.read()
                assert (channel.opened, bytes(channel.content)) == (3, b"1\n2\n3\n")
    assert (tmp_path / "ca").read_text() == "certificate\n"
