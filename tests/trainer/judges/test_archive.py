"""Archives of what agents changed: they make the same changes again, and nothing that is written in
one leads out."""

import gzip
import json
import os
import tempfile
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


def restored(top, start):
    """Return what is different from the start after the archive `top/a` was applied to a copy of
    it, and the rest."""
    given = Start(start, "d")
    given.copy_to(top / "fresh")
    refused = restore_changes(top / "a", given, top / "fresh")
    return find_changes(start, top / "fresh"), refused


@examples(60)
@given(TREES, TREES)
def test_an_archive_of_changes_makes_the_same_changes_again(before, after):
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        start, workspace = trees(top, before, after)
        changes = find_changes(start, workspace)
        keep_changes(changes, Start(start, "d"), workspace, top / "a")
        assert restored(top, start) == (changes, {})


def test_links_modes_and_what_was_refused_are_kept_and_the_bytes_are_the_same_each_time(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("gzip.time", SimpleNamespace(time=count().__next__))
    start, workspace = trees(
        tmp_path, {"same": b"one", "gone": b"2"}, {"same": b"one", "sub": {}, "tool": b"x"}
    )
    (workspace / "sub/up").symlink_to("..")
    (workspace / "out").symlink_to("/etc/passwd")
    os.mkfifo(workspace / "pipe")
    changes = find_changes(start, workspace)
    for name in "ab":
        keep_changes(changes, Start(start, "d"), workspace, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found, refused = restored(tmp_path, start)
    assert refused == changes.refused == {"out": "symlink", "pipe": "fifo"}
    assert (found.changed, found.deleted) == (changes.changed, changes.deleted)
    assert os.access(tmp_path / "fresh/tool", os.X_OK)
    assert os.readlink(tmp_path / "fresh/sub/up") == ".."


@pytest.mark.parametrize(
    "after", [{"big": b"\0" * 999}, {str(number): b"" for number in range(99)}]
)
def test_changes_over_the_limit_are_not_kept(tmp_path, monkeypatch, after):
    monkeypatch.setattr(archive, "MAX_BYTES", 900)
    start, workspace = trees(tmp_path, {}, after)
    keep_changes(find_changes(start, workspace), Start(start, "d"), workspace, tmp_path / "a")
    with pytest.raises(
        InputError, match="the agent's changes were not kept: they take more than 0 MiB"
    ):
        restored(tmp_path, start)


FILE = ["file", False, "eA=="]
LEADS_OUT = [
    "../x",
    "/x",
    "a/../../x",
    "a//x",
    "./x",
    "",
    "a/",
    "a/..",
    "\0",
    "d/" * 200 + "x",
    "x" * 5000,
]
ATTACKS = {
    **{f"a file at {path[:9]!r}": {"changed": {path: FILE}} for path in LEADS_OUT},
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


@pytest.mark.parametrize("attack", cases(ATTACKS, 0, *range(len(LEADS_OUT), len(ATTACKS))))
def test_nothing_that_is_written_in_an_archive_changes_or_shows_what_is_outside(tmp_path, attack):
    start, _ = trees(tmp_path, {"mine": b"1"}, {})
    (start / "up").symlink_to("..")
    (tmp_path / "secret").write_text("1")
    kept = {"start": "d", "changed": {}, "deleted": [], "refused": {}, **ATTACKS[attack]}
    (tmp_path / "a").write_bytes(gzip.compress(json.dumps(kept).encode()))
    try:
        found, refused = restored(tmp_path, start)
    except (InputError, OSError, KeyError, ValueError):
        found, refused = find_changes(start, tmp_path / "fresh"), {}
    assert (tmp_path / "secret").read_text() == "1"
    assert {path.name for path in tmp_path.iterdir()} == {
        "a",
        "fresh",
        "secret",
        "start",
        "workspace",
    }
    assert not refused
    assert all(entry.kind == "file" or entry.kind == "folder" for entry in found.changed.values())
    assert not any(path.startswith(".git") for path in found.changed)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (gzip.compress(b"{}")[:-9], "is damaged"),
        (gzip.compress(b" " * 9000 + b"null"), "is damaged"),
        (gzip.compress(b"[" * 9000), "is damaged"),
        (
            gzip.compress(b'{"start": "e", "changed": {}, "deleted": [], "refused": {}}'),
            "starts with other files",
        ),
        (None, "there is no"),
    ],
    ids=["empty", "cut off", "too long", "nested", "another start", "none"],
)
def test_an_archive_that_does_not_fit_is_refused_and_changes_nothing(
    tmp_path, monkeypatch, content, words
):
    monkeypatch.setattr(archive, "MAX_BYTES", 9000)
    build(tmp_path / "start", {})
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=words):
        restored(tmp_path, tmp_path / "start")
    assert list((tmp_path / "fresh").iterdir()) == []
