"""The filter in an interpreter of its few instructions. `tests/security` runs programs under it."""

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

ALLOWED = 0x7FFF0000
KILLED = 0x80000000
FAILS = 0x00050000
DENIED_CALL = FAILS | errno.EPERM
X86 = 0xC000003E
ARM = 0xC00000B7


def answer(program, number, audit, argument=1):
    """Return what the kernel would: see networking/filter.rst of its documentation."""
    instructions = list(struct.iter_unpack("=HBBI", program))
    data = {0: number, 4: audit, 16: argument & 0xFFFFFFFF}
    place = value = 0
    while True:
        code, if_true, if_false, constant = instructions[place]
        place += 1
        match code:
            case 0x20:
                value = data[constant]
            case 0x15:
                place += if_true if value == constant else if_false
            case 0x35:
                place += if_true if value >= constant else if_false
            case 0x06:
                return constant


@pytest.fixture(params=ARCHITECTURES)
def machine(request):
    return ARCHITECTURES[request.param]


@pytest.fixture
def said(request, machine):
    """Return a function that returns what the machine's filter says to a call."""
    [name] = [name for name, each in ARCHITECTURES.items() if each is machine]
    program = seccomp_filter(name)
    return lambda number, argument=1: answer(program, number, machine.audit, argument)


def test_exactly_the_calls_of_the_table_fail(machine, said):
    failing = {number for number in range(1000) if said(number) == DENIED_CALL}
    assert failing == {*machine.numbers, machine.limits}
    assert len(failing) == len(DENIED) + 1
    assert {said(number) for number in range(1000) if number not in failing} == {ALLOWED}


def test_a_socket_has_one_of_a_few_families_whatever_the_high_half_of_the_argument_says(
    machine, said
):
    allowed = [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK]
    assert [*FAMILIES] == allowed
    for number in machine.sockets:
        for family in range(-1, 100):
            expected = ALLOWED if family in allowed else FAILS | errno.EAFNOSUPPORT
            assert said(number, family) == said(number, family | 1 << 32) == expected


def test_a_program_changes_its_own_limits_alone(machine, said):
    for own in (0, 1 << 32):
        assert said(machine.limits, own) == ALLOWED
    for other in (1, 7, -1):
        assert said(machine.limits, other) == DENIED_CALL


@pytest.mark.parametrize(
    ("name", "audit"), [("x86_64", 0x40000003), ("x86_64", ARM), ("aarch64", X86)]
)
def test_a_program_of_another_architecture_is_killed(name, audit):
    assert answer(seccomp_filter(name), 0, audit) == KILLED


@pytest.mark.parametrize("number", [0x40000000, 0x40000000 + 521, 0xFFFFFFFF])
def test_the_calls_of_x32_fail(number):
    assert answer(seccomp_filter("x86_64"), number, X86) == DENIED_CALL


def test_a_machine_that_is_not_known_is_named():
    with pytest.raises(InputError, match="this machine is riscv64"):
        seccomp_filter("riscv64")


def test_no_program_can_make_namespaces_or_sockets_of_other_families():
    rules = []
    for names in ("read clone unshare ptrace pidfd_getfd", "clone3 setns", "socket prlimit64"):
        rules.append({"names": names.split(), "action": "SCMP_ACT_ALLOW"})
    rules[2]["names"].append("socketcall")
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": rules}
    narrowed = without_namespaces(profile)
    assert narrowed["defaultAction"] == "SCMP_ACT_ERRNO"
    first, *sockets, limits, clone, clone3 = narrowed["syscalls"]
    assert first["names"] == ["read"]
    assert limits["names"] == ["prlimit64"]
    assert limits["args"][0]["value"] == 0
    assert clone["names"] == ["clone"]
    assert clone["args"][0]["value"] == 0x7E020000
    assert clone3["names"] == ["clone3"]
    assert clone3["action"] == "SCMP_ACT_ERRNO"
    assert clone3["errnoRet"] == 38
    for rule, family in zip(sockets, FAMILIES, strict=True):
        assert rule["names"] == ["socket", "socketpair"]
        assert rule["args"][0]["value"] == family
