"""Makes a socket that listens on loopback in the network namespace of another process.

A script of its own, with the standard library only: `python -I -S listener.py CONTROL PID PORT`.
`way_out.py` starts it, and gets the socket through CONTROL, a Unix socket, or a text that says why
there is none. A thread of rolltap could not do this: only a process with one thread may join a user
namespace.
"""

import ctypes
import fcntl
import os
import socket
import sys
from contextlib import suppress

_NS_GET_USERNS = 0xB701
"""See ioctl_ns(2): the user namespace that owns a namespace."""
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_BACKLOG = 128


def listen(pid: int, port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1 where process `pid` is. This process is then there
    too, for good.

    Raises `OSError`.
    """
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    owner = fcntl.ioctl(network, _NS_GET_USERNS)
    if not os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user")):
        _join(owner, _CLONE_NEWUSER)  # gives the right to join what it owns
    _join(network, _CLONE_NEWNET)
    listener = socket.socket()
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener


def _join(namespace: int, kind: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, kind):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """Send the socket, or the error's text."""
    with socket.socket(fileno=int(sys.argv[1])) as control, suppress(BrokenPipeError):
        try:
            listener = listen(int(sys.argv[2]), int(sys.argv[3]))
        except OSError as error:
            control.send(str(error).encode())
        else:
            socket.send_fds(control, [b"\0"], [listener.fileno()])


if __name__ == "__main__":
    main()
