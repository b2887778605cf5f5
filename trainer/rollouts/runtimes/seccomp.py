"""The system calls of programs in containers."""

from typing import Any

from rolltap.trainer.rollouts.runtimes.seccomp_filter import DENIED

_NAMESPACES = frozenset({"clone", "clone3", "unshare", "setns", "mount", "umount", "umount2", "pivot_root"})
"""Calls with which a program without rights makes namespaces, and in them has rights over parts of the kernel."""
_CLONE_FLAGS = 0x7E020000
"""Flags of clone(2) that make namespaces."""
_ENOSYS = 38


def without_namespaces(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a profile of system calls that allows no program to make namespaces, and none of the calls in `DENIED`.

    Podman's own profile allows it, Docker's does not. Processes and threads can be made as ever: clone3(2) hides its
    flags from a filter, so it is called unknown, and the C library takes clone(2).
    """
    rules = [
        {**rule, "names": [name for name in rule["names"] if name not in _NAMESPACES and name not in DENIED]}
        for rule in profile.get("syscalls", [])
    ]
    no_flags = {"index": 0, "value": _CLONE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    rules += [
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [no_flags]},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
    ]
    return {**profile, "syscalls": [rule for rule in rules if rule["names"]]}
