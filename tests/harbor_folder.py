"""An environment of Harbor's for tests: a folder as the root of bubblewrap's boxes.

Harbor's Python loads it.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}


class FolderEnvironment(BaseEnvironment):
    """An environment in a folder of its name below `folder`, with this machine's network and
    processes.

    With `restricts` it says that it restricts the network, and `policy.json` has the policy. With
    `fails` it does not start, and says so. With `sends` each download is what this script of bash
    writes to the file `$1`; as with Harbor's Docker, it goes on when the download is cancelled.
    """

    def __init__(self, *args, folder, restricts=False, fails="", sends="", **kwargs):
        self._restricts = restricts
        self._fails = fails
        self._sends = sends
        super().__init__(*args, **kwargs)
        self._root = Path(folder) / self.session_id

    @staticmethod
    def type():
        return "folder"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(
            disable_internet=self._restricts,
            network_allowlist=self._restricts,
            network_allowlist_hostnames=self._restricts,
        )

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        if self._fails:
            raise RuntimeError(self._fails)
        self._root.mkdir()
        (self._root / "tmp").mkdir()
        for name, target in LINKS.items():
            (self._root / name).symlink_to(target)
        image = self.task_env_config.docker_image
        if image is None:  # of a Dockerfile: its first line is what the image has
            image = (self.environment_dir / "Dockerfile").read_text()
        (self._root / "start").mkdir()
        (self._root / "start" / "of-image.txt").write_text(image)
        policy = self.network_policy.model_dump(mode="json")
        (self._root / "policy.json").write_text(json.dumps(policy))

    async def stop(self, delete):
        with contextlib.suppress(FileNotFoundError):
            for group in (self._root / "groups").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(group), signal.SIGKILL)
        if delete:
            shutil.rmtree(self._root, ignore_errors=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        bind = ["--bind", str(self._root), "/", "--proc", "/proc", "--dev", "/dev"]
        process = await asyncio.create_subprocess_exec(
            "bwrap",
            "--die-with-parent",
            *bind,
            *("--ro-bind", "/usr", "/usr"),
            "bash",
            "-c",
            command,
            env={"PATH": "/usr/bin:/bin"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        with (self._root / "groups").open("a") as groups:
            groups.write(f"{process.pid}\n")
        output, _ = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=output.decode(), return_code=process.returncode)

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, self._root / target_path.lstrip("/"))

    async def download_file(self, source_path, target_path):
        if self._sends:
            command = ["bash", "-c", self._sends, "bash", target_path]
            process = await asyncio.create_subprocess_exec(*command)
            await process.communicate()
            return
        shutil.copy(self._root / source_path.lstrip("/"), target_path)

    async def upload_dir(self, source_dir, target_dir):
        raise NotImplementedError

    async def download_dir(self, source_dir, target_dir):
        raise NotImplementedError
