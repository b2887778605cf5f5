"""A machine behind ssh, for tests: a real sshd for each connection, started by `ProxyCommand`.

It needs no port, no rights and no network. The machine is this one, with a temporary folder of its
own.
"""

import atexit
import getpass
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rolltap.trainer.boxes.choose import make_runtime

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class SshMachine:
    """A machine whose files are below `folder`. `through` is a command before sshd's, as of a slow
    line."""

    def __init__(self, folder: Path) -> None:
        if _SSHD is None:
            pytest.skip("sshd is not installed: apt-get install openssh-server")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # a socket's path in the folder of a test would be too long
        self.temporary = Path(tempfile.mkdtemp(prefix="ssh-", dir="/tmp"))
        atexit.register(shutil.rmtree, self.temporary, ignore_errors=True)
        self.through: list[str] = []
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd of root asks for it
        self.settings = [
            f"HostKey {folder}/host",
            f"AuthorizedKeysFile {folder}/user.pub",
            f"SetEnv TMPDIR={self.temporary}",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
        ]

    @property
    def arguments(self) -> list[str]:
        """Arguments of ssh(1) that lead to the machine."""
        config = self.folder / "sshd_config"
        config.write_text("\n".join([*self.settings, ""]))
        daemon = [*self.through, str(_SSHD), "-i", "-f", str(config), "-E", f"{self.folder}/log"]
        options = {
            "ProxyCommand": shlex.join(daemon),
            "UserKnownHostsFile": f"{self.folder}/known",
            "StrictHostKeyChecking": "accept-new",
            "IdentitiesOnly": "yes",
        }
        arguments = ["-F", "none", "-i", f"{self.folder}/user"]
        for name, value in options.items():
            arguments += ["-o", f"{name}={value}"]
        return arguments

    def runtime(self, kind: str = "sandbox", **settings):
        """Return a runtime whose boxes are on the machine."""
        return make_runtime("ssh", **self.keys(kind=kind, **settings))

    def keys(self, **settings):
        """Return the settings of a rollout in such boxes."""
        own = {"ssh": f"{getpass.getuser()}@machine", "ssh_python": sys.executable}
        own["ssh_kind"] = settings.pop("kind", "sandbox")
        return {**own, "ssh_arguments": self.arguments, **settings}

    def left(self) -> list[str]:
        """Return the names of what is in the machine's temporary folder."""
        return sorted(path.name for path in self.temporary.iterdir())
