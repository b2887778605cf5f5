"""The filter as data, and in an interpreter of its few instructions. `tests/security` runs programs
under it."""

import errno
import socket
import struct

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside.seccomp_filter import (
    ARCHITECTURES,
    DENIED,
    FAMILIES,
    seccomp_filter,
    without_namespaces,
)

ALLOWED, KILLED, DENIED_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
X86, ARM = 0xC000003E, 0xC00000B7


def answer(program, number, audit, argument=1):
    """Return what the kernel would: see networking/filter.rst of its documentation."""
    instructions = list(struct.iter_unpack("=HBBI", program))
    place = value = 0
    while True:
        code, if_true, if_false, constant = instructions[place]
        place += 1
        match code:
            case 0x20:
                value = {0: number, 4: audit, 16: argument & 0xFFFFFFFF}[constant]
            case 0x15:
                place += if_true if value == constant else if_false
            case 0x35:
                place += if_true if value >= constant else if_false
            case 0x06:
                return constant


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_exactly_the_calls_of_the_table_fail(machine):
    architecture = ARCHITECTURES[machine]
    program = seccomp_filter(machine)
    failing = {
        number
        for number in range(1000)
        if answer(program, number, architecture.audit) == DENIED_CALL
    }
    assert failing == {*architecture.numbers, architecture.limits}
    assert len(failing) == len(DENIED) + 1
    assert all(
        answer(program, number, architecture.audit) == ALLOWED
        for number in range(1000)
        if number not in failing
    )


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_socket_has_one_of_a_few_families_whatever_the_high_half_of_the_argument_says(machine):
    architecture, program = ARCHITECTURES[machine], seccomp_filter(machine)
    assert [
        getattr(socket, name) for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK")
    ] == list(FAMILIES)
    for number in architecture.sockets:
        for high in (0, 1 << 32):
            made = {
                family: answer(program, number, architecture.audit, family | high)
                for family in range(-1, 100)
            }
            assert {family for family, said in made.items() if said == ALLOWED} == set(FAMILIES)
            assert set(made.values()) == {ALLOWED, 0x00050000 | errno.EAFNOSUPPORT}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_program_changes_its_own_limits_alone(machine):
    architecture, program = ARCHITECTURES[machine], seccomp_filter(machine)
    said = {
        pid: answer(program, architecture.limits, architecture.audit, pid)
        for pid in (0, 1 << 32, 1, 7, -1)
    }
    assert said == {0: ALLOWED, 1 << 32: ALLOWED, 1: DENIED_CALL, 7: DENIED_CALL, -1: DENIED_CALL}


@pytest.mark.parametrize(
    ("machine", "audit"), [("x86_64", 0x40000003), ("x86_64", ARM), ("aarch64", X86)]
)
def test_a_program_of_another_architecture_is_killed(machine, audit):
    assert answer(seccomp_filter(machine), 0, audit) == KILLED


@pytest.mark.parametrize("number", [0x40000000, 0x40000000 + 521, 0xFFFFFFFF])
def test_the_calls_of_x32_fail(number):
    assert answer(seccomp_filter("x86_64"), number, X86) == DENIED_CALL


def test_a_machine_that_is_not_known_is_named():
    with pytest.raises(InputError, match="this machine is riscv64"):
        seccomp_filter("riscv64")


def test_no_program_can_make_namespaces_or_sockets_of_other_families():
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            {
                "names": ["read", "clone", "unshare", "ptrace", "pidfd_getfd"],
                "action": "SCMP_ACT_ALLOW",
            },
            {"names": ["clone3", "setns"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["socket", "socketcall", "prlimit64"], "action": "SCMP_ACT_ALLOW"},
        ],
    }
    narrowed = without_namespaces(profile)
    first, *sockets, limits, clone, clone3 = narrowed["syscalls"]
    assert first["names"] == ["read"]
    assert (limits["names"], limits["args"][0]["value"]) == (["prlimit64"], 0)
    assert (clone["names"], clone["args"][0]["value"]) == (["clone"], 0x7E020000)
    assert (clone3["names"], clone3["action"], clone3["errnoRet"]) == (
        ["clone3"],
        "SCMP_ACT_ERRNO",
        38,
    )
    assert {tuple(rule["names"]) for rule in sockets} == {("socket", "socketpair")}
    assert [rule["args"][0]["value"] for rule in sockets] == list(FAMILIES)
    assert narrowed["defaultAction"] == "SCMP_ACT_ERRNO"
