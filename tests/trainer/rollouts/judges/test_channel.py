"""The verdict's channels of judges that judge at the same time."""

import os
from contextlib import ExitStack
from pathlib import Path

from rolltap.trainer.rollouts.judges.channel import Channel


def inotify_instances():
    return [link for link in Path("/proc/self/fd").iterdir() if os.path.islink(link) and "inotify" in os.readlink(link)]


async def test_many_channels_take_one_inotify_instance_and_each_counts_its_own_writers(tmp_path):
    before = len(inotify_instances())
    with ExitStack() as stack:
        channels = [stack.enter_context(Channel(tmp_path / str(number))) for number in range(200)]
        assert len(inotify_instances()) == before + 1
        for number, writers in ((7, 1), (9, 2)):
            for _ in range(writers):
                with channels[number].path.open("w") as pipe:
                    pipe.write("0.5")
        for channel in channels:
            channel.read()
        assert {number: channel.opened for number, channel in enumerate(channels) if channel.opened} == {7: 1, 9: 2}
        assert (bytes(channels[7].content), bytes(channels[9].content)) == (b"0.5", b"0.50.5")
    assert len(inotify_instances()) == before
    with Channel(tmp_path / "later") as channel:
        channel.path.write_text("1")
        channel.read()
        assert channel.opened == 1
