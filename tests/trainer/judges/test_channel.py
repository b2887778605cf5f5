"""The verdict's channels of judges that judge at the same time."""

import asyncio
import errno
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rolltap.trainer.judges import channel as module
from rolltap.trainer.judges.channel import Channel


def inotify_instances():
    links = Path("/proc/self/fd").iterdir()
    return [link for link in links if link.is_symlink() and "inotify" in os.readlink(link)]


def channel_in(folder):
    folder.mkdir()
    return Channel(folder / "verdict")


async def test_each_of_many_channels_counts_its_own_writers(tmp_path):
    before = len(inotify_instances())
    async with AsyncExitStack() as stack:
        channels = []
        for number in range(20):
            channel = channel_in(tmp_path / str(number))
            channels.append(await stack.enter_async_context(channel))
        for number in (7, 9, 9):
            channels[number].path.write_text("0.5")
        for channel in channels:
            channel.read()
        opened = {number: channel.opened for number, channel in enumerate(channels)}
        assert opened == {**dict.fromkeys(range(20), 0), 7: 1, 9: 2}
        assert channels[7].content == b"0.5"
        assert channels[9].content == b"0.50.5"
    assert len(inotify_instances()) == before


async def test_who_opens_a_pipe_without_end_spoils_no_other_channel(tmp_path):
    async with channel_in(tmp_path / "a") as flooded, channel_in(tmp_path / "b") as other:
        for _ in range(int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())):
            os.close(os.open(flooded.path, os.O_WRONLY))
        other.path.write_text("1")
        flooded.read()
        other.read()
        assert other.opened == 1
        assert other.content == b"1"
        assert flooded.opened > 1


class Libc:
    """A C library without inotify instances while a channel has one, or at all."""

    inotify_add_watch = module._libc.inotify_add_watch

    def __init__(self, *, has_one):
        self.has_one = has_one

    def inotify_init1(self, flags):
        if self.has_one and not Channel._instances:
            return module.ctypes.CDLL(None).inotify_init1(flags)
        module.ctypes.set_errno(errno.EMFILE)
        return -1


async def test_a_channel_without_an_inotify_instance_waits_for_the_end_of_another_one(
    tmp_path, monkeypatch
):
    async def second():
        async with channel_in(tmp_path / "second") as channel:
            channel.path.write_text("1")
            channel.read()
            return channel.opened

    async with channel_in(tmp_path / "first") as first:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_libc", Libc(has_one=True))
            waiting = asyncio.create_task(second())
            await asyncio.sleep(0)
            assert (tmp_path / "second/verdict").exists()
            first.path.write_text("1")
    assert await waiting == 1


async def test_a_user_without_inotify_instances_is_told_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_libc", Libc(has_one=False))
    with pytest.raises(OSError, match="max_user_instances"):
        async with channel_in(tmp_path / "a"):
            pass
