"""Harbor's environments for rolltap: it runs in Harbor's own Python, and rolltap has its stdin and
stdout.

A script of its own, on the package `harbor` (0.25) alone: `python -P harbor_environments.py
FOLDER`. FOLDER is for what Harbor keeps of its trials, and is removed at the end. Each line of
stdin is a request, a JSON object with `id` and `op`; each line of stdout is an answer with the same
`id`. Requests run at the same time. An answer has `error` when the request failed, and `permanent`
when it would fail again.

    check      environment, allowed            -> version, restricts
    start      box, environment, ...           -> {}             see `Environments.start`
    execute    box, command, seconds           -> status, said
    upload     box, source, target             -> {}
    download   box, source, target, limit      -> whole
    stop       box, environment, ...           -> {}             also of another process

Environments are stopped at the end of stdin, so they end when rolltap does, also by kill -9.
"""

import asyncio
import glob
import json
import logging
import os
import shutil
import signal
import stat
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import EnvironmentConfig as TaskEnvironment
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.trial.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from pydantic import ValidationError

LINE_BYTES = 16 << 20
SAID_CHARACTERS = 64 << 10
"""Most characters of the output of a command that an answer has, of its end. A box may say more."""
_LOOK_SECONDS = 0.1
"""Time between two looks at the size of a download."""
_STOP_SECONDS = 100.0
"""Time in which all environments stop when stdin has ended.

Then only their provider's own limits end them.
"""

Fields = dict[str, Any]


class Environments:
    """The environments by the names of their boxes.

    `folder` is for files that Harbor keeps of a trial.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, Any] = {}
        self._tasks: dict[str, set[asyncio.Task[Fields]]] = {}
        """The requests of a box that are being answered."""

    async def check(self, environment: Fields, allowed: list[str]) -> Fields:
        """Return Harbor's version, and whether the environment can restrict a box's network to
        hosts.

        Raises as Harbor does without credentials, without packages and for keys that are not known.
        """
        config = _configured(environment)
        await asyncio.to_thread(EnvironmentFactory.run_preflight, config.type, config.import_path)
        self._make("rolltap-check", environment=environment, image="scratch", allowed=None)
        restricts = True
        try:
            for hosts in (allowed, []):
                self._make("rolltap-check", environment=environment, image="scratch", allowed=hosts)
        except ValueError:
            restricts = False
        return {"version": version("harbor"), "restricts": restricts}

    async def start(self, box: str, **definition: Any) -> Fields:
        """Start an environment: see `_make`."""
        made = self._make(box, **definition)
        self._started[box] = made
        await made.start(force_build=_configured(definition["environment"]).force_build)
        return {}

    async def execute(self, box: str, command: str, seconds: int) -> Fields:
        """Run a command as root. Return its status, and the end of its output."""
        result = await self._running(box).exec(command, timeout_sec=seconds, user="root")
        said = (result.stdout or "") + (result.stderr or "")
        return {"status": result.return_code, "said": said[-SAID_CHARACTERS:]}

    async def upload(self, box: str, source: str, target: str) -> Fields:
        """Copy a file of this machine into a box."""
        await self._running(box).upload_file(source, target)
        return {}

    async def download(
        self,
        box: str,
        source: str,
        target: str,
        limit: int,
    ) -> Fields:
        """Copy a file of a box to this machine, where `target` has nothing yet.

        Return whether it came as a whole. It is cut when it has more than `limit` bytes, and when
        it is no file: the box may be hostile.
        """
        downloading = self._running(box).download_file(source, target)
        coming = asyncio.ensure_future(downloading)
        try:
            while not coming.done() and _fits(target, limit):
                await asyncio.wait([coming], timeout=_LOOK_SECONDS)
        finally:
            if coming.cancel():
                await asyncio.gather(coming, return_exceptions=True)
                _kill_writers(target)
        whole = _fits(target, limit)
        if whole:
            coming.result()
        return {"whole": whole}

    async def stop(self, box: str, **definition: Any) -> Fields:
        """Stop and delete an environment, and end what runs in it.

        Of one that this process did not start, Harbor knows the name alone: Docker's and Podman's
        can be deleted by it.
        """
        running = self._tasks.get(box, set()) - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        made = self._started.pop(box, None)
        if made is None:
            made = self._make(box, **definition)
        await _delete(made)
        return {}

    async def stop_all(self) -> None:
        """Stop and delete all environments at the same time."""
        stopping = [_delete(made) for made in self._started.values()]
        stopped = asyncio.gather(*stopping, return_exceptions=True)
        await asyncio.wait_for(stopped, _STOP_SECONDS)

    async def answer(self, request: Fields) -> Fields:
        """Return the answer to a request."""
        identity = request.pop("id")
        name = request.pop("op")
        operation = getattr(self, name)
        task = asyncio.current_task()
        assert task is not None
        tasks = self._tasks.setdefault(request.get("box", ""), set())
        tasks.add(task)
        try:
            return {"id": identity, **await operation(**request)}
        except (Exception, SystemExit) as error:  # Harbor exits for missing credentials
            lacks = isinstance(error, ValueError | ImportError | FileNotFoundError | SystemExit)
            # what a box that has started lacks, its programs may have removed
            permanent = lacks and name in ("check", "start")
            text = str(error)
            if not isinstance(error, ValueError | SystemExit):  # their texts say enough
                text = f"{type(error).__name__}: {text}"
            return {"id": identity, "error": text, "permanent": permanent}
        except asyncio.CancelledError:
            return {"id": identity, "error": "it was stopped", "permanent": False}
        finally:
            tasks.discard(task)

    def _running(self, box: str) -> Any:
        if box not in self._started:
            raise RuntimeError(f"the environment of {box} is not running")
        return self._started[box]

    def _make(
        self,
        box: str,
        *,
        environment: Fields,
        image: str | None,
        allowed: list[str] | None,
        definition: str | None = None,
        limits: Fields | None = None,
    ) -> Any:
        """Return an environment that is not started.

        `environment` has Harbor's keys of a trial's `environment`. The box has an `image`, or what
        the Dockerfile of the folder `definition` makes. It reaches the hosts that are `allowed`;
        for None, all. `limits` has `cpus`, `memory_mb` and `storage_mb`.
        """
        config = _configured(environment)
        folder = self._folder / box
        empty = folder / "environment"
        empty.mkdir(parents=True, exist_ok=True)
        policy = NetworkPolicy()
        if allowed is not None:
            mode = NetworkMode.ALLOWLIST if allowed else NetworkMode.NO_NETWORK
            policy = NetworkPolicy(network_mode=mode, allowed_hosts=allowed)
        return EnvironmentFactory.create_environment_from_config(
            config,
            environment_dir=empty if definition is None else Path(definition),
            environment_name="rolltap",
            session_id=box,
            trial_paths=TrialPaths(folder),
            task_env_config=TaskEnvironment(docker_image=image, **(limits or {})),
            mounts=config.mounts,
            auto_mounts=[],
            network_policy=policy,
        )


def _configured(environment: Fields) -> EnvironmentConfig:
    unknown = sorted(environment.keys() - EnvironmentConfig.model_fields.keys())
    if unknown:
        known = ", ".join(sorted(EnvironmentConfig.model_fields))
        raise ValueError(f"Harbor's environment has no key {unknown[0]}; its keys are {known}")
    try:
        return EnvironmentConfig.model_validate(environment)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            key = ".".join(str(place) for place in fault["loc"])
            what = f"the key {key} of harbor_environment is {fault['input']!r}"
            faults.append(f"{what}: {fault['msg']}")
        raise ValueError("; ".join(faults)) from error


async def _delete(made: Any) -> None:
    # podman-compose would delete the image, which other boxes have; containers are removed anyway
    await made.stop(delete=made.type() != "podman")


def _fits(path: str, limit: int) -> bool:
    """Return True if there is nothing at a path, or a file of at most so many bytes."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_size <= limit


def _kill_writers(path: str) -> None:
    """Kill the processes that have a file open, or what is in a folder.

    Harbor's Docker and Podman start such processes, and leave them when they are cancelled.
    """
    folder, name = os.path.split(path)
    place = os.path.join(os.path.realpath(folder), name)  # it may be a link of a hostile box
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        pid = int(descriptor.split("/")[2])
        with suppress(OSError):  # it has ended, or is another user's
            opened = os.readlink(descriptor)
            if pid != os.getpid() and f"{opened}/".startswith(f"{place}/"):
                os.kill(pid, signal.SIGKILL)


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    return reader


async def serve(answers: TextIO, folder: Path) -> None:
    """Answer the requests of stdin in `answers` until stdin ends, then stop the environments."""
    reader = await _lines()
    waiting: set[asyncio.Task[None]] = set()
    environments = Environments(folder)

    async def respond(request: Fields) -> None:
        answer = await environments.answer(request)
        with suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

    try:
        while line := await reader.readline():
            task = asyncio.create_task(respond(json.loads(line)))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
    finally:
        for task in [*waiting]:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await environments.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Serve. What Harbor and its packages print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.INFO)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(answers, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
