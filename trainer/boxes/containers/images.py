"""Images of boxes and root folders: their digests, and copies of their folders."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.engine import call
from rolltap.trainer.tasks.content import content_digest

_PULL_SECONDS = 3600.0


def is_root_folder(image: str) -> bool:
    """Return True when the image of a task is a root folder of this machine: an absolute path."""
    return image.startswith("/")


def image_id(engine: Sequence[str], image: str) -> str:
    """Return the digest of an image's configuration, which names its layers. An image that is not
    here is pulled.

    `engine` is the beginning of the engine's command line. Raises `InputError` when the image
    cannot be had.
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


def path_digest(image: str) -> str:
    """Return the SHA-256 of an image that is a file or a root folder of this machine. Raises
    `InputError` without it."""
    path = Path(image)
    if not path.exists():
        raise InputError(
            f"the image {image} is no folder of this machine; an image name does not begin with /"
        )
    return f"sha256:{content_digest(path)}"


def copy_from_root_folder(root: Path, workdir: str, dest: Path) -> None:
    """Copy what the folder `workdir` of a root folder holds into `dest`. Raises `InputError`
    without that folder."""
    source = (root / workdir.lstrip("/")).resolve()
    # a link to an absolute path leads to another folder here than in the container
    if not source.is_relative_to(root.resolve()) or not source.is_dir():
        raise InputError(f"the root folder {root} has no folder {workdir}")
    shutil.copytree(source, dest, symlinks=True, dirs_exist_ok=True)


def copy_from_image(
    engine: Sequence[str],
    image: str,
    workdir: str,
    dest: Path,
) -> None:
    """Copy what the folder `workdir` of an image holds into `dest`. Raises `InputError` without
    that folder."""
    image_id(engine, image)
    name = f"rolltap-copy-{secrets.token_hex(8)}"
    options = ["--name", name, "--network", "none", "--pull", "never"]
    dest.mkdir(parents=True, exist_ok=True)
    try:
        call([*engine, "create", *options, image, "true"])
        call([*engine, "cp", f"{name}:{workdir.rstrip('/')}/.", str(dest)], timeout=_PULL_SECONDS)
    except OSError as error:
        raise InputError(
            f"the folder {workdir} of the image {image} cannot be copied: {error}"
        ) from error
    finally:
        call([*engine, "rm", "--force", "--volumes", name])
