"""Has the boxes of one connection on a machine behind ssh. `boxes/remote` brings it there.

    python -m rolltap.trainer.boxes.far_side FOLDER

It makes boxes as a local rollout does, from folders below FOLDER that came over the connection
(`inside/frames.py` on stdin and stdout). When the connection ends, so do all boxes and FOLDER, and
then this process. If this process is killed, its boxes end by themselves; FOLDER, and what was in
it, is removed by the next one of the same user.
"""

import asyncio
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from rolltap.trainer.boxes.far_side.requests import serve
from rolltap.trainer.boxes.inside.frames import STARTED, Connection
from rolltap.trainer.descriptors import raise_limit
from rolltap.trainer.folders import remove_folder

PREFIX = "rolltap-ssh-"
"""Begin of the name of FOLDER."""
_YOUNG_SECONDS = 60.0


def sweep(own: Path) -> None:
    """Remove the folders of this user's far sides that were killed: nobody has their locks."""
    for folder in own.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            is_young = time.time() - status.st_mtime < _YOUNG_SECONDS
            if status.st_uid != os.getuid() or is_young:  # it may have no lock yet
                continue
            with _locked(folder):
                remove_folder(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises `OSError` when another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@asynccontextmanager
async def _connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield stdin and stdout as streams. Programs that are started from here have neither."""
    loop = asyncio.get_running_loop()
    stdin = os.fdopen(os.dup(0), "rb", buffering=0)
    stdout = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    reader = asyncio.StreamReader()
    read, _ = await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), stdin)
    write, writing = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, stdout)
    try:
        yield reader, asyncio.StreamWriter(write, writing, None, loop)
    finally:
        read.close()
        write.abort()


async def main(place: Path) -> None:
    """Serve the connection until it ends. `place` is the folder of this far side."""
    async with _connected() as (reader, writer):
        writer.write(STARTED + os.fsencode(f"{place}\n"))
        await Connection(reader, writer, serve).run()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        tempfile.tempdir = str(place)  # all that is made here goes with it
        raise_limit()
        with _locked(place):
            sweep(place)
            asyncio.run(main(place))
    finally:
        remove_folder(place)
