"""The system calls that no program of a box may use: a filter for the kernel (seccomp(2)), and
Podman's profile."""

import errno
import platform
import struct
from dataclasses import dataclass
from typing import Any

from rolltap.addons.errors import InputError

_DENIED = """
ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp
perf_event_open bpf userfaultfd add_key request_key keyctl
io_uring_setup io_uring_enter io_uring_register
"""
DENIED = tuple(_DENIED.split())
"""Calls that reach into other processes of the same user, or that agents do not need: io_uring
passes by a filter."""
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK. Sockets of others reach this machine past the box's
network (AF_VSOCK)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the kernel names an architecture (linux/audit.h) and its calls (asm/unistd.h)."""

    audit: int
    numbers: tuple[int, ...]
    """Numbers of the calls in `DENIED`, in that order."""
    sockets: tuple[int, int]
    """Numbers of socket(2) and socketpair(2)."""
    limits: int
    """Number of prlimit64(2)."""
    foreign: int | None = None
    """The smallest number of the calls of another data model, x32."""


ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        numbers=(101, 310, 311, 440, 438, 312, 298, 321, 323, 248, 249, 250, 425, 426, 427),
        sockets=(41, 53),
        limits=302,
        foreign=0x40000000,
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        numbers=(117, 270, 271, 440, 438, 272, 241, 280, 282, 217, 218, 219, 425, 426, 427),
        sockets=(198, 199),
        limits=261,
    ),
}

# offsets in `struct seccomp_data`
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
"""The kernel takes the low half of a family or process id, which comes first here."""
# operations of classic BPF: of 32 bits, with a constant
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
# answers
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_FAIL = 0x00050000 | errno.EPERM
_NO_FAMILY = 0x00050000 | errno.EAFNOSUPPORT


def seccomp_filter(machine: str = "") -> bytes:
    """Return the filter for an architecture, by default this machine's: an array of `struct
    sock_filter`.

    The calls in `DENIED` and those of x32 fail with EPERM, and sockets of other families than
    `FAMILIES` with EAFNOSUPPORT. A program has prlimit64 for itself alone: lower limits of a
    judge's process would make it fail. A program of another architecture, for instance of 32 bits,
    is killed at its first call: its calls have other numbers. Raises `InputError` for an
    architecture that is not known.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise InputError(
            f"the runtime sandbox knows the system calls of {' and '.join(ARCHITECTURES)}, and this"
            f" machine is {machine}: choose another --runtime"
        )
    architecture = ARCHITECTURES[machine]
    checks = [(_EQUAL, number) for number in architecture.numbers]
    if architecture.foreign is not None:
        checks.append((_AT_LEAST, architecture.foreign))
    socket, pair = architecture.sockets
    rest = [
        _instruction(_EQUAL, architecture.limits, 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_EQUAL, 0, 0, 1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _FAIL),
        _instruction(_EQUAL, socket, 1, 0),
        _instruction(_EQUAL, pair, 0, len(FAMILIES) + 2),
        _instruction(_LOAD, _FIRST_ARGUMENT),
    ]
    for place, family in enumerate(FAMILIES):
        rest.append(_instruction(_EQUAL, family, len(FAMILIES) - place, 0))
    rest += [_instruction(_RETURN, _NO_FAMILY), _instruction(_RETURN, _ALLOW)]
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture.audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    # each check jumps over those that follow it, and over the rest
    over = len(checks) + len(rest) - 1
    for code, value in checks:
        program.append(_instruction(code, value, over, 0))
        over -= 1
    return b"".join([*program, *rest, _instruction(_RETURN, _FAIL)])


def _instruction(
    code: int,
    value: int,
    if_true: int = 0,
    if_false: int = 0,
) -> bytes:
    """Return a `struct sock_filter`. Jumps count the instructions that are left out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


_NAMESPACES = frozenset(
    {"clone", "clone3", "unshare", "setns", "mount", "umount", "umount2", "pivot_root"}
)
"""Calls with which a program without rights makes namespaces, and in them has rights over parts of
the kernel."""
_CLONE_FLAGS = 0x7E020000
"""Flags of clone(2) that make namespaces."""
_SOCKETS = frozenset({"socket", "socketpair", "socketcall"})
"""Calls that make sockets. A filter sees no argument of the last, which programs of 32 bits have.
"""
_LIMITS = "prlimit64"
_ENOSYS = 38


def without_namespaces(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a profile without namespaces, `DENIED`, limits of other processes, and sockets beside
    `FAMILIES`.

    Podman's own profile allows it, Docker's does not. Processes and threads can be made as ever:
    clone3(2) hides its flags from a filter, so it is called unknown, and the C library takes
    clone(2).
    """
    ours = _NAMESPACES | _SOCKETS | {_LIMITS, *DENIED}
    rules = []
    for rule in profile.get("syscalls", []):
        names = [name for name in rule["names"] if name not in ours]
        if names:
            rules.append({**rule, "names": names})
    for family in FAMILIES:
        rules.append(_allowed(["socket", "socketpair"], "SCMP_CMP_EQ", family))
    rules.append(_allowed([_LIMITS], "SCMP_CMP_EQ", 0))
    rules.append(_allowed(["clone"], "SCMP_CMP_MASKED_EQ", _CLONE_FLAGS))
    rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS})
    return {**profile, "syscalls": rules}


def _allowed(names: list[str], operation: str, value: int) -> dict[str, Any]:
    """Return the rule that allows calls by their first argument."""
    argument = {
        "index": 0,
        "value": value,
        "valueTwo": 0,
        "op": operation,
    }
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": [argument]}
