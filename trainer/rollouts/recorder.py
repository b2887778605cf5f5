"""The recorder as child processes: mitmdump with the addons, once or several times."""

import hashlib
import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from rolltap.addons.engine.key import KEY_FILE
from rolltap.addons.engine.policy import POLICY_FILE, PolicyFile
from rolltap.addons.errors import InputError, RecorderError, RunError
from rolltap.addons.options import require_options
from rolltap.addons.prompts.tokenizer import require_findable, resolve_model
from rolltap.addons.secret import hide_process
from rolltap.addons.store.records import (
    UNREWARDED,
    Event,
    Session,
    SessionStatus,
    json_text,
    utc_now,
)
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.staging import locked
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.boxes.environment import Proxy
from rolltap.trainer.engine.status import served_by
from rolltap.trainer.locks import workplace
from rolltap.trainer.rollouts import mitmdump
from rolltap.trainer.rollouts.mitmdump import Mitmdump
from rolltap.trainer.traces.facts import Facts, session_facts
from rolltap.trainer.traces.reader import SessionRows

_CA_FILES = ("mitmproxy-ca.pem", "mitmproxy-dhparam.pem")
"""Files that mitmproxy makes in its folder when it first starts, the first and the last of them."""
_LOCK_FILE = "rolltap.lock"
"""File in mitmproxy's folder. It is locked while a recorder makes the CA: of two that make one at
once, the later one replaces that of the other, whose sessions then trust no reply."""
STARTED_FIELDS = (
    "task_id",
    "group_id",
    "task_digest",
    "policy_version",
    "harness",
    "harness_version",
    "program_digest",
    "preset_digest",
    "runtime",
    "image_digest",
)
"""Fields of a session's row that are known before it runs, and are in the event `session_started`.
"""


def started_event(session: Session, key: Mapping[str, str] | None = None) -> Event:
    """Return the event of a session's start. `key` has the digests of the parts of its group's
    key."""
    detail: dict[str, object] = {}
    for name in STARTED_FIELDS:
        value = getattr(session, name)
        if value:
            detail[name] = value
    if key:
        detail["key"] = dict(key)
    return Event(
        kind="session_started",
        session_id=session.session_id,
        at=session.started_at,
        detail=json_text(detail),
    )


class Recorder:
    """A recorder of one run, as child processes: mitmdump on a free loopback port, with a secret. A
    context manager.

    `out` is the run folder. It is created if it does not exist; otherwise new sessions are added to
    it. `engine` is the URL of the vLLM server, or several separated by commas. `model` is the
    served model's folder or name, for its tokenizer. `options` are further mitmproxy options, see
    `mitmdump --options`; a repeatable one has a list of values. `processes` is the number of
    mitmdump processes. Each uses one core; a session's id names its process. The log is
    `recorder.log` in the run folder, or with several processes `recorder-1.log` and so on.

    From entering on, the calling process is hidden from other processes of its user, because it
    holds the secret: they cannot read its memory or environment, or trace it.

    Raises `InputError` for `processes` below 1, a `model` that is a path and not there, an unknown
    option, and a value of another type; `MissingPackageError` without mitmproxy. Entering raises
    `RecorderError` when the recorder does not start, for instance for a wrong `model` or option;
    `OSError` for the folder. Leaving raises `RecorderError` when a process has died inside.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        engine: str,
        model: str | Path,
        options: Mapping[str, str | Sequence[str]] | None = None,
        processes: int = 1,
    ) -> None:
        if processes < 1:
            raise InputError(f"processes={processes}: give at least 1")
        try:
            require_findable(str(model))
        except InputError as error:
            raise InputError(f"{error}{served_by(engine)}") from None
        self.path = Path(out)
        """The run folder."""
        self.rows: SessionRows
        """The rows of the run's sessions. Only inside of the `with` block."""
        self.engine = engine
        self.model = str(model)
        known = {
            "rolltap_out": str(out),
            "rolltap_engine": engine,
            "rolltap_model": self.model,
            **(options or {}),
        }
        require_options(known)
        mitmdump.program()
        self._options: dict[str, list[str]] = {}
        for name, value in known.items():
            self._options[name] = [value] if isinstance(value, str) else [*value]
        self._number = processes
        self._processes: list[Mitmdump] = []
        self._proxies: list[Proxy] = []
        """One for each process. Empty outside of the `with` block."""
        self.lock: int | None = None
        """Descriptor of a lock that the processes keep until they end, also of a killed caller."""
        self.aborted = False
        """True when a thread has stopped the start."""

    def private_files(self) -> list[Path]:
        """Return the engine's key file and mitmproxy's folder, which has the key of its
        certificates."""
        files = [self._confdir()]
        named = [*self._options.get("rolltap_engine_key_file", []), os.environ.get(KEY_FILE, "")]
        for name in named:
            if name:
                files.append(Path(name).expanduser())
        return files

    def _option(self, name: str, default: str) -> str:
        return self._options.get(name, [default])[-1]

    def _confdir(self) -> Path:
        return Path(self._option("confdir", "~/.mitmproxy")).expanduser()

    def require_rendering(self) -> None:
        """Raise `InputError` for a folder of a model whose conversations cannot be rendered."""
        if Path(self.model).is_dir():
            from rolltap.addons.prompts.rendering import Rendering

            Rendering(resolve_model(self.model), self._option("rolltap_renderer", "auto"))

    @staticmethod
    def script() -> Path:
        """Return the path of the script that `mitmdump -s` loads."""
        return mitmdump.script()

    def __enter__(self) -> Self:
        hide_process()
        confdir = self._confdir()
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            bundle = stack.enter_context(workplace()) / "ca-bundle.pem"
            self._processes = []
            stack.callback(self._stop)
            # one for each process: a session's password works only where its calls are recorded
            # and ended
            keys = [secrets.token_urlsafe(32) for _ in range(self._number)]
            addresses: list[str] = []
            with ExitStack() as alone:
                if not _has_ca(confdir):
                    confdir.mkdir(parents=True, exist_ok=True)
                    lock = confdir / _LOCK_FILE
                    alone.enter_context(locked(lock, os.O_RDWR | os.O_CREAT, wait=True))
                self._start(1, keys[0])
                if not _has_ca(confdir):
                    addresses.append(self._processes[0].address())  # it makes the CA
            for number in range(1, self._number):
                self._start(number + 1, keys[number])
            for process in self._processes[len(addresses) :]:
                addresses.append(process.address())
            ca = confdir / "mitmproxy-ca-cert.pem"
            proxies = []
            for address, key in zip(addresses, keys, strict=True):
                proxies.append(Proxy(f"http://{address}", ca=ca, secret=key, bundle=bundle))
            self._writer = stack.enter_context(RunWriter(self.path))
            self.rows = SessionRows(self.path)
            self._proxies = proxies
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._proxies = []
        died = [process for process in self._processes if process.ended]
        self._cleanup.close()
        if died and kind is None:
            died[0].check()

    def abort_start(self) -> None:
        """Stop the recorder while another thread enters it. Entering raises `RecorderError`
        then."""
        self.aborted = True
        for process in self._processes:
            process.terminate()

    def environment(self, session_id: str) -> dict[str, str]:
        """Return the variables with which a program is recorded as `session_id`. Raises
        `RecorderError` as `proxy`."""
        return self.proxy(session_id).environment(session_id)

    def proxy(self, session_id: str) -> Proxy:
        """Return the process of a session, by its id alone. Raises `RecorderError` outside of the
        `with` block."""
        if not self._proxies:
            raise RecorderError(
                "the recorder is not running: use it inside `with Recorder(...) as recorder:`"
            )
        return self._proxies[self._place(session_id)]

    def accept(self, session_id: str, listener: socket.socket) -> AbstractContextManager[None]:
        """Have the process of a session accept connections at a socket that listens in its box.

        Entering raises `OSError` when the process has died.
        """
        return self._processes[self._place(session_id)].accept(listener)

    def _place(self, session_id: str) -> int:
        digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest) % self._number

    def begin(
        self,
        session: Session,
        key: Mapping[str, str] | None = None,
        given: SessionOptions | None = None,
    ) -> None:
        """Record that a rollout starts a session. A session that is begun and not ended was
        interrupted.

        `key` has the digests of the parts of its group's key, `given` its options in place of the
        recorder's.

        Raises `RecorderError` outside of the `with` block, and `OSError` when the run folder cannot
        be written.
        """
        self.proxy(session.session_id)
        if given is not None:
            given.write(self.path, session.session_id)
        self._writer.add_event(started_event(session, key))

    def open_judge(self, session_id: str, allow: Sequence[str]) -> Proxy:
        """See `JudgeNetwork`: the session takes no model calls and has no row, and its refusals are
        events."""
        proxy = self.proxy(session_id)
        SessionOptions(allow=tuple(allow), model_calls=False).write(self.path, session_id)
        return proxy

    def close_judge(self, session_id: str) -> None:
        """See `JudgeNetwork`."""
        self.stop_calls(session_id)
        SessionOptions.remove(self.path, session_id)

    def end_calls(self, session_id: str) -> str | None:
        """End the calls of a session, before its result is judged. Return why the session has no
        reward, or None.

        Running calls are recorded, later ones are refused. The text names what failed in the
        engine, the recorder or the machine and kept the program from going on; for None the result
        is the program's own. `end` comes after it.

        Raises `RecorderError` outside of the `with` block and when the recorder has died or cannot
        do that; `RunError` and `OSError` when the run folder cannot be read.
        """
        self.stop_calls(session_id)
        return self.facts(session_id).fault

    def stop_calls(self, session_id: str) -> None:
        """End the calls of a session as `end_calls`, for a caller that asks for `facts` itself."""
        proxy = self.proxy(session_id)
        try:
            proxy.end_session(session_id)
        except RecorderError:
            self.check()
            raise

    def facts(self, session_id: str) -> Facts:
        """Return the facts of a session after `end_calls` or `stop_calls`. Raises as
        `end_calls`."""
        self.proxy(session_id)
        return session_facts(self.rows, session_id)

    def end(self, session: Session) -> None:
        """End a session and record how it ended. Its running calls are recorded, and its commits
        are synced to the disk unless `rolltap_fsync` is `never`. `finished_at` is set if it is
        None.

        `policy_version` becomes the version that sampled the first token of its calls. Without a
        token it stays, or if it is None it becomes the published version, `default` for the
        engine's own weights.

        Raises `InputError` for an empty id, a status that a session cannot end with, and a reward
        that is not finite or comes with a status of `UNREWARDED`; else as `end_calls`.
        """
        self.proxy(session.session_id)
        _require_end(session)
        session.finished_at = session.finished_at or utc_now()
        try:
            self.stop_calls(session.session_id)
        finally:  # a session whose recorder has died has its row too
            try:
                session.policy_version = self._version(session)
            finally:  # and one whose version cannot be read
                self._writer.add_session(session)

    def _version(self, session: Session) -> str:
        """Return the version of a session's row. Raises `RunError` and `OSError`."""
        known = self.rows.first_version(session.session_id) or session.policy_version
        if known is None:
            return self.published_version()
        return known

    def published_version(self) -> str:
        """Return the version of the run's policy. Raises `RunError` when it cannot be read."""
        try:
            return PolicyFile(self.path).read().version
        except (OSError, RunError) as error:
            what = f"{error}: a session has no version"
            raise RunError(f"{what}; restore {POLICY_FILE}, or record into a new folder") from error

    def check(self) -> None:
        """Raise `RecorderError` if a process has died."""
        for process in self._processes:
            process.check()

    def _start(self, number: int, secret: str) -> None:
        name = "the recorder"
        log = self.path / "recorder.log"
        if self._number > 1:
            name = f"recorder {number} of {self._number}"
            log = self.path / f"recorder-{number}.log"
        kept = []
        if self.lock is not None:
            kept.append(self.lock)
        self._processes.append(Mitmdump(name, self._options, secret=secret, log=log, kept=kept))
        if self.aborted:
            self._processes[-1].terminate()

    def _stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.stop()


def _require_end(session: Session) -> None:
    """Raise `InputError` for a session that cannot end as its row says."""
    if not session.session_id:
        raise InputError("the session has an empty session_id")
    where = f"session {session.session_id}:"
    statuses = [status for status in get_args(SessionStatus) if status != "unknown"]
    if session.status not in statuses:
        raise InputError(f"{where} status={session.status!r}: choose {', '.join(statuses)}")
    if session.reward is None:
        return
    if not math.isfinite(session.reward):
        raise InputError(f"{where} the reward {session.reward} is not finite")
    if session.status in UNREWARDED:
        rule = f"a session with the status {session.status} has no reward"
        raise InputError(f"{where} {rule}: leave out its reward of {session.reward}")


def _has_ca(confdir: Path) -> bool:
    """Return True when mitmproxy has made its CA in its folder, and written all of it."""
    files = [confdir / name for name in _CA_FILES]
    return all(file.exists() and file.stat().st_size for file in files)
