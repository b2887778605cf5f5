import asyncio
import threading

import pytest

from rolltap.addons.group_commit import GroupCommit


class Disk:
    """A writer whose `sync` takes until it is let go."""

    policy = "call"

    def __init__(self):
        self.syncs = 0
        self.busy = threading.Event()
        self.free = threading.Event()
        self.failure = None

    def sync(self):
        self.syncs += 1
        self.busy.set()
        self.free.wait()
        if self.failure:
            raise self.failure


async def test_those_that_ask_while_the_disk_is_busy_share_the_next_sync():
    disk = Disk()
    group = GroupCommit(disk)
    first = asyncio.create_task(group.durable())
    await asyncio.to_thread(disk.busy.wait)
    later = [asyncio.create_task(group.durable()) for _ in range(10)]
    await asyncio.sleep(0)  # they ask now
    assert not first.done()
    disk.free.set()
    await asyncio.gather(first, *later)
    assert disk.syncs == 2


@pytest.mark.parametrize("policy", ["never", "session"])
async def test_other_policies_do_not_wait(policy):
    disk = Disk()
    disk.policy = policy
    await GroupCommit(disk).durable()
    assert disk.syncs == 0


async def test_all_that_wait_learn_of_a_failure():
    disk = Disk()
    disk.free.set()
    disk.failure = OSError("gone")
    group = GroupCommit(disk)
    results = await asyncio.gather(*(group.durable() for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["gone"] * 3
