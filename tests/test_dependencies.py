"""Packages that `pip` is asked for: bounds around tested versions, and extras with a solution."""

import os
import re
import subprocess
import tomllib

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import ROOT
from tests.readme.blocks import DOCUMENTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
INSTALLS = re.compile(r"""pip install([^\n]*?) ['"]\.\[([\w,-]+)\]['"]""")
"""An installation from a clone: its options, and the names of the extras."""


def requirement(extra: str, name: str) -> Requirement:
    """Return what an extra asks of a package."""
    for text in EXTRAS[extra]:
        found = Requirement(text)
        if found.name == name:
            return found
    raise LookupError(f"{extra} does not ask for {name}")


def next_minor(version: Version) -> str:
    return f"{version.major}.{version.minor + 1}.0"


def pinned() -> dict[str, Version]:
    """Return the versions of `constraints.txt` on this machine."""
    versions = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        asked = Requirement(line)
        if asked.marker is None or asked.marker.evaluate():
            (specifier,) = asked.specifier
            versions[canonicalize_name(asked.name)] = Version(specifier.version)
    return versions


def test_an_installed_vllm_is_of_a_version_that_the_suite_runs():
    script = (ROOT / "recipes" / "environments.sh").read_text()
    run = sorted(map(Version, re.findall(r"\bvllm(?:-cpu)?==([\d.]+)", script)))
    bound = requirement("vllm", "vllm").specifier
    assert str(bound) == f"<{next_minor(run[-1])[:-2]},>={run[0].major}.{run[0].minor}"


def test_a_newer_trl_than_the_tested_one_is_not_installed():
    bound = requirement("train", "trl").specifier
    assert bound.contains(pinned()["trl"])
    assert not bound.contains(next_minor(pinned()["trl"]))


def test_the_tested_versions_are_within_the_bounds():
    versions = pinned()
    environment = default_environment()
    for extra in (None, "record", "service", "train", "ray"):
        for text in PROJECT["dependencies"] if extra is None else EXTRAS[extra]:
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate(environment):
                assert asked.specifier.contains(versions[canonicalize_name(asked.name)]), text


TEXTS = [
    *DOCUMENTS,
    *sorted((ROOT / "addons").rglob("*.py")),
    *sorted((ROOT / "trainer").rglob("*.py")),
    *sorted((ROOT / "recipes").rglob("*.ipynb")),
    *sorted((ROOT / "recipes").rglob("*.sh")),
]
"""Files with commands that install rolltap: pages, messages, scripts."""


def installs() -> list[tuple[str, str]]:
    """Return the options and the extras that they install with, such as `record,service`."""
    return sorted({found for file in TEXTS for found in INSTALLS.findall(file.read_text())})


def test_pages_and_messages_install_extras_that_there_are_from_a_clone():
    found = installs()
    assert (" -c constraints.txt", "record,service,train") in found
    assert {("", "vllm"), ("", "train,kernels")} <= {*found}
    assert {extra for _, extras in found for extra in extras.split(",")} <= EXTRAS.keys()
    for file in TEXTS:
        assert not re.search(r"rolltap\[[a-z]+", file.read_text()), f"{file}: it is on no index"


@pytest.mark.deep
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(("options", "extras"), installs())
def test_every_set_of_extras_of_the_pages_has_a_solution_with_cuda(options, extras, python):
    uv = ROOT / ".venvs" / "uv" / "bin" / "uv"
    if not uv.exists():
        pytest.skip("there is no uv: recipes/environments.sh installs it")
    command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu"]
    command += options.split()
    for extra in extras.split(","):
        command += ["--extra", extra]
    # wheels of this machine may be CPU builds
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stderr
