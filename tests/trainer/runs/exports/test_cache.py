"""`datasets` keeps what it loaded by the base name of a folder and its card: two exports must never
be one to it."""

import shutil

import pytest
from datasets import load_dataset, load_from_disk

import rolltap
from tests.trainer.runs.exports.recording import Recording, user, write

LOADERS = {
    "parquet": lambda folder: load_dataset(str(folder), "calls", split="train"),
    "messages": lambda folder: load_dataset(str(folder), split="train"),
    "atif": lambda folder: load_dataset(str(folder), split="train"),
    "traces": load_from_disk,
}


def exported(target, sessions, out, folder):
    """Export a run of as many sessions, each of one call, to `out`."""
    recordings = [Recording(f"s{number}") for number in range(sessions)]
    for recording in recordings:
        recording.ask(user("Go."))
    run = rolltap.open_run(write(folder / f"run{sessions}", *recordings))
    if target == "traces":
        run.traces().save(out, progress=False)
    else:
        run.export(target, out, progress=False)
    return out


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("target", LOADERS)
class TestTwoRunsAndOneCache:
    def test_folders_of_one_name_are_two_datasets(self, target, tmp_path):
        for sessions in (2, 5):
            (tmp_path / str(sessions)).mkdir()
            out = exported(target, sessions, tmp_path / str(sessions) / "tables", tmp_path)
            assert len(LOADERS[target](out)) == sessions

    def test_a_folder_that_is_exported_again_is_another_dataset(self, target, tmp_path):
        for sessions in (2, 5):
            shutil.rmtree(tmp_path / "tables", ignore_errors=True)
            assert (
                len(LOADERS[target](exported(target, sessions, tmp_path / "tables", tmp_path)))
                == sessions
            )


@pytest.mark.parametrize("target", ["parquet", "messages"])
def test_an_export_of_the_same_run_is_the_same_dataset(target, tmp_path):
    def names(folder):
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

    first = exported(target, 2, tmp_path / "a", tmp_path / "a-run")
    assert names(first) == names(exported(target, 2, tmp_path / "b", tmp_path / "b-run"))
