"""Images and root folders of containers: their digests, and copies of their folders."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.engine import call

_PULL_SECONDS = 3600.0


def is_root_folder(image: str) -> bool:
    """Return True when the image of a task is a root folder of this machine: an absolute path."""
    return image.startswith("/")


def image_id(engine: Sequence[str], image: str) -> str:
    """Return the digest of an image's configuration, which names its layers. An image that is not here is pulled.

    `engine` is the beginning of the engine's command line. Raises `InputError` when the image cannot be had.
    """
    inspect = [*engine, "image", "inspect", "--format", "{{.Id}}", image]
    try:
        try:
            identity = call(inspect)
        except OSError:
            call([*engine, "pull", "--quiet", image], timeout=_PULL_SECONDS)
            identity = call(inspect)
    except OSError as error:
        raise InputError(f"the image {image} is not here and cannot be pulled: {error}") from error
    return f"sha256:{identity.strip().removeprefix('sha256:')}"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def root_folder_digest(root: Path) -> str:
    """Return the SHA-256 of a root folder: of paths, modes, links and contents. Raises `InputError` without it."""
    if not root.is_dir():
        raise InputError(f"the image {root} is no folder of this machine; an image name does not begin with /")
    digest = hashlib.sha256()
    for entry in _entries(root):
        status = entry.stat(follow_symlinks=False)
        digest.update(f"{os.path.relpath(entry, root)}\0{status.st_mode:o}\0".encode(errors="surrogateescape"))
        if entry.is_symlink():
            digest.update(os.fsencode(os.readlink(entry)))
        elif stat.S_ISREG(status.st_mode):
            digest.update(file_digest(Path(entry)).encode())
    return f"sha256:{digest.hexdigest()}"


def _entries(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry)


def copy_from_root_folder(root: Path, workdir: str, dest: Path) -> None:
    """Copy what the folder `workdir` of a root folder holds into `dest`. Raises `InputError` without that folder."""
    source = (root / workdir.lstrip("/")).resolve()
    # a link to an absolute path leads to another folder here than in the container
    if not source.is_relative_to(root.resolve()) or not source.is_dir():
        raise InputError(f"the root folder {root} has no folder {workdir}")
    shutil.copytree(source, dest, symlinks=True, dirs_exist_ok=True)


def copy_from_image(engine: Sequence[str], image: str, workdir: str, dest: Path) -> None:
    """Copy what the folder `workdir` of an image holds into `dest`. Raises `InputError` without that folder."""
    image_id(engine, image)
    name = f"rolltap-copy-{secrets.token_hex(8)}"
    dest.mkdir(parents=True, exist_ok=True)
    try:
        call([*engine, "create", "--name", name, "--network", "none", "--pull", "never", image, "true"])
        call([*engine, "cp", f"{name}:{workdir.rstrip('/')}/.", str(dest)], timeout=_PULL_SECONDS)
    except OSError as error:
        raise InputError(f"the folder {workdir} of the image {image} cannot be copied: {error}") from error
    finally:
        call([*engine, "rm", "--force", "--volumes", name])
