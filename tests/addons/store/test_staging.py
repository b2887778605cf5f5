import errno
import os

import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.store.staging import new_folder, write_atomically


def test_the_folder_appears_only_when_it_is_complete(tmp_path):
    out = tmp_path / "deep" / "out"
    with new_folder(out) as folder:
        (folder / "file").write_text("all of it")
        assert not out.exists()
        assert folder.is_relative_to(out.parent)  # so both are on the same file system
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "file").read_text() == "all of it"


def test_an_empty_folder_is_taken_also_through_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("")
    assert (tmp_path / "disk" / "file").exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, BrokenPipeError])
def test_nothing_stays_when_the_block_fails_and_a_closed_pipe_is_no_error_of_the_folder(
    tmp_path, error
):
    def write_half():
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    with (
        pytest.raises(RunError, match="exists and is not an empty folder: choose a new one"),
        new_folder(tmp_path),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_that_appears_in_the_folder_meanwhile_is_not_overwritten(tmp_path):
    out = tmp_path / "out"

    def write():
        with new_folder(out):
            out.mkdir()
            (out / "mine").write_text("")

    with pytest.raises(RunError, match="could not be written"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_of_the_user(tmp_path):
    with (
        pytest.raises(RunError, match=r"out could not be written: .*No space left"),
        new_folder(tmp_path / "out"),
    ):
        full()


def test_a_folder_that_another_command_writes_is_refused(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("theirs")
        with (
            pytest.raises(RunError, match="another command is writing"),
            new_folder(tmp_path / "out"),
        ):
            pass
    assert (tmp_path / "out" / "file").read_text() == "theirs"


def test_files_of_a_killed_command_are_not_in_the_next_folder(tmp_path):
    (tmp_path / ".out.partial" / "run").mkdir(parents=True)
    (tmp_path / ".out.partial" / "run" / "half").write_text("")
    with new_folder(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_a_file_has_the_old_or_the_new_contents_and_no_temporary_file_stays(tmp_path, monkeypatch):
    for text in ("old", "new"):
        write_atomically(tmp_path / "file", text)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", text)]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "file", "newer")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "new")]
