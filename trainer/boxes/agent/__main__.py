"""Has the boxes of one connection on a machine behind ssh. `boxes/remote/connection.py` brings it there.

    python -m rolltap.trainer.boxes.agent FOLDER

It makes boxes as a local rollout does, from folders below FOLDER that came over the connection
(`inside/frames.py` on stdin and stdout). When the connection ends, so do all boxes and FOLDER, and
then this process. If this process is killed, its boxes end by themselves; FOLDER, and what was in
it, is removed by the next one of the same user.
"""

import asyncio
import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rolltap.addons.errors import RolltapError
from rolltap.trainer.boxes.choose import make_runtime
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.inside.archive import (
    TooMuchError,
    pack,
    pack_changes,
    stamps,
    unpack,
)
from rolltap.trainer.boxes.inside.frames import STARTED, Connection, Stream
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Ended, ImageRuntime, Mount, Runtime
from rolltap.trainer.concurrency import in_folder_thread, run_to_end, wait_for_end
from rolltap.trainer.descriptors import raise_limit
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.channel import Channel
from rolltap.trainer.tasks.task import Limits

PREFIX = "rolltap-ssh-"
"""Begin of the name of FOLDER."""
_YOUNG_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_CONNECTIONS = 128
"""Most connections of a box to the recorder. The agent has two descriptors for each."""
_BACKLOG = 128
"""Connections of a box that wait until the agent accepts them."""
_CHUNK = 64 << 10
_GIB = 1 << 30


async def serve(stream: Stream) -> None:
    """Do what the first message of a stream says. An error is the last message."""
    try:
        request = await stream.receive()
        runtime = _make_runtime(request["settings"])
        match request["do"]:
            case "check":
                await asyncio.to_thread(runtime.check)
                await stream.send({})
            case "digest":
                digest = await asyncio.to_thread(runtime.image_digest, request["image"])
                await stream.send({"digest": digest})
            case "copy out":
                await _copy_out(stream, runtime, request)
            case "box":
                await _box(stream, runtime, request)
    except (OSError, RolltapError) as error:
        await stream.send({"error": _told(error)})
    except Exception as error:
        await stream.send({"error": {"text": f"the agent on that machine failed: {error!r}"}})


async def _copy_out(stream: Stream, runtime: Runtime, request: Mapping[str, Any]) -> None:
    assert isinstance(runtime, ImageRuntime)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as file,
    ):
        copy = Path(folder, "copy")
        copy.mkdir()
        copied = partial(runtime.copy_out, request["image"], request["workdir"], copy)
        await in_folder_thread(copied)
        await in_folder_thread(pack, file, {".": copy})
        file.seek(0)
        await stream.send({})
        await stream.send_file(file)


async def _box(stream: Stream, runtime: Runtime, request: Mapping[str, Any]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        async with AsyncExitStack() as stack:
            await _receive_folder(stream, folder)
            channels: list[Channel] = []
            mounts: list[Mount] = []
            for mount in request["mounts"]:
                source = folder / mount["source"]
                if mount["pipe"]:
                    source.parent.mkdir(exist_ok=True)
                    channels.append(await stack.enter_async_context(Channel(source)))
                mounts.append(Mount(source, mount["target"], mount["writable"]))
            recorder = request["recorder"]
            accept = None
            if recorder is not None:
                accept = partial(_accept, recorder, asyncio.get_running_loop())
            spec = BoxSpec(
                name=request["name"],
                workspace=folder / "workspace",
                workdir=request["workdir"],
                home=folder / "home",
                mounts=mounts,
                image=request["image"],
                limits=Limits(**request["limits"]),
                accept=accept,
            )
            box = await stack.enter_async_context(runtime.box(spec))
            await stream.send({"workdir": box.workdir, "home": box.home, "proxy": box.proxy})
            await _serve_box(stream, box, spec, channels, folder / "log")
    finally:
        await run_to_end(remove_folder, folder)


def _make_runtime(settings: Mapping[str, Any]) -> Runtime:
    """Return a runtime of this machine, whose boxes do not see what other boxes have here."""
    settings = dict(settings)
    program = settings.pop("program")
    runtime = make_runtime(**settings)
    if program is not None:
        runtime.show(program)
    if isinstance(runtime, HidingRuntime):
        runtime.hide([Path.home(), Path(tempfile.gettempdir()).parent])
    return runtime


def _told(error: Exception) -> dict[str, Any]:
    """Return an error as a message, from which the other side makes the same error."""
    told: dict[str, Any] = {"text": str(error), "permanent": isinstance(error, RolltapError)}
    if isinstance(error, OSError) and error.errno is not None:
        told |= {"text": error.strerror, "errno": error.errno}
        told["filename"] = None
        if error.filename is not None:
            told["filename"] = str(error.filename)
    return told


async def _receive_folder(stream: Stream, folder: Path) -> None:
    """Write what comes over the stream into a folder. Raises `OSError`."""
    with tempfile.TemporaryFile() as file:
        size = 0
        while chunk := await stream.receive_bytes():
            file.write(chunk)
            size += len(chunk)
        file.seek(0)
        if not await in_folder_thread(unpack, file, folder, 2 * size):
            raise OSError("the folders of the box did not arrive as they were sent")


async def _serve_box(
    stream: Stream,
    box: Box,
    spec: BoxSpec,
    channels: Sequence[Channel],
    log: Path,
) -> None:
    """Run the programs that a stream names, one after another, until the stream is closed."""
    before = await in_folder_thread(stamps, spec.workspace)
    limit = spec.limits.of_isolated().disk_gib
    assert limit is not None
    while True:
        request = await stream.receive()
        log.unlink(missing_ok=True)
        env: dict[str, str] = request["env"]
        # programs are where this machine has them
        paths = [os.environ.get("PATH"), env.get("PATH")]
        env["PATH"] = os.pathsep.join(filter(None, paths))
        running = box.run(request["command"], env=env, timeout=request["timeout"], log=log)
        try:
            ended = await _run(stream, running, log)
        except (OSError, RolltapError) as error:
            await stream.send({"error": _told(error)})
            continue
        await box.settle()
        with tempfile.TemporaryFile() as file:
            changed = partial(pack_changes, file, spec.workspace, before, int(limit * _GIB))
            try:
                gone = await in_folder_thread(changed)
                before = await in_folder_thread(stamps, spec.workspace)
            except TooMuchError:
                ended = Ended(None, "disk")
                gone = []
                file.truncate(0)
            for channel in channels:
                channel.read()
            told = {"status": ended.status, "stopped": ended.stopped, "gone": gone}
            await stream.send({**told, "pipes": [channel.opened for channel in channels]})
            file.seek(0)
            await stream.send_file(file)
        for channel in channels:
            await stream.send_bytes(bytes(channel.content))
            await stream.send_end()
            channel.content.clear()
            channel.opened = 0


async def _run(stream: Stream, running: Any, log: Path) -> Ended:
    """Return the end of a program, whose output is sent while it runs. Raises as `Box.run`."""
    program = asyncio.ensure_future(running)
    sent = 0
    try:
        while True:
            has_ended = program.done()
            chunk = _read(log, sent)
            sent += len(chunk)
            await stream.send_bytes(chunk)
            if not chunk and has_ended:
                break
            if not chunk:
                await asyncio.wait([program], timeout=_LOOK_SECONDS)
        await stream.send_end()
        ended: Ended = await program
        return ended
    finally:
        program.cancel()
        await wait_for_end(program)


def _read(log: Path, begin: int) -> bytes:
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(begin)
        return file.read(_CHUNK)
    return b""


@contextmanager
def _accept(
    recorder: str,
    loop: asyncio.AbstractEventLoop,
    listener: socket.socket,
) -> Iterator[None]:
    """Pass on the connections at a socket to the socket at `recorder`. Entered in a thread."""
    relaying = asyncio.run_coroutine_threadsafe(_relay(listener.dup(), recorder), loop)
    try:
        yield
    finally:
        relaying.cancel()


async def _relay(listener: socket.socket, recorder: str) -> None:
    passed: set[asyncio.StreamWriter] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(passed) < _CONNECTIONS:
            passed.add(writer)
            try:
                await pass_on(reader, writer)
            finally:
                passed.remove(writer)
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there_reader, there_writer = await asyncio.open_unix_connection(recorder)
            try:
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(_pass_on(reader, there_writer))
                    directions.create_task(_pass_on(there_reader, writer))
            except* OSError:
                pass  # a connection that breaks is closed at both ends
            finally:
                there_writer.close()

    # the boxes take turns: asyncio accepts as many in a row as its backlog has
    server = await asyncio.start_server(connect, sock=listener, backlog=1)
    listener.listen(_BACKLOG)
    async with server:
        await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


def sweep(own: Path) -> None:
    """Remove the folders of this user's agents that were killed: nobody has their locks."""
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
    protocol = asyncio.StreamReaderProtocol(reader)
    read, _ = await loop.connect_read_pipe(lambda: protocol, stdin)
    write, writing = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, stdout)
    try:
        yield reader, asyncio.StreamWriter(write, writing, None, loop)
    finally:
        read.close()
        write.abort()


async def main(place: Path) -> None:
    """Serve the connection until it ends. `place` is the folder of this agent."""
    async with _connected() as (reader, writer):
        writer.write(STARTED + f"{place}\n".encode(errors="replace"))
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
