"""Tasks of requests: those that were loaded, by their ids, and clients' own, which may reach no
further than a box."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from rolltap.addons.errors import InputError
from rolltap.addons.hosts import read_all_patterns, read_patterns
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.metadata import RUN_FILE
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.judges.protected import judges_of
from rolltap.trainer.names import some
from rolltap.trainer.rollouts.check import fit_tasks
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.service.requests import ForkRequest, GroupRequest
from rolltap.trainer.tasks.task import CommandJudge, LLMJudge, PytestJudge, PythonJudge, Task
from rolltap.trainer.traces.reader import SessionRows

_IMAGE = re.compile(
    r"(?:(?P<host>localhost|[\w-]+(?:\.[\w-]+)+(?::\d+)?|[\w-]+:\d+)/)?"
    r"[a-z0-9_.-]+(?:/[a-z0-9_.-]+)*(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?"
)
"""The name of an image, as of the Open Container Initiative's distribution specification."""
_TRANSPORTS = ("containers-storage", "dir", "docker-archive", "docker-daemon", "oci", "oci-archive")
"""Words after which Podman expects a place on this machine: containers-transports(5)."""


class ConflictError(InputError):
    """The request contradicts an earlier one, or a task that the service has."""


def requested_task(
    request: GroupRequest,
    tasks: Mapping[str, Task],
    worker: Worker,
    hosts: Collection[str],
) -> Task:
    """Return the task of a request as the worker runs it. `tasks` are those that were loaded.

    `hosts` are those that a client's own task may name, see `require_portable`.

    Raises `InputError`.
    """
    if request.evaluation:
        _require_evaluations(worker)
    if isinstance(request.task, str):
        if request.task not in tasks:
            known = some([*tasks])
            raise InputError(
                f"'task' is {request.task!r}, which is not loaded; the service has {known}"
            )
        return tasks[request.task]
    task = Task(**request.task)
    if task.id in tasks:
        fix = "send this id as 'task', or choose another"
        raise ConflictError(f"'task.id' is {task.id!r}, a loaded task: {fix}")
    require_portable(task, worker.runtime, hosts)
    [fitting] = fit_tasks([task], worker.runtime, worker.harness)
    check_judges([fitting], worker.recorder.engine)
    return fitting


class NotRecordedError(InputError):
    """A session that a request names is not there."""


def _require_evaluations(worker: Worker) -> None:
    why = worker.config.why_no_evaluations()
    if why:
        fix = "leave it out, or start the service without listen_port and the runtime that needs it"
        raise InputError(f"'evaluation' is true, and {why}: {fix}")


def requested_fork(
    fork: ForkRequest,
    task: Task,
    rows: SessionRows,
    run: Path,
) -> RecordedFrom:
    """Return the recorded session that a request forks, up to its call.

    `rows` are those of the run folder `run`. Raises `NotRecordedError` for a session that is not
    there, `InputError` for one of another task and a call that it does not have; and `RunError` and
    `OSError`.
    """
    where = f"'fork.session' is {fork.session!r}"
    ended: list[tuple[str]] = []
    if (run / RUN_FILE).exists():
        ended = rows.of("sessions", fork.session, ("task_id",))
    if not ended:
        what = f"no such session of {run} has ended"
        raise NotRecordedError(f"{where}, and {what}: name one of it")
    [of_task] = ended[-1]
    if of_task != task.id:
        fix = f"fork it with this 'task', not {task.id!r}"
        raise InputError(f"{where}, a session of the task {of_task!r}: {fix}")
    for call, started in rows.of("calls", fork.session, ("call_id", "started_at")):
        if call == fork.call:
            return RecordedFrom(run.absolute(), fork.session, started)
    what = f"which is no call of the session {fork.session!r}"
    raise InputError(f"'fork.call' is {fork.call!r}, {what}")


def require_portable(task: Task, runtime: Runtime, hosts: Collection[str]) -> None:
    """Refuse a task of a request that would reach further than a box.

    The operator's `hosts`, `HOST` or `HOST:PORT`, are the hosts that a judge may ask and of which
    an image may be: the service sends these requests from its own network, and tells the client how
    they end. A session and its judge may reach no others.

    Raises `InputError`, which names the field.
    """
    where = f"task {task.id!r}: "
    if not runtime.isolated:
        raise InputError(
            f"{where}the runtime {runtime.name} does not hold code from requests: send the id of a "
            "task that the service has loaded, or start the service with another --runtime"
        )
    advice = "load such a task with --tasks, and send its id"
    for name, value in task.model_dump().items():
        is_folder = isinstance(value, str) and PurePath(value).is_absolute()
        if _has_path(value) or (name == "image" and is_folder):
            raise InputError(f"{where}{name!r} names a file of the service's machine: {advice}")
    if task.allow:
        _require_hosts(f"{where}'allow'", task.allow, hosts)
    for judge in judges_of(task.effective_judge):
        if isinstance(judge, CommandJudge | PytestJudge):
            _require_hosts(f"{where}'judge.allow'", judge.allow, hosts)
        outside = f"which works outside of a box: {advice}"
        if isinstance(judge, PythonJudge):
            raise InputError(f"{where}'judge.kind' is {judge.kind!r}, {outside}")
        if isinstance(judge, LLMJudge):
            if judge.key_env:
                raise InputError(f"{where}'judge.key_env' is {judge.key_env!r}, {outside}")
            _require_host(f"{where}'judge.url' is {judge.url!r}", _host_of_url(judge.url), hosts)
    if task.image is not None:
        host = _host_of_image(task.image)
        if host != "localhost":
            _require_host(f"{where}'image' is {task.image!r}", host, hosts)


def _require_host(what: str, host: str | None, hosts: Collection[str]) -> None:
    if host is not None and host in hosts:
        return
    option = "--allow-host, which takes a host"
    if host:
        option = f"--allow-host {host}"
    raise InputError(f"{what}, and the operator of the service did not allow this host ({option})")


def _require_hosts(what: str, wanted: Iterable[str], hosts: Collection[str]) -> None:
    """Refuse a pattern that is more than one of the operator's hosts, which are no patterns."""
    allowed = read_all_patterns(tuple(hosts))
    for text in wanted:
        for pattern in read_patterns(text):
            if pattern not in allowed and pattern._replace(port="*") not in allowed:
                _require_host(f"{what} has {text!r}", text, ())


def _host_of_url(url: str) -> str | None:
    """Return the host of a URL with a port that is not HTTPS's own.

    None for a URL without a host, or with a user's name.
    """
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or "@" in split.netloc:
        return None
    host = split.netloc.lower()
    if split.scheme == "https":
        return host.removesuffix(":443")
    if ":" in host:
        return host
    return f"{host}:80"


def _host_of_image(image: str) -> str | None:
    """Return the registry of an image.

    None for a text that an engine may take for a place on this machine.
    """
    found = _IMAGE.fullmatch(image)
    transport = image.partition(":")[0]
    if found is None or image.startswith("-") or transport in _TRANSPORTS:
        return None
    return found["host"] or "docker.io"


def _has_path(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_path, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_path, value))
    return isinstance(value, PurePath)
