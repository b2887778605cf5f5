"""Harbor for tests: its Python, and its Podman environment as it can run on this machine."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.boxes import NO_SANDBOX, copy_programs, imported, require_podman

PYTHON = Path(__file__).resolve().parents[1] / ".venvs" / "harbor" / "bin" / "python"
PROGRAMS = """
sh bash tar gzip grep cut sleep mkdir rm mv cp cat ls chmod head wc env id ln
"""


def require_harbor() -> None:
    """Skip a test where Harbor is not installed: `environment_harbor` of recipes/environments.sh
    makes it."""
    if not PYTHON.exists():
        pytest.skip("Harbor is not installed: see environment_harbor in recipes/environments.sh")


def folder_environment(folder: Path, **settings) -> dict:
    """Return an environment of the tests' own, `tests/harbor_folder.py`, with boxes that are
    below `folder`."""
    if NO_SANDBOX:
        pytest.skip(NO_SANDBOX)
    folder.mkdir(exist_ok=True)
    return {
        "import_path": "tests.harbor_folder:FolderEnvironment",
        "kwargs": {"folder": str(folder), **settings},
    }


def environment(folder: Path, network: str = "none") -> dict:
    """Return Harbor's Podman environment with a network of Podman's, and without waiting for
    `sleep infinity`."""
    overlay = folder / "overlay.yaml"
    main = f"network_mode: {network}\n    stop_grace_period: 0s"
    overlay.write_text(f"services:\n  main:\n    {main}\n")
    return {"type": "podman", "extra_docker_compose": [str(overlay)]}


@contextmanager
def podman_image(folder: Path) -> Iterator[str]:
    """Yield the name of an image that has what an environment needs."""
    require_podman()
    root = folder / "root"
    copy_programs(root, *PROGRAMS.split())
    (root / "tmp").mkdir()
    (root / "etc").mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "start").mkdir()
    (root / "start" / "of-image.txt").write_text("of the image\n")
    with imported(root, ["podman"], "ENV PATH=/programs:/bin") as name:
        yield name


def limits_of_podman(folder: Path) -> Path:
    """Write and return a file for CONTAINERS_CONF: not every root may raise limits, which Podman
    does."""
    file = folder / "containers.conf"
    file.write_text(
        '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
    )
    return file


def projects(prefix: str) -> list[str]:
    """Return the names of Podman's containers that begin with a prefix."""
    command = ["podman", "ps", "--all", "--format", "{{.Names}}", "--filter", f"name={prefix}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
