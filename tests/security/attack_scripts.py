"""Programs that try to leave a box, for every runtime that isolates: plain sh and Python, with what
is in `World.env`.

They are harmless where nothing holds them: what they use up is bounded, and they change no file of
the machine.
"""

import shlex

from rolltap.trainer.tasks.task import Limits


def python(code: str) -> str:
    return f"python3 -c {shlex.quote(code)}"


CONNECT = """
import os, socket, sys
def look(family, address):
    with socket.socket(family) as s:
        s.settimeout(2)
        try:
            s.connect(address); s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n"); print(s.recv(1000))
        except OSError as error:
            print(address, error)
"""
"""A function that prints what a server sends."""


def connect(code: str) -> str:
    return python(CONNECT + code)


READ = {
    "files by their path": 'for f in $FILES; do cat "$f"; done',
    "files from the folders above": (
        'while [ "$PWD" != / ]; do cd ..; done; for f in $FILES; do cat ./$f; done'
    ),
    "files by the root of each process": 'for f in $FILES; do cat /proc/[0-9]*/root"$f"; done',
    "files by the folder of each process": (
        'for d in /proc/[0-9]*/cwd; do cat "$d"/canary* "$d"/*/canary*; done'
    ),
    "files by open descriptors": (
        "for f in /proc/[0-9]*/fd/*; do test -f $f && head -c 200 $f; done"
    ),
    "files by a symbolic link": (
        'n=0; for f in $FILES; do n=$((n+1)); ln -s "$f" link$n; cat link$n; done'
    ),
    "files by a hard link": 'n=0; for f in $FILES; do n=$((n+1)); ln "$f" link$n; cat link$n; done',
    "files by their name": (
        "find / -path /usr -prune -o -path /proc -prune -o -name 'canary*' -exec cat {} +"
    ),
    "files by mounting": (
        "mkdir m; for f in $FILES; do mount --bind $(dirname $f) m && cat m/canary* && umount m;"
        " done"
    ),
    "a namespace of another process": "for p in 1 $PID; do nsenter -t $p -m cat $FILES; done",
    "the environment of another process": (
        "cat /proc/[0-9]*/environ /proc/$PID/environ | tr '\\0' '\\n'"
    ),
    "the command line of another process": (
        "cat /proc/[0-9]*/cmdline /proc/$PID/cmdline | tr '\\0' '\\n'"
    ),
    "the disk's device": (
        "for d in /dev/vda /dev/sda /dev/nvme0n1; do head -c 100 $d && echo ESCAPED; done; "
        "mknod disk b 254 0 && head -c 100 disk && echo ESCAPED"
    ),
    "a user namespace of its own": (
        "unshare -Ur true && echo ESCAPED; unshare -Urm true && echo ESCAPED"
    ),
}
REACH = {
    "another port of the machine's loopback": connect("""
for name in ("127.0.0.1", "127.1.2.3", "0.0.0.0", "localhost"):
    look(socket.AF_INET, (name, int(os.environ["LOOPBACK_PORT"])))
"""),
    "the machine by its address": connect("""
look(socket.AF_INET, (os.environ["HOST_ADDRESS"], int(os.environ["HOST_PORT"])))
look(socket.AF_INET, ("10.0.2.2", int(os.environ["HOST_PORT"])))
"""),
    "any host": connect("""
for name in ("1.1.1.1", "169.254.169.254", "192.168.0.1"):
    with socket.socket() as s:
        s.settimeout(2)
        try:
            s.connect((name, 80)); print("ESCAPED")
        except OSError as error:
            print(error)
"""),
    "a name server": python("""
import os, socket
with socket.socket(type=socket.SOCK_DGRAM) as s:
    for address in (("8.8.8.8", 53), ("127.0.0.53", 53), (os.environ["HOST_ADDRESS"], int(os.environ["HOST_PORT"]))):
        try:
            s.sendto(b"question", address); print("sent", address)
        except OSError as error:
            print(error)
try:
    print("ESCAPED", socket.getaddrinfo("pypi.org", 443))
except OSError as error:
    print(error)
"""),
    "an abstract Unix socket": connect('look(socket.AF_UNIX, "\\0" + os.environ["ABSTRACT"])'),
    "a Unix socket by its path": connect("""
for path in (os.environ["SOCKET"], "/proc/1/root" + os.environ["SOCKET"], "/run/docker.sock"):
    look(socket.AF_UNIX, path)
"""),
    "the network of another process": (
        "nsenter -t 1 -n true && test $(readlink /proc/1/ns/net) != "
        "$(readlink /proc/self/ns/net) && echo ESCAPED; nsenter -t $PID -n true && echo ESCAPED"
    ),
    "an interface of its own": (
        "ip link add d type dummy && echo ESCAPED; ip addr add 10.1.1.1 dev lo && echo ESCAPED"
    ),
    "a socket of another family": python("""
import ctypes, os, socket
libc = ctypes.CDLL(None)
call, pair = {"x86_64": (41, 53), "aarch64": (198, 199)}[os.uname().machine]
families = [family for family in range(64) if family not in (1, 2, 10, 16)]
for family in [*families, *(family | 1 << 32 for family in families)]:
    for kind in (1, 2, 3, 5):
        for protocol in (0, 1, 3):
            if libc.syscall(call, ctypes.c_long(family), kind, protocol) >= 0: print("ESCAPED", family, kind)
        if libc.syscall(pair, ctypes.c_long(family), kind, 0, (ctypes.c_int * 2)()) >= 0: print("ESCAPED", family)
if libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0: print("ESCAPED by io_uring")
"""),
    "a raw socket": python(
        "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('ESCAPED')"
    ),
}
DISTURB = {
    "the kernel's settings": (
        "find /proc /sys -maxdepth 6 -type f -writable 2> /dev/null | grep -v '^/proc/[0-9]' | grep"
        " -v -e /self/ -e /thread-self/ | while read -r f; do test -f $f && ( : >> $f ) && echo"
        " ESCAPED $f; done"
    ),
    "the name of the program for core dumps": (
        "( : >> /proc/sys/kernel/core_pattern ) && echo ESCAPED"
    ),
    "a trigger of the kernel": (
        "( : >> /proc/sysrq-trigger ) && echo ESCAPED; ( : >> /proc/mtrr ) && echo ESCAPED"
    ),
    "the system's files": (
        "for d in $SYSTEM; do touch $d/canary && echo ESCAPED && rm $d/canary; done; "
        "test -w /usr/bin/env && echo ESCAPED; mount -o remount,rw /usr && echo ESCAPED"
    ),
    "another process": "kill -9 $PID && echo ESCAPED",
    "the terminal": (
        "( echo hello > /dev/tty ) && echo ESCAPED; "
        "test -c /dev/console && ( echo hello > /dev/console ) && echo ESCAPED"
    ),
    "the priority of all": "nice -n -5 true 2>&1 | grep -q cannot || echo ESCAPED",
    "a program with more rights": (
        "cp /bin/sh shell; chmod u+s,g+s shell; ./shell -p -c 'head -c 1 /etc/shadow' && echo"
        " ESCAPED; su -c true && echo ESCAPED; sudo -n true && echo ESCAPED"
    ),
    "the first process of its box": python("""
import ctypes, os
libc = ctypes.CDLL(None)
MACHINE = {"x86_64": (101, 310, 311), "aarch64": (117, 270, 271)}[os.uname().machine]
def call(name, *arguments):
    if libc.syscall(*arguments) >= 0: print("ESCAPED by", name)
ptrace, read, write = MACHINE
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
call("ptrace", ptrace, 0x4206, 1, 0, 0)
for number, name in ((read, "process_vm_readv"), (write, "process_vm_writev")):
    call(name, number, 1, vector, 0, vector, 0, 0)
for descriptor in range(10):
    call("pidfd_getfd", 438, os.pidfd_open(1), descriptor, 0)
for name in ("/proc/1/mem", "/proc/1/task/1/mem"):
    try:
        with open(name, "r+b", buffering=0) as memory:
            memory.seek(int(open("/proc/1/syscall").read().split()[-1], 16))
            if memory.read(1): print("ESCAPED by", name)
    except OSError as error:
        print(error)
"""),
    "the memory of another process": (
        "head -c 10 /dev/mem && echo ESCAPED; head -c 10 /proc/kcore && echo ESCAPED; head -c 10"
        " /proc/kmsg && echo ESCAPED; sh -c '( exec 3<> /proc/$PPID/mem ) && echo ESCAPED; true'"
    ),
}
SURVIVE = {
    "in a session of its own": "setsid sleep $MARKER &",
    "by a double fork": "(setsid sh -c '(setsid sleep $MARKER &)' &)",
    "with signals ignored": (
        "(trap '' HUP INT TERM; setsid nohup sh -c 'sleep $MARKER; sleep $MARKER' &)"
    ),
    "as a server": python("""
import os, socket
s = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", os.environ["MARKER"]])
    os._exit(0)
"""),
    "by forking on and on": python("""
import os, time
for generation in range(300):
    if os.fork():
        os._exit(0)
    os.setsid()
os.execvp("sleep", ["sleep", os.environ["MARKER"]])
"""),
}
KINDS = {"read": READ, "reach": REACH, "disturb": DISTURB, "survive": SURVIVE}
ATTACKS = {
    f"{what} {name}": script for what, scripts in KINDS.items() for name, script in scripts.items()
}
"""Name and script of each attack. It is held when `World.escaped` returns nothing and
`World.visits` stays empty."""

HARMFUL = {f"read {name}" for name in READ} | {f"reach {name}" for name in REACH}
HARMFUL -= {
    *("read files by mounting", "read a namespace of another process", "read the disk's device"),
    *("read a user namespace of its own", "reach any host", "reach the network of another process"),
    *("reach an interface of its own", "reach a raw socket", "reach a socket of another family"),
}
"""Attacks that are held by nothing where nothing isolates, whatever the user's rights, and that
change nothing."""

WORKS = {
    "a server on its own loopback": python("""
import socket, threading
with socket.create_server(("127.0.0.1", 0)) as server:
    threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"), daemon=True).start()
    with socket.create_connection(("localhost", server.getsockname()[1])) as client:
        assert client.recv(10) == b"hello"
"""),
    "writing into workspace, home and /tmp": (
        "pwd > here && pwd > ~/there && pwd > /tmp/file && pwd > /dev/shm/file"
    ),
    "git": (
        "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m"
        " first && git log"
    ),
    "unpacking what another user packed": (
        "mkdir d && tar -c --owner=4321 --group=4321 d > t.tar && tar -xf t.tar"
    ),
    "a terminal of its own": python(
        "import os, pty; assert pty.spawn(['sh', '-c', 'test -t 0']) == 0"
    ),
    "a name of its own": 'test -n "$(id -un)" && test -d "$HOME" && test "$(cd; pwd)" = "$HOME"',
}
"""Name and script of what must go on working: status 0."""


LIMITS = {
    "memory": Limits(memory_gib=0.125),
    "disk": Limits(disk_gib=0.0625),
    "processes": Limits(processes=40),
}
_STAY = "sleep 600"
_FILLS = {
    "memory": {
        "fill memory": python("import time; x = bytearray(1 << 28); time.sleep(600)"),
        "fill memory of many": python(
            # ends by itself where the kernel kills one of them before anybody polls
            "import os, sys, time\nif all(os.fork() for _ in range(7)): sys.exit(os.wait()[1] !="
            " 0)\nx = bytearray(30 << 20); time.sleep(600)"
        ),
        "fill files in memory without a name": python("""
import os, time
f = os.memfd_create("x")
for _ in range(200): os.write(f, bytes(1 << 20))
time.sleep(600)
"""),
    },
    "disk": {
        "fill disk": f"head -c 100M /dev/zero | split -b 1M - part; {_STAY}",
        "fill disk in the home folder": f"cd; head -c 100M /dev/zero | split -b 1M - part; {_STAY}",
        "fill disk by deleted files": python("""
import os, time
files = []
for name in range(3):
    files.append(open("f", "wb")); os.unlink("f"); files[-1].write(bytes(30 << 20)); files[-1].flush()
time.sleep(600)
"""),
        "fill disk by deep folders": python("""
import os, time
for _ in range(1500): os.mkdir("d" * 20); os.chdir("d" * 20)
for name in range(80): open(str(name), "wb").write(bytes(1 << 20))
time.sleep(600)
"""),
        "fill the log": f"yes | head -c 60M; yes | head -c 60M; {_STAY}",
    },
    "processes": {
        "fill processes": f"for i in $(seq 100); do sleep 600 & done; {_STAY}",
        "fill threads": python("""
import threading, time
for _ in range(100): threading.Thread(target=time.sleep, args=[600], daemon=True).start()
time.sleep(600)
"""),
    },
}
"""Why a box is stopped -> name and script of what fills it. Bounded: this machine survives when
nothing holds them."""
FILLS = {name: stopped for stopped, scripts in _FILLS.items() for name in scripts}
"""Name of each script that uses something up, and why its box is stopped."""

SCRIPTS = {
    **{name: (script, Limits()) for name, script in {**ATTACKS, **WORKS}.items()},
    **{
        name: (script, LIMITS[stopped])
        for stopped, scripts in _FILLS.items()
        for name, script in scripts.items()
    },
}
"""Name, script and limits of all that runs in a box."""
ONE_OF_EACH = [
    *(f"{what} {next(iter(scripts))}" for what, scripts in KINDS.items() if what != "reach"),
    *(
        "reach the machine by its address",
        "reach any host",
        "reach a socket of another family",
        "git",
    ),
    *("fill memory", "fill disk by deleted files", "fill the log", "fill threads"),
]
"""Names of one of each kind, for a runtime whose boxes take long."""
