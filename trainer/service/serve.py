"""`rolltap service`: checks what the sessions need, and serves until it is stopped."""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path

from rolltap.addons.engine.key import make_key
from rolltap.addons.errors import EngineError, InputError, MissingPackageError, install_command
from rolltap.addons.hosts import read_all_patterns
from rolltap.trainer.concurrency import wait_for_end
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.tasks.sources import load_tasks

TOKEN_FILE = "service.token"
"""File in the run folder with the token, if no other is named."""
HEADERS_BYTES = 16 * 1024
"""Largest headers of a request."""


async def serve(
    worker: Worker,
    tasks: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token_file: Path | None = None,
    queue: int = 4096,
    evaluation_share: float = 0.25,
    allow_host: Sequence[str] = (),
    say: Callable[[str], None],
) -> None:
    """Serve the rollouts of a worker that has not started, until it is cancelled or gets a signal.

    `port` 0 is a free one; `say` is told the URL. The token file is made if it does not exist. At
    most `queue` sessions wait or run. Tasks of requests may name the hosts `allow_host`, see
    `require_portable`.

    Raises `MissingPackageError` without FastAPI and uvicorn, `InputError` for wrong tasks, harness
    or runtime, `EngineError` when no engine answers, `RunError` when another rollout runs in the
    folder, and `OSError` for the address and the files.
    """
    try:
        import uvicorn

        from rolltap.trainer.descriptors import raise_limit, share_limit
        from rolltap.trainer.service.app import make_app
        from rolltap.trainer.service.connections import Connection
        from rolltap.trainer.service.groups import Groups
        from rolltap.trainer.viewer.app import base_url, reading_token
        from rolltap.trainer.viewer.serve import listen
    except ImportError as error:
        raise MissingPackageError(
            f"rolltap service needs packages ({error}): {install_command('record,service')}"
        ) from error
    try:
        read_all_patterns(tuple(allow_host))
    except ValueError as error:
        raise InputError(f"--allow-host: {error}") from error
    run = worker.recorder.path
    token_file = token_file or run / TOKEN_FILE
    loaded = load_tasks(tasks, repositories=worker.config.repositories)
    fitting = await asyncio.to_thread(worker.fit, loaded, [token_file])
    await asyncio.to_thread(_say_weights, worker, say)
    connections = share_limit(raise_limit(), worker.config.concurrency)
    run.mkdir(parents=True, exist_ok=True)
    token = await asyncio.to_thread(read_token, token_file)
    fitting = await worker.build(fitting)
    with listen(host, port) as listening:
        groups = Groups(worker, fitting, most=queue, share=evaluation_share, hosts=allow_host)
        groups.recorded.say = say
        try:
            await groups.load()
            config = uvicorn.Config(
                make_app(groups, token),
                http=Connection,
                ws="none",
                log_level="warning",
                lifespan="off",
                access_log=False,
                limit_concurrency=connections,
                backlog=connections,
                h11_max_incomplete_event_size=HEADERS_BYTES,
            )
            config.timeout_graceful_shutdown = 1  # streams of events do not end by themselves
            server = uvicorn.Server(config)
            running = asyncio.create_task(groups.recorded.run())
            running.add_done_callback(lambda _: setattr(server, "should_exit", True))
            try:
                address, bound, *_ = listening.getsockname()
                url = base_url(host, bound)
                say(f"the service listens at {url}, with {len(fitting)} tasks")
                say(f"the run in the browser: {url}/view/?token={reading_token(token)}")
                if not ipaddress.ip_address(address).is_loopback:
                    what = "is reached from other machines; whoever has the token runs code here"
                    say(f"warning: {host} {what}")
                await server.serve(sockets=[listening])
            finally:
                running.cancel()
                # uvicorn raises its signal again, which cancels this task: the recorder and the
                # folders end first
                if await wait_for_end(running):
                    raise asyncio.CancelledError
            if not running.cancelled():
                running.result()
        finally:
            groups.journal.close()


def _say_weights(worker: Worker, say: Callable[[str], None]) -> None:
    """Say what the engines serve.

    Raises `EngineError`, but for an engine that is silent beside one that is not.
    """
    try:
        worker.weights(say)
    except EngineError as error:
        engines = Engines(worker.recorder.engine)
        silent = engines.silent()
        if not silent or len(silent) == len(engines.admins):
            raise
        say(f"warning: {error}; the service begins without it")


def read_token(file: Path) -> str:
    """Return the token of a file, which is made if it does not exist.

    Raises `InputError` and `OSError`.
    """
    make_key(file)
    token = file.read_text().strip()
    if len(token) < 16 or not token.isascii() or " " in token:
        what = "does not hold one word of at least 16 characters"
        raise InputError(f"the token file {file} {what}: remove it")
    if file.stat().st_mode & 0o077:
        raise InputError(f"the token file {file} can be read by other users: chmod 600 {file}")
    return token
