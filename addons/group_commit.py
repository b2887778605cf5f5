"""The wait for the disk, shared by the calls that end while it is busy."""

import asyncio

from rolltap.addons.store import RunWriter


class GroupCommit:
    """Brings commits to the disk before their replies are let go, if the writer's policy is `call`.

    Awaiting `durable` after a commit waits for one `fdatasync` that began after it. Those that ask while the disk is
    busy share the next one. Must be created inside the event loop that uses it.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._disk = asyncio.Lock()
        self._asked = 0
        self._durable = 0

    async def durable(self) -> None:
        """Return when all commits so far are on the disk. Raises `OSError`."""
        if self._writer.policy != "call":
            return
        self._asked += 1
        mine = self._asked
        async with self._disk:
            if self._durable < mine:
                asked = self._asked
                await asyncio.to_thread(self._writer.sync)
                self._durable = asked
