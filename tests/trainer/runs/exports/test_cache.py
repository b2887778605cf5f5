"""`datasets` keeps what it loaded by the base name of a folder and its card: two exports must never
be one to it."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from datasets import load_dataset, load_from_disk

import rolltap
from tests.trainer.runs.exports.recording import Recording, user, write

TARGETS = ["parquet", "messages", "atif", "traces"]


def exported(target, sessions, out):
    """Export a run of as many sessions, each of one call, to the folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    recordings = [Recording(f"s{number}") for number in range(sessions)]
    for recording in recordings:
        recording.ask(user("Go."))
    with TemporaryDirectory() as folder:
        run = rolltap.open_run(write(Path(folder) / "run", *recordings))
        if target == "traces":
            run.traces().save(out, progress=False)
        else:
            run.export(target, out, progress=False)
    return out


def load(target, folder):
    if target == "traces":
        return load_from_disk(folder)
    return load_dataset(str(folder), "calls" if target == "parquet" else None, split="train")


@pytest.mark.parametrize("target", TARGETS)
def test_folders_of_one_name_and_a_folder_that_is_exported_again_are_each_a_dataset(
    target, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for sessions, folder in ((2, "a"), (5, "b"), (3, "a")):
        (tmp_path / folder).mkdir(exist_ok=True)
        out = exported(target, sessions, tmp_path / folder / "tables")
        assert len(load(target, out)) == sessions


@pytest.mark.parametrize("target", ["parquet", "messages"])
def test_an_export_of_the_same_run_is_the_same_dataset(target, tmp_path):
    def names(folder):
        return {str(path.relative_to(folder)) for path in folder.rglob("*")}

    first = exported(target, 2, tmp_path / "a")
    assert names(first) == names(exported(target, 2, tmp_path / "b"))
