import sysconfig
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath

import rolltap.addons
import rolltap.harnesses
import rolltap.trainer

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "trainer/public": "rolltap",
    "addons": "rolltap/addons",
    "recipes/harnesses": "rolltap/harnesses",
    "trainer": "rolltap/trainer",
}
"""Folder of the checkout -> folder of the wheel. A file belongs to the first one that it is in."""


def place(path):
    """Return where the wheel has a file of the checkout."""
    folder = next(folder for folder in FOLDERS if path.is_relative_to(ROOT / folder))
    return PurePosixPath(FOLDERS[folder], path.relative_to(ROOT / folder).as_posix())


def files_in(folder):
    """Return the files of a folder of the checkout, but for those that Python compiled."""
    paths = (ROOT / folder).rglob("*")
    return {path for path in paths if path.is_file() and path.suffix != ".pyc"}


def test_every_part_of_rolltap_is_the_installed_one():
    for module in (rolltap, rolltap.addons, rolltap.harnesses, rolltap.trainer):
        for path in module.__path__:
            assert Path(path).is_relative_to(sysconfig.get_path("purelib"))


def test_the_wheel_has_every_file_of_the_packages_once_and_no_other():
    sources = files_in("trainer/viewer/page") | files_in("recipes/harnesses/own-agent")
    for folder in ("addons", "recipes/harnesses", "trainer"):
        for path in files_in(folder):
            if path.suffix in (".py", ".toml", ".typed") or path.name == "dataset_card.md":
                sources.add(path)
    # not by name alone: an editable install left metadata in the checkout
    (wheel,) = distributions(name="rolltap", path=[Path(rolltap.__file__).parents[1]])
    installed = []
    for path in wheel.files:
        if path.parts[0] == "rolltap" and path.suffix != ".pyc":
            installed.append(PurePosixPath(path))
    assert sorted(installed) == sorted(map(place, sources))


def test_the_recorder_s_script_is_in_the_wheel():
    assert rolltap.Recorder.script() == Path(rolltap.__file__).parent / "addons" / "record.py"


def test_the_page_of_a_run_is_in_the_wheel():
    from rolltap.trainer.viewer.answers import page_files

    page = ROOT / "trainer" / "viewer" / "page"
    there = files_in("trainer/viewer/page")
    assert sorted(page_files()) == sorted(str(path.relative_to(page)) for path in there)


def test_the_presets_are_in_the_wheel():
    presets = sorted(path.stem for path in (ROOT / "recipes" / "harnesses").glob("*.toml"))
    assert rolltap.Harness.names() == presets
    assert all(rolltap.Harness.load(name).name for name in presets)
