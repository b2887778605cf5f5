import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges import folders
from rolltap.trainer.judges.changes import apply_changes, find_changes
from rolltap.trainer.judges.folders import TooMuchError, scan, stays_inside
from tests.deep import examples
from tests.trainer.judges.sessions import nest

NAMES = st.sampled_from(["a", "b", "c", "ü\n", "d e", "-rf", "\udcff"])
CONTENT = st.one_of(st.binary(max_size=4), st.just(b"line\n" * 3))


def one_level(below):
    return st.dictionaries(NAMES, below, max_size=3)


TREES = one_level(st.recursive(CONTENT, one_level, max_leaves=8))


def build(folder: Path, tree):
    folder.mkdir()
    for name, below in tree.items():
        path = Path(os.fsdecode(os.fsencode(folder / name)))
        if isinstance(below, dict):
            build(path, below)
        else:
            path.write_bytes(below)
            path.chmod(0o755 if len(below) % 2 else 0o644)


def trees(top: Path, start, workspace) -> tuple[Path, Path]:
    """Make a start and a workspace below `top`."""
    build(top / "start", start)
    build(top / "workspace", workspace)
    return top / "start", top / "workspace"


def modes_and_contents(folder: Path):
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder)] = (path.stat().st_mode, content)
    return found


@examples(60)
@given(TREES, TREES)
def test_changes_that_are_applied_to_the_start_make_the_workspace(before, after):
    with tempfile.TemporaryDirectory() as name:
        start, workspace = trees(Path(name), before, after)
        fresh = Path(name, "fresh")
        build(fresh, before)
        changes = find_changes(start, workspace)
        changes.diff.encode()
        apply_changes(changes, workspace, fresh)
        assert not find_changes(fresh, workspace)
        assert scan(fresh) == scan(workspace)
        assert bool(changes) == (modes_and_contents(start) != modes_and_contents(workspace))


def test_compiled_python_is_neither_a_change_nor_refused(tmp_path):
    compiled = {"__pycache__": {"a.cpython-311.pyc": b"code"}, "b.pyc": b"code"}
    changes = find_changes(*trees(tmp_path, {}, compiled))
    assert not changes
    assert changes.refused == {}


PARTS = [
    "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n\\ No newline at end of file\n",
    "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+new\n",
    "--- a/gone\n+++ /dev/null\n",
    "bytes: executable file of 1 bytes, SHA-256 6e34",
    "link: nothing -> link to 'same'\n",
    "same: file of 4 bytes",
]


def test_a_diff_shows_texts_modes_and_what_is_no_text(tmp_path):
    before = {"a.txt": b"one\ntwo\n", "gone": b"x", "bytes": b"\0", "same": b"same"}
    after = {"a.txt": b"one\n2", "new": b"new\n", "bytes": b"\0\1\2", "same": b"same"}
    start, workspace = trees(tmp_path, before, after)
    (start / "a.txt").chmod(0o644)
    for name in ("a.txt", "new", "bytes"):
        (workspace / name).chmod(0o644)
    (workspace / "same").chmod(0o755)
    (workspace / "link").symlink_to("same")
    changes = find_changes(start, workspace)
    assert [part for part in PARTS if part not in changes.diff] == []
    assert changes.evidence()["changed"] == ["a.txt", "bytes", "gone", "link", "new", "same"]


def test_a_large_diff_is_cut_off_and_still_names_all_changes_by_a_digest(tmp_path):
    many = {f"{number:03}": b"x" * 99 + b"\n" * 2000 for number in range(300)}
    start, workspace = trees(tmp_path, {}, many)
    digests = set()
    for end in "12":
        (workspace / "z").write_text(end)
        changes = find_changes(start, workspace)
        assert len(changes.diff) < (1 << 20) + 200
        assert "The diff is cut off here. SHA-256 of all changes:" in changes.diff
        digests.add(changes.evidence()["diff_sha256"])
    assert len(digests) == 2


@pytest.mark.parametrize(("target", "depth"), [("a", 0), ("a/b", 0), ("../a", 1), ("..", 1)])
def test_a_link_may_lead_to_what_is_in_the_workspace(target, depth):
    assert stays_inside(target, depth)


@pytest.mark.parametrize(
    ("target", "depth"),
    [
        ("../a", 0),
        ("../../a", 1),
        ("a/../b", 3),
        ("/etc", 3),
        ("", 0),
        (".git/config", 0),
        ("../.GIT", 1),
        ("..", 0),
    ],
)
def test_a_link_that_may_lead_out_of_the_workspace_does_not_stay_inside(target, depth):
    assert not stays_inside(target, depth)


def test_a_link_to_a_link_does_not_lead_out_when_it_is_applied(tmp_path):
    start, workspace = trees(tmp_path, {}, {"sub": {}})
    build(tmp_path / "fresh", {})
    (workspace / "sub/up").symlink_to("..")
    (workspace / "sub/out").symlink_to("up/../secret")
    (tmp_path / "secret").write_text("1.0")
    changes = find_changes(start, workspace)
    apply_changes(changes, workspace, tmp_path / "fresh")
    assert changes.refused == {"sub/out": "symlink"}
    assert (tmp_path / "fresh/sub/up").resolve() == tmp_path / "fresh"


def test_a_very_deep_folder_is_bounded(tmp_path):
    start, workspace = trees(tmp_path, {}, {})
    nest(workspace, 1200, "d" * 20)
    assert [*find_changes(start, workspace).refused.values()] == ["depth"]
    remove_folder(workspace)


def test_files_with_holes_are_too_much_before_one_is_read_and_time_is_bounded(
    tmp_path, monkeypatch
):
    names = [str(number) for number in range(9)]
    start, workspace = trees(tmp_path, dict.fromkeys(names[:4], b"1"), dict.fromkeys(names, b""))
    for name in names:
        os.truncate(workspace / name, 512 << 20)
    find_changes(start, start, digest="read")
    with pytest.raises(TooMuchError, match="took too long"):
        find_changes(start, start, seconds=-1)
    monkeypatch.setattr(folders, "file_digest", None)
    with pytest.raises(TooMuchError, match="changed more than 4 GiB"):
        find_changes(start, workspace, digest="read")


def test_a_start_is_read_once_for_all_that_is_compared_with_it(tmp_path):
    start, workspace = trees(tmp_path, {"same": b"1", "gone": b"2"}, {"same": b"1", "new": b"3"})
    changes = find_changes(start, workspace, digest="of this start")
    assert changes.files == ["gone", "new"]
    (start / "same").write_bytes(b"4")
    assert find_changes(start, workspace, digest="of this start") == changes
    assert find_changes(start, workspace, digest="of another").files == ["gone", "new", "same"]


def test_long_paths_are_refused_and_their_sum_is_bounded(tmp_path, monkeypatch):
    start, workspace = trees(tmp_path, {}, {})
    nest(workspace, 40, "d" * 250)
    changes = find_changes(start, workspace)
    assert [*changes.refused.values()] == ["depth"]
    assert max(map(len, changes.changed)) <= 4096
    assert len(json.dumps(changes.evidence())) < 2000
    monkeypatch.setattr(folders, "MAX_PATH_BYTES", 10_000)
    with pytest.raises(TooMuchError, match="the paths in the workspace"):
        find_changes(start, workspace)


NOT_ROOT = """
import os, sys
from pathlib import Path
from rolltap.trainer.judges.changes import apply_changes, find_changes
top = Path(sys.argv[1])
if os.getuid() == 0:
    os.chown(top, 65534, 65534)
    os.setgid(65534)
    os.setuid(65534)
for name in ("start", "fresh", "workspace"):
    (top / name / "d").mkdir(parents=True)
    (top / name / "d/old").write_text("1")
    (top / name / "d").chmod(0o555 if name != "workspace" else 0o755)
work = top / "workspace"
(work / "d/new").write_text("2")
(work / "d/old").unlink()
(work / "d/new").chmod(0)
(work / "d").chmod(int(sys.argv[2], 8))
work.chmod(int(sys.argv[2], 8))
changes = find_changes(top / "start", work)
assert changes.files == ["d/new", "d/old"] and not changes.refused, changes
assert (top / "start/d").stat().st_mode & 0o777 == 0o555
apply_changes(changes, work, top / "fresh")
assert [path.name for path in (top / "fresh/d").iterdir()] == ["new"]
"""


@pytest.mark.parametrize("mode", ["0", "0444", "0300"])
def test_an_agent_that_closes_its_folders_is_judged(mode):
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        subprocess.run([sys.executable, "-c", NOT_ROOT, top, mode], check=True)


def test_a_start_with_too_much_is_the_tasks_error(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MAX_ENTRIES", 2)
    build(tmp_path / "start", {"a": b"", "b": b"", "c": b""})
    with pytest.raises(InputError, match="the task's start"):
        find_changes(tmp_path / "start", tmp_path)


def test_a_folder_of_any_depth_gives_way_to_a_file(tmp_path):
    build(tmp_path / "workspace", {"a": {}})
    nest(tmp_path / "workspace/a", 1500)
    folders.write_file(tmp_path / "workspace", "a", [b"1"], executable=False)
    assert (tmp_path / "workspace/a").read_bytes() == b"1"


def test_a_file_that_changes_after_it_was_found_is_not_applied(tmp_path):
    start, workspace = trees(tmp_path, {}, {"a": b"1"})
    changes = find_changes(start, workspace)
    (workspace / "a").write_bytes(b"2")
    with pytest.raises(OSError, match="a was changed while it was copied"):
        apply_changes(changes, workspace, start)


def test_what_installing_packages_leaves_is_no_evidence(tmp_path):
    environment = {
        "pyvenv.cfg": b"home = /usr/bin\n",
        "share": {"doc": {"Makefile": b"", "conftest.py": b""}},
        "lib": {"site-packages": {"a.pth": b"", "b.dist-info": {"METADATA": b""}}},
    }
    package = {"PKG-INFO": b"", "top_level.txt": b"mine"}
    installed = {".venv": environment, "py311": environment, "mine.egg-info": package}
    start, workspace = trees(tmp_path, {}, installed)
    for name in (".venv", "py311"):
        (workspace / name / "python").symlink_to("/usr/bin/python3")
    evidence = find_changes(start, workspace).evidence()
    assert (evidence["planted_files"], evidence["odd_files"]) == (0, 0)
    build(workspace / "plugin.egg-info", {"entry_points.txt": b"[pytest11]"})
    build(workspace / "other", {"conftest.py": b""})
    assert find_changes(start, workspace).evidence()["planted_files"] == 2
