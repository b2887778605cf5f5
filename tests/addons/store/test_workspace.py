"""The digest of a workspace: equal for equal files whatever their times, another for whatever a program changes."""

import os
import shutil

import pytest

from rolltap.addons.store.workspace import WorkspaceDigest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "workspace"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.py").write_text("a = 1\n")
    (folder / "notes.txt").write_text("Notes.\n")
    (folder / "link").symlink_to("notes.txt")
    return folder


CHANGES = {
    "other content of the same length and time": lambda folder: rewrite(folder / "src" / "a.py", "a = 2\n"),
    "a new file": lambda folder: (folder / "src" / "b.py").touch(),
    "a file that is gone": lambda folder: (folder / "notes.txt").unlink(),
    "a new empty folder": lambda folder: (folder / "made").mkdir(),
    "another target of a link": lambda folder: ((folder / "link").unlink(), (folder / "link").symlink_to("src")),
    "a file that can be run": lambda folder: (folder / "src" / "a.py").chmod(0o755),
    "another name": lambda folder: (folder / "notes.txt").rename(folder / "note.txt"),
    "a pipe in place of a file": lambda folder: ((folder / "notes.txt").unlink(), os.mkfifo(folder / "notes.txt")),
}


def rewrite(path, text):
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_a_program_changes_gives_another_digest(folder, change):
    digest = WorkspaceDigest(folder)
    before = digest.read()
    assert before == digest.read() == WorkspaceDigest(folder).read()
    change(folder)
    assert before != digest.read() == WorkspaceDigest(folder).read()


def test_equal_files_elsewhere_at_another_time_have_the_digest(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    os.utime(copy / "notes.txt", (1, 1))
    for name in (".git", "src/__pycache__"):  # times are in their files
        (copy / name).mkdir()
        (copy / name / "index").write_text("of now")
    assert WorkspaceDigest(copy).read() == WorkspaceDigest(folder).read()


def test_a_folder_that_is_gone_or_has_too_many_files_has_no_digest(folder, monkeypatch):
    assert WorkspaceDigest(folder / "none").read() is None
    monkeypatch.setattr("rolltap.addons.store.workspace._MAX_FILES", 3)
    assert WorkspaceDigest(folder).read() is None
