"""Runs one program, and kills all that it started when the program ends or when rolltap does.

A script of its own, with the standard library only: `python -I -S supervise.py CONTROL`.
`supervised.py` starts it and describes the protocol. Processes whose parent has ended become
children of this one (`PR_SET_CHILD_SUBREAPER` of prctl(2)), so a process that starts a session of
its own (setsid) or forks twice does not get away.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
"""Time for killing. Only processes of another user, or in the kernel, take longer."""
_PAUSE_SECONDS = 0.002


class Supervisor:
    """The parent of one program. `request` has the keys of `supervised.Supervised`; `control` is
    its socket."""

    def __init__(self, request: dict[str, Any], control: socket.socket) -> None:
        self._request = request
        self._control = control
        self._parent = os.pidfd_open(request["parent"])
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._status: int | None = None
        """The program's; None as long as it runs."""
        self._program = 0

    def run(self) -> int:
        """Run the program to its end and kill what it left. Return its status; minus the signal's
        number."""
        if os.getppid() != self._request["parent"]:
            return 1  # rolltap died before it was known by a descriptor
        if self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        woken = self._wake_on_signals()
        try:
            self._start()
        except OSError as error:
            self._tell(errno=error.errno, filename=str(error.filename))
            return 1
        self._tell(pid=self._program)
        self._wait(woken)
        self._kill_all()
        if self._request["cleanup"]:
            with suppress(OSError):
                subprocess.run(self._request["cleanup"], stdin=subprocess.DEVNULL)
        return -signal.SIGKILL if self._status is None else self._status

    def _wake_on_signals(self) -> int:
        """Return a descriptor that becomes readable when a signal arrives. Signals that end a
        process do not here."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # handlers, not SIG_IGN, which a program would inherit
        for name in ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
            signal.signal(getattr(signal, name), _ignore)
        return woken

    def _start(self) -> None:
        for name, value in self._request["rlimits"].items():
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            if hard != resource.RLIM_INFINITY:
                value = min(value, hard)
            resource.setrlimit(number, (value, value))
        if self._request["cpus"]:
            os.sched_setaffinity(0, self._request["cpus"])
        descriptors = self._request["descriptors"]
        program = subprocess.Popen(
            self._request["command"],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            preexec_fn=self._die_with_parent,
        )
        self._program = program.pid
        program.returncode = 0  # `_reap` waits for it
        for descriptor in descriptors:
            os.close(descriptor)

    def _die_with_parent(self) -> None:
        # the signal comes when the parent's thread ends: this process has one thread
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):
            self._control.send(json.dumps(message).encode())

    def _wait(self, woken: int) -> None:
        """Return when the program has ended, or when it has to and its time of grace is over."""
        poll = select.poll()
        control = self._control.fileno()
        for descriptor in (woken, control, self._parent):
            poll.register(descriptor, select.POLLIN)
        deadline: float | None = None
        while True:
            self._reap()
            if self._status is not None:
                return
            milliseconds = None
            if deadline is not None:
                milliseconds = (deadline - time.monotonic()) * 1000
                if milliseconds <= 0:
                    return
            ready = dict(poll.poll(milliseconds))
            if woken in ready:
                os.read(woken, 4096)
            if control in ready and self._is_told_to_terminate():
                self._signal(signal.SIGTERM)
            elif control in ready or self._parent in ready:
                poll.unregister(control)
                poll.unregister(self._parent)
                deadline = time.monotonic() + self._request["grace"]
                if self._request["grace"]:
                    self._signal(signal.SIGTERM)

    def _is_told_to_terminate(self) -> bool:
        """Return False if rolltap has closed its socket: then the program has to end."""
        with suppress(OSError):
            return bool(self._control.recv(4096))
        return False

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._program, number)

    def _reap(self) -> bool:
        """Collect the children that have ended. Return False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._program:
                self._status = os.waitstatus_to_exitcode(status)

    def _kill_all(self) -> None:
        """Kill the children until none is left: the children of one that was killed become this
        process's own."""
        end = time.monotonic() + _KILL_SECONDS
        while self._reap() and time.monotonic() < end:
            for pid, group in _children(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    # a group as a whole: its members cannot fork faster than they are killed
                    os.killpg(group, signal.SIGKILL)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE_SECONDS)


def _children(parent: int) -> list[tuple[int, int]]:
    """Return the process id and the process group of each child. Not in `/proc/PID/task` of every
    kernel."""
    children: list[tuple[int, int]] = []
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    for pid in sorted(pids, reverse=True):
        with suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                # the name before the last parenthesis may have spaces and parentheses of its own
                fields = file.read().rpartition(b")")[2].split()
            if int(fields[1]) == parent:
                children.append((pid, int(fields[2])))
    return children


def _ignore(*_: object) -> None:
    """Handle a signal: it has woken this process, which is all."""


def main() -> None:
    """Read the request from stdin, run it, and end as the program ended."""
    # its memory holds what its program may have forgotten: hidden from other processes of the user
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.load(sys.stdin)
    control = socket.socket(fileno=int(sys.argv[1]))
    status = Supervisor(request, control).run()
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
