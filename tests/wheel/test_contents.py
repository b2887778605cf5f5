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


def test_every_part_of_rolltap_is_the_installed_one():
    for module in (rolltap, rolltap.addons, rolltap.harnesses, rolltap.trainer):
        assert all(
            Path(path).is_relative_to(sysconfig.get_path("purelib")) for path in module.__path__
        )


def test_the_wheel_has_every_file_of_the_packages_once_and_no_other():
    tops = [ROOT / folder for folder in FOLDERS if folder != "trainer/public"]
    files = {path for top in tops for path in top.rglob("*")}
    sources = {
        path
        for path in files
        if path.suffix in (".py", ".toml", ".typed") or path.name == "dataset_card.md"
    }
    sources |= {
        path for path in (ROOT / "trainer" / "viewer" / "page").rglob("*") if path.is_file()
    }
    example = ROOT / "recipes" / "harnesses" / "own-agent"
    sources |= {path for path in example.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    # not by name alone: an editable install left metadata in the checkout
    (wheel,) = distributions(name="rolltap", path=[Path(rolltap.__file__).parents[1]])
    installed = [
        PurePosixPath(path)
        for path in wheel.files
        if path.parts[0] == "rolltap" and path.suffix != ".pyc"
    ]
    assert sorted(installed) == sorted(map(place, sources))


def test_the_recorder_s_script_is_in_the_wheel():
    assert rolltap.Recorder.script() == Path(rolltap.__file__).parent / "addons" / "record.py"


def test_the_page_of_a_run_is_in_the_wheel():
    from rolltap.trainer.viewer.answers import page_files

    page = ROOT / "trainer" / "viewer" / "page"
    assert sorted(page_files()) == sorted(
        str(path.relative_to(page)) for path in page.rglob("*") if path.is_file()
    )


def test_the_presets_are_in_the_wheel():
    presets = sorted(path.stem for path in (ROOT / "recipes" / "harnesses").glob("*.toml"))
    assert rolltap.Harness.names() == presets
    assert all(rolltap.Harness.load(name).name for name in presets)
