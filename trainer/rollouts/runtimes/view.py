"""The files that a sandbox sees, as arguments of bubblewrap (bwrap(1))."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rolltap.trainer.rollouts.runtimes.hiding import covered
from rolltap.trainer.rollouts.runtimes.runtime import Mount

_USER = 1000
"""User and group in the box. Not 0: programs that unpack files as root try to give them to other users."""
_ETC = {
    "passwd": f"agent:x:{_USER}:{_USER}::/home/agent:/bin/bash\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "group": f"agent:x:{_USER}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
    "hostname": "box\n",
}
"""Files of /etc that are the box's own."""
_SYSTEM_ETC = (
    *("alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version"),
    *("fonts", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "magic"),
    *("mime.types", "os-release", "pki/ca-trust", "pki/tls/certs", "profile", "protocols", "services", "shells"),
    *("ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone"),
)
"""Files and folders of /etc that programs need, as this machine has them. None holds a secret."""
_TMP_BYTES = 1 << 30
"""Size of /tmp and of /dev/shm, which are in memory, when memory has no limit. With one it is half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that programs in a sandbox see.

    /usr and what belongs to it, and tools are read-only; the workspace and the home folder can be written, and /tmp and
    /dev/shm, which are empty for each program. /proc has the box's own processes, /dev the harmless devices. There is
    no other network than the box's own loopback.

    Attributes:
        workspace: Folder of this machine that is `workdir` in the box.
        home: Folder of this machine that is `home_in_box` in the box.
        etc: Folder with the files that `write_etc` wrote.
        tools: Files, folders and symbolic links that are seen read-only under their own path.
        hidden: Files and folders that are empty in the box where a tool's folder contains them.
        mounts: Further files and folders.
        memory: Bytes that the box may use; None is no limit.
    """

    workspace: Path
    workdir: str
    home: Path
    home_in_box: str
    etc: Path
    tools: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    mounts: tuple[Mount, ...] = ()
    memory: int | None = None

    def with_tools(self, tools: Sequence[Path]) -> Self:
        """Return this view with further tools."""
        return dataclasses.replace(self, tools=tuple(dict.fromkeys([*self.tools, *tools])))

    def arguments(self, env: Mapping[str, str]) -> list[str]:
        """Return the options of bwrap, all but the command and what passes descriptors. `env` is the environment."""
        size = str(_TMP_BYTES if self.memory is None else max(self.memory // 2, 1 << 20))
        options = [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(_USER), "--gid", str(_USER)),
            *("--cap-drop", "ALL", "--new-session", "--die-with-parent", "--hostname", "box", "--clearenv"),
            *("--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--dir", "/run"),
            *("--dir", "/var", "--symlink", "../tmp", "/var/tmp", "--proc", "/proc", "--dev", "/dev"),
            *("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--ro-bind", "/usr", "/usr"),
        ]
        for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
            options += _same(Path(folder))
        for name in _SYSTEM_ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name in _ETC:
            options += ["--ro-bind", str(self.etc / name), f"/etc/{name}"]
        for tool in self._outermost():
            options += _same(tool)
        for path in covered(self.hidden, self.tools):
            options += _empty(path)
        options += ["--bind", str(self.home), self.home_in_box, "--bind", str(self.workspace), self.workdir]
        for mount in self.mounts:
            options += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
        # as root the box's user is the owner of /proc/sys, whose core_pattern names a program for root
        options += ["--remount-ro", "/proc", "--remount-ro", "/", "--chdir", self.workdir]
        for name, value in env.items():
            options += ["--setenv", name, value]
        return options

    def _outermost(self) -> list[Path]:
        """Return the tools that lie in no folder of another one, links last: they are made, not mounted."""
        folders = [tool for tool in self.tools if not tool.is_symlink()]
        outer = [tool for tool in self.tools if not any(tool != top and tool.is_relative_to(top) for top in folders)]
        return sorted(outer, key=lambda tool: tool.is_symlink())


def write_etc(folder: Path) -> Path:
    """Write the files of /etc that are the box's own into a folder, and return the folder."""
    for name, text in _ETC.items():
        (folder / name).write_text(text)
    return folder


def _same(path: Path) -> list[str]:
    """Return the options that show a file or folder read-only under its own path, and a link as a link."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind-try", str(path), str(path)]


def _empty(path: Path) -> list[str]:
    return ["--tmpfs", str(path), "--remount-ro", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
