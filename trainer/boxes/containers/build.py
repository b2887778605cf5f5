"""Images that a container engine builds for tasks. Each is named by the content that it is built
of."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.addons.store.rows import printable
from rolltap.trainer.boxes.containers.engine import call
from rolltap.trainer.boxes.supervised import run_supervised
from rolltap.trainer.tasks.content import content_digest
from rolltap.trainer.tasks.task import Build


def image_of(build: Build) -> str:
    """Return the name of the image that a build makes. Raises `InputError` for a folder that cannot
    be read.

    No engine pulls a name of `localhost`.
    """
    return f"localhost/rolltap-build:{content_digest(build.folder)}"


async def build_image(
    engine: Sequence[str],
    image: str,
    build: Build,
    log: Path,
) -> None:
    """Build an image, unless it is there, with the output in `log`. `engine` is the beginning of a
    command line.

    Raises `InputError` with the last line of the log when it cannot be built in time, and
    `OSError`.
    """
    try:
        await asyncio.to_thread(call, [*engine, "image", "inspect", image])
        return
    except OSError:
        log.parent.mkdir(parents=True, exist_ok=True)
    options = ["--force-rm", "--tag", image, "--file", str(build.folder / "Dockerfile")]
    command = [*engine, "build", *options, str(build.folder)]
    ended = await run_supervised(
        command,
        cwd=log.parent,
        env=os.environ,
        timeout=build.timeout,
        log=log,
    )
    if ended.status != 0:
        how = f"ends with status {ended.status}"
        if ended.stopped:
            how = f"does not end within {build.timeout:g} s"
        output = log.read_text(errors="replace").strip()
        last = printable(output.rpartition("\n")[2].strip())
        raise InputError(
            f"its image cannot be built: the build of {build.folder} {how}: {last} (see {log})"
        )
