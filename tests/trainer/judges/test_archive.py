"""Archives of what agents changed: they make the same changes again, and nothing that is written in
one leads out."""

import gzip
import json
import os
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given

from rolltap.addons.errors import InputError
from rolltap.trainer.judges import archive
from rolltap.trainer.judges.archive import keep_changes, restore_changes
from rolltap.trainer.judges.changes import find_changes
from rolltap.trainer.tasks.content import Start
from tests.deep import cases, examples
from tests.trainer.judges.test_changes import TREES, build, trees


def keep(top, name="a"):
    """Keep the changes from the start to the workspace, and return them."""
    changes = find_changes(top / "start", top / "workspace")
    keep_changes(changes, Start(top / "start", "d"), top / "workspace", top / name)
    return changes


def restored(top):
    """Return what is different from the start after the archive `a` was applied to a copy of it,
    and the rest."""
    start = Start(top / "start", "d")
    start.copy_to(top / "fresh")
    refused = restore_changes(top / "a", start, top / "fresh")
    return find_changes(start.folder, top / "fresh"), refused


@examples(60)
@given(TREES, TREES)
def test_an_archive_of_changes_makes_the_same_changes_again(before, after):
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        trees(top, before, after)
        changes = keep(top)
        assert restored(top) == (changes, {})


def test_links_modes_and_what_was_refused_are_kept_and_the_bytes_are_the_same_each_time(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("gzip.time", SimpleNamespace(time=count().__next__))
    _, workspace = trees(tmp_path, {"gone": b"2"}, {"sub": {}, "tool": b"x"})
    (workspace / "sub/up").symlink_to("..")
    (workspace / "out").symlink_to("/etc/passwd")
    os.mkfifo(workspace / "pipe")
    changes = keep(tmp_path, "b")
    keep(tmp_path)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found, refused = restored(tmp_path)
    assert refused == changes.refused == {"out": "symlink", "pipe": "fifo"}
    assert (found.changed, found.deleted) == (changes.changed, changes.deleted)
    assert os.access(tmp_path / "fresh/tool", os.X_OK)
    assert os.readlink(tmp_path / "fresh/sub/up") == ".."


@pytest.mark.parametrize(
    "after", [{"big": b"\0" * 999}, {str(number): b"" for number in range(99)}]
)
def test_changes_over_the_limit_are_not_kept(tmp_path, monkeypatch, after):
    monkeypatch.setattr(archive, "MAX_BYTES", 900)
    trees(tmp_path, {}, after)
    keep(tmp_path)
    message = "the agent's changes were not kept: they take more than 0 MiB"
    with pytest.raises(InputError, match=message):
        restored(tmp_path)


FILE = ["file", False, "eA=="]
LEADS_OUT = ["../x", "/x", "a/../../x", "a//x", "./x", "", "a/", "a/..", "\0"]
LEADS_OUT += ["d/" * 200 + "x", "x" * 5000]
ATTACKS = {
    "a deleted file outside": {"deleted": ["../secret"]},
    "a file deleted through a link of the start": {"deleted": ["up/secret"]},
    "a file through a link": {"changed": {"a": ["link", False, ".."], "a/secret": FILE}},
    "a file through a link of the start": {"changed": {"up/secret": FILE}},
    "a link out of the workspace": {"changed": {"a": ["link", False, "../secret"]}},
    "a device": {"changed": {"a": ["device", False, ""]}},
    "a link to nothing": {"changed": {"a": ["link", False, "\0"]}},
    "settings of git": {"changed": {".git/config": FILE}},
    "no base64": {"changed": {"a": ["file", False, "?"]}},
    "a list": {"changed": []},
    "a reason of its own": {"refused": {"a": "\x1b[2J"}},
}
for path in cases(LEADS_OUT):
    ATTACKS[f"a file at {path[:9]!r}"] = {"changed": {path: FILE}}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_is_written_in_an_archive_changes_or_shows_what_is_outside(tmp_path, attack):
    start, _ = trees(tmp_path, {"mine": b"1"}, {})
    (start / "up").symlink_to("..")
    (tmp_path / "secret").write_text("1")
    kept = {"start": "d", "changed": {}, "deleted": [], "refused": {}, **ATTACKS[attack]}
    (tmp_path / "a").write_bytes(gzip.compress(json.dumps(kept).encode()))
    refused = {}
    with suppress(InputError, OSError, KeyError, ValueError):
        _, refused = restored(tmp_path)
    assert not refused
    assert (tmp_path / "secret").read_text() == "1"
    assert {*os.listdir(tmp_path)} == {"a", "fresh", "secret", "start", "workspace"}
    found = find_changes(start, tmp_path / "fresh").changed
    assert {entry.kind for entry in found.values()} <= {"file", "folder"}
    assert not any(path.startswith(".git") for path in found)


UNFIT = {
    "empty": (b"", "is damaged"),
    "cut off": (gzip.compress(b"{}")[:-9], "is damaged"),
    "too long": (gzip.compress(b" " * 9000 + b"null"), "is damaged"),
    "nested": (gzip.compress(b"[" * 9000), "is damaged"),
    "another start": (
        gzip.compress(b'{"start": "e", "changed": {}, "deleted": [], "refused": {}}'),
        "starts with other files",
    ),
    "none": (None, "there is no"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_archive_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, monkeypatch, what):
    monkeypatch.setattr(archive, "MAX_BYTES", 9000)
    build(tmp_path / "start", {})
    content, words = UNFIT[what]
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=words):
        restored(tmp_path)
    assert os.listdir(tmp_path / "fresh") == []
