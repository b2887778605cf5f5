"""Requests of a stream to the far side: a check, a digest, a copy, or a box and its programs."""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rolltap.addons.errors import RolltapError
from rolltap.trainer.boxes.choose import make_runtime
from rolltap.trainer.boxes.far_side.relay import relayed
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.inside.frames import Stream
from rolltap.trainer.boxes.remote.archive import (
    TooMuchError,
    pack,
    pack_changes,
    stamps,
    unpack,
)
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Ended, ImageRuntime, Mount, Runtime
from rolltap.trainer.concurrency import in_folder_thread, run_to_end, wait_for_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.channel import Channel
from rolltap.trainer.tasks.task import Limits

_LOOK_SECONDS = 0.1
_CHUNK = 64 << 10


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
                await _serve_box(stream, runtime, request)
    except (OSError, RolltapError) as error:
        await stream.send({"error": _told(error)})
    except Exception as error:
        await stream.send({"error": {"text": f"rolltap on that machine failed: {error!r}"}})


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


def _told(error: OSError | RolltapError) -> dict[str, Any]:
    """Return an error as a message, from which the other side makes the same error."""
    if not isinstance(error, OSError) or error.errno is None:
        return {"text": str(error), "permanent": isinstance(error, RolltapError)}
    filename = error.filename
    if filename is not None:
        filename = str(filename)
    return {"text": error.strerror, "errno": error.errno, "filename": filename}


async def _copy_out(stream: Stream, runtime: Runtime, request: Mapping[str, Any]) -> None:
    assert isinstance(runtime, ImageRuntime)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
        copy = Path(folder, "copy")
        copy.mkdir()
        await in_folder_thread(runtime.copy_out, request["image"], request["workdir"], copy)
        await in_folder_thread(pack, file, {".": copy})
        file.seek(0)
        await stream.send({})
        await stream.send_file(file)


async def _serve_box(stream: Stream, runtime: Runtime, request: Mapping[str, Any]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        async with AsyncExitStack() as stack:
            await _receive_folder(stream, folder)
            channels: list[Channel] = []
            mounts: list[Mount] = []
            for mount in request["mounts"]:
                source = folder / mount["source"]
                mounts.append(Mount(source, mount["target"], mount["writable"]))
                if mount["pipe"]:
                    source.parent.mkdir(exist_ok=True)
                    channels.append(await stack.enter_async_context(Channel(source)))
            accept = None
            if request["recorder"] is not None:
                accept = partial(relayed, request["recorder"], asyncio.get_running_loop())
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
            await _Programs(stream, box, spec, channels, folder / "log").serve()
    finally:
        await run_to_end(remove_folder, folder)


async def _receive_folder(stream: Stream, folder: Path) -> None:
    """Write what comes over the stream into a folder. Raises `OSError`."""
    with tempfile.TemporaryFile() as file:
        while chunk := await stream.receive_bytes():
            file.write(chunk)
        size = file.tell()
        file.seek(0)
        if not await in_folder_thread(unpack, file, folder, 2 * size):
            raise OSError("the folders of the box did not arrive as they were sent")


class _Programs:
    """The programs of a box, which its stream names one after another."""

    def __init__(
        self,
        stream: Stream,
        box: Box,
        spec: BoxSpec,
        channels: Sequence[Channel],
        log: Path,
    ) -> None:
        self._stream = stream
        self._box = box
        self._workspace = spec.workspace
        self._channels = channels
        self._log = log
        self._before: Any = None
        """The files of the workspace as the other side has them."""
        self._limit = spec.disk_bytes()

    async def serve(self) -> None:
        """Run programs until the stream is closed."""
        self._before = await in_folder_thread(stamps, self._workspace)
        while True:
            request = await self._stream.receive()
            try:
                ended = await self._run(request)
            except (OSError, RolltapError) as error:
                await self._stream.send({"error": _told(error)})
                continue
            await self._box.settle()
            await self._send_changes(ended)
            for channel in self._channels:
                await self._stream.send_bytes(bytes(channel.content))
                await self._stream.send_end()
                channel.content.clear()
                channel.opened = 0

    async def _run(self, request: Mapping[str, Any]) -> Ended:
        """Return the end of a program, whose output is sent while it runs. Raises as `Box.run`."""
        self._log.unlink(missing_ok=True)
        env = dict(request["env"])
        # programs are where this machine has them
        paths = [os.environ.get("PATH"), env.get("PATH")]
        env["PATH"] = os.pathsep.join(filter(None, paths))
        running = self._box.run(
            request["command"], env=env, timeout=request["timeout"], log=self._log
        )
        program = asyncio.ensure_future(running)
        try:
            await self._send_output(program)
            return await program
        finally:
            program.cancel()
            await wait_for_end(program)

    async def _send_output(self, program: asyncio.Task[Ended]) -> None:
        sent = 0
        while True:
            has_ended = program.done()
            chunk = _read(self._log, sent)
            sent += len(chunk)
            await self._stream.send_bytes(chunk)
            if not chunk and has_ended:
                break
            if not chunk:
                await asyncio.wait([program], timeout=_LOOK_SECONDS)
        await self._stream.send_end()

    async def _send_changes(self, ended: Ended) -> None:
        """Send how a program ended, and what it changed in the workspace."""
        with tempfile.TemporaryFile() as file:
            try:
                gone = await in_folder_thread(
                    pack_changes, file, self._workspace, self._before, self._limit
                )
                self._before = await in_folder_thread(stamps, self._workspace)
            except TooMuchError:
                ended = Ended(None, "disk")
                gone = []
                file.truncate(0)
            for channel in self._channels:
                channel.read()
            message = {
                "status": ended.status,
                "stopped": ended.stopped,
                "gone": gone,
                "pipes": [channel.opened for channel in self._channels],
            }
            await self._stream.send(message)
            file.seek(0)
            await self._stream.send_file(file)


def _read(log: Path, begin: int) -> bytes:
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(begin)
        return file.read(_CHUNK)
    return b""
