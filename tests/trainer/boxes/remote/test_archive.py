import io
import os
import stat
import subprocess
import sys
import tarfile

import pytest

from rolltap.trainer.boxes.remote import archive
from rolltap.trainer.boxes.remote.archive import (
    delete,
    pack,
    pack_changes,
    stamps,
    take_changes,
    unpack,
    write_pipe,
)
from rolltap.trainer.folders import scratch_folder
from tests.trainer.judges.sessions import nest

ROOM = 1 << 30


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "run.sh").write_text("echo\n")
    (folder / "src" / "run.sh").chmod(0o755)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    (folder / os.fsdecode(b"caf\xe9")).write_bytes(b"\0\1")
    return folder


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


@pytest.fixture
def arrives(target):
    """Return a function that tells if a stream of bytes arrives as a whole."""

    def arrives(sent, room=ROOM):
        return unpack(io.BytesIO(sent), target, room)

    return arrives


def packed(**parts):
    """Return an archive of folders by their names; that of `here` has none."""
    if "here" in parts:
        parts = {".": parts["here"]}
    file = io.BytesIO()
    pack(file, parts)
    return file.getvalue()


def changes(folder, before, room=ROOM):
    """Return an archive of what has changed in a folder since, and what is gone."""
    file = io.BytesIO()
    gone = pack_changes(file, folder, before, room)
    return file.getvalue(), gone


def names(sent):
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        return tar.getnames()


def tar_of(*members, **fields):
    """Return an archive of members of one byte, and then of one with fields of its `TarInfo`."""
    file = io.BytesIO()
    all_fields = [{"name": name, "size": 1} for name in members]
    with tarfile.open(fileobj=file, mode="w") as tar:
        for each in [*all_fields, fields] if fields else all_fields:
            member = tarfile.TarInfo()
            for field, value in each.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return file.getvalue()


def content(folder):
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            read = os.readlink(path)
        elif path.is_dir():
            read = None
        else:
            read = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        found[path.relative_to(folder)] = read
    return found


def test_a_folder_arrives_with_its_modes_links_and_names(source, target, arrives):
    os.mkfifo(source / "pipe")
    assert arrives(packed(here=source))
    os.unlink(source / "pipe")  # it stays where it is
    assert content(target) == content(source)
    arrived = (target / "src" / "run.sh").stat().st_mtime
    assert arrived == pytest.approx((source / "src" / "run.sh").stat().st_mtime)


def test_parts_have_names_of_their_own_and_a_file_is_one(source, target, arrives):
    script = source.parent / "to the script"
    script.symlink_to(source / "src" / "run.sh")
    assert arrives(packed(**{"workspace": source / "src", "/etc/rolltap/run": script}))
    for name in ("workspace/run.sh", "etc/rolltap/run"):
        assert (target / name).read_text() == "echo\n"


def test_only_changes_are_packed_and_what_is_gone_is_told(source, target, arrives):
    assert arrives(packed(here=source))
    untouched = stamps(target)["src/run.sh"]
    before = stamps(source)
    (source / "src" / "new").write_text("new")
    (source / "link").unlink()
    (source / "empty").rmdir()
    (source / "empty").write_text("a file now")
    sent, gone = changes(source, before)
    assert names(sent) == ["empty", "src/new"]
    assert gone == ["link"]
    delete(target, gone)
    assert arrives(sent)
    assert content(target) == content(source)
    assert stamps(target)["src/run.sh"] == untouched  # a read changes the time of access alone


def test_a_file_that_was_written_with_its_old_size_and_time_is_a_change(source):
    before = stamps(source)
    script = source / "src" / "run.sh"
    status = script.stat()
    script.write_text("exit\n")
    os.utime(script, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert names(changes(source, before)[0]) == ["src/run.sh"]


def test_a_file_and_a_folder_that_were_closed_to_their_owner_come_too(source, target, arrives):
    (source / "src" / "run.sh").chmod(0)
    (source / "src").chmod(0)
    assert arrives(packed(here=source))
    assert (target / "src" / "run.sh").read_text() == "echo\n"


def test_too_many_bytes_or_files_are_no_archive(source, monkeypatch):
    (source / "large").write_bytes(bytes(100_000))
    with pytest.raises(archive.TooMuchError):
        changes(source, {}, 50_000)
    monkeypatch.setattr(archive, "MAX_ENTRIES", 3)
    with pytest.raises(archive.TooMuchError):
        stamps(source)


def test_of_a_folder_that_is_nested_a_thousand_times_the_first_ones_are_taken(target, arrives):
    with scratch_folder() as here:  # pytest could not remove it
        nest(here, 1200)
        (here / "file").write_text("there")
        before = stamps(here)
        assert 100 < len(before) < 200
        assert arrives(packed(here=here))
    assert stamps(target).keys() == before.keys()
    assert arrives(tar_of("a/" * 1000 + "file", "d"))
    assert (target / "d").read_text() == "x"
    assert not (target / "a").exists()


def test_a_folder_that_is_nested_beyond_any_path_ends_somewhere():
    with scratch_folder() as folder:
        nest(folder, 1500, "deeper")
        assert 100 < len(stamps(folder)) < 1000


LINK = tarfile.SYMTYPE
HOSTILE = [
    {"name": "../out", "size": 1},
    {"name": "/out", "size": 1},
    {"name": "inside/../../out", "size": 1},
    {"name": "device", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
    {"name": "pipe", "type": tarfile.FIFOTYPE},
    {"name": "hard", "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
    {"name": "link", "type": LINK, "linkname": ""},
    {"name": "link", "type": LINK, "pax_headers": {"linkpath": "a\0b"}},
    {"name": "link", "type": LINK, "linkname": "a" * 5000},
    {"name": "a" * 300, "size": 1},
]


@pytest.mark.parametrize("member", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_member_is_left_out_and_the_others_are_written(target, arrives, member):
    assert not arrives(tar_of("good", **member))
    assert list(target.parent.rglob("*")) == [target, target / "good"]


@pytest.mark.parametrize("mtime", ["nan", "inf", "1e300"])
def test_a_time_that_is_none_does_not_arrive(target, arrives, mtime):
    assert arrives(tar_of(name="file", size=1, pax_headers={"mtime": mtime}))
    assert (target / "file").read_text() == "x"


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1000000"}


@pytest.mark.parametrize(
    "headers",
    [
        {"size": "-1"},
        {"GNU.sparse.size": "-1000000"},
        {"GNU.sparse.size": "none"},
        {"GNU.sparse.map": "0,1"},
        {"GNU.sparse.map": "none"},
        SPARSE,
    ],
)
def test_a_size_that_is_none_is_damage(target, arrives, headers):
    hostile = tar_of(name="hostile", size=1, pax_headers=headers)
    end = hostile.rstrip(b"\0")
    hostile = hostile[: -(-len(end) // 512) * 512]
    assert not arrives(hostile + tar_of(name="large", size=100_000), 50_000)
    assert not (target / "large").exists()


def test_an_archive_that_is_damaged_cut_off_or_too_large_is_not_whole(source, target, arrives):
    damaged = bytearray(tar_of("one", "two"))
    damaged[1024] += 1  # the name of the second one
    assert not arrives(damaged)
    assert not arrives(tar_of("one")[:1024])
    assert not arrives(packed(here=source)[:700])
    assert not arrives(tar_of(name="large", size=100_000), 50_000)
    assert not (target / "large").exists()


def test_more_files_than_a_folder_may_have_are_left_out(target, arrives, monkeypatch):
    monkeypatch.setattr(archive, "MAX_ENTRIES", 2)
    assert not arrives(tar_of("a", "b", "c"))
    assert len(os.listdir(target)) == 2


UNPACKS = """
import io, resource, sys, tarfile
from pathlib import Path
from rolltap.trainer.boxes.remote.archive import unpack

class Stream:
    def __init__(self, kind):
        header = tarfile.TarInfo("header")
        header.type = kind
        header.size = 1 << 30
        self.left = header.tobuf(tarfile.USTAR_FORMAT)

    def read(self, size):
        content = self.left or b"1" * size
        self.left = content[size:]
        return content[:size]

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
    assert not unpack(Stream(kind), Path(sys.argv[1]), 1 << 30)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_header_without_end_takes_no_memory(target):
    command = [sys.executable, "-c", UNPACKS, str(target)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) < 100 << 10


def test_nothing_is_written_through_a_link(target, arrives):
    link = tar_of(name="way", type=LINK, linkname=str(target.parent))
    assert arrives(link[:512] + tar_of("way/out"))
    assert (target / "way").is_dir()
    assert not (target.parent / "out").exists()
    (target / "there").symlink_to(target.parent)
    delete(target, ["there/target/way/out", "../target/way"])
    assert (target / "way" / "out").exists()


def test_a_setuid_bit_does_not_arrive(target, arrives):
    assert arrives(tar_of(name="program", size=1, mode=0o6755))
    assert stat.S_IMODE((target / "program").stat().st_mode) == 0o755


def test_a_pipe_gets_what_was_written_and_is_opened_as_often(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    write_pipe(path, b"0.5", 5)
    assert os.read(reader, 100) == b"0.5"
    write_pipe(path, b"", 0)
    with pytest.raises(BlockingIOError):
        os.read(reader, 100)
    os.close(reader)


def test_what_comes_back_touches_nothing_that_is_the_same_and_follows_no_link(tmp_path):
    here = tmp_path / "here"
    new = tmp_path / "new"
    outside = tmp_path / "outside"
    outside.mkdir()
    for folder in (here, new):
        folder.mkdir()
        (folder / "same").write_text("same")
    before = stamps(here)["same"]
    (here / "link").symlink_to(outside)  # a folder there now
    (new / "link").mkdir()
    (new / "link" / "file").write_text("content")
    (here / "folder").mkdir()
    (new / "folder").symlink_to("/etc")
    (here / "mode").touch(0o644)
    (new / "mode").touch(0o755)
    take_changes(new, here)
    assert stamps(here)["same"] == before
    assert list(outside.iterdir()) == []
    assert (here / "link" / "file").read_text() == "content"
    assert os.readlink(here / "folder") == "/etc"
    assert stat.S_IMODE((here / "mode").stat().st_mode) == 0o755
