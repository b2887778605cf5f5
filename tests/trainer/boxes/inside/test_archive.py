import io
import os
import stat
import subprocess
import sys
import tarfile

import pytest

from rolltap.trainer.boxes.inside import archive
from rolltap.trainer.boxes.inside.archive import (
    delete,
    pack,
    pack_changes,
    stamps,
    take_changes,
    unpack,
    write_pipe,
)
from rolltap.trainer.folders import scratch_folder

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


def packed(parts):
    file = io.BytesIO()
    pack(file, parts)
    file.seek(0)
    return file


def tar_of(*members):
    """Return a tar stream with members, each a name with fields of its `TarInfo`."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, fields in members:
            member = tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    file.seek(0)
    return file


def content(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = None
        else:
            found[name] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
    return found


def test_a_folder_arrives_with_its_modes_links_and_names(source, target):
    assert unpack(packed({".": source}), target, ROOM)
    assert content(target) == content(source)
    assert (target / "src" / "run.sh").stat().st_mtime == pytest.approx(
        (source / "src" / "run.sh").stat().st_mtime
    )


def test_parts_have_names_of_their_own_and_a_file_is_one(source, target):
    (source.parent / "to the script").symlink_to(source / "src" / "run.sh")
    parts = {"workspace": source / "src", "/etc/rolltap/run": source.parent / "to the script"}
    assert unpack(packed(parts), target, ROOM)
    assert (target / "workspace" / "run.sh").read_text() == "echo\n"
    assert (target / "etc" / "rolltap" / "run").read_text() == "echo\n"


def test_pipes_and_sockets_stay_where_they_are(source, target):
    os.mkfifo(source / "pipe")
    assert unpack(packed({".": source}), target, ROOM)
    assert not (target / "pipe").exists()


def test_only_changes_are_packed_and_what_is_gone_is_told(source, target):
    assert unpack(packed({".": source}), target, ROOM)
    untouched = (target / "src" / "run.sh").stat()
    before = stamps(source)
    (source / "src" / "new").write_text("new")
    (source / "link").unlink()
    (source / "empty").rmdir()
    (source / "empty").write_text("a file now")
    file = io.BytesIO()
    gone = pack_changes(file, source, before, ROOM)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        assert tar.getnames() == ["empty", "src/new"]
    file.seek(0)
    delete(target, gone)
    assert unpack(file, target, ROOM)
    assert gone == ["link"]
    assert content(target) == content(source)
    assert (target / "src" / "run.sh").stat() == untouched


def test_a_file_that_was_written_with_its_old_size_and_time_is_a_change(source):
    before = stamps(source)
    script = source / "src" / "run.sh"
    status = script.stat()
    script.write_text("exit\n")
    os.utime(script, ns=(status.st_atime_ns, status.st_mtime_ns))
    file = io.BytesIO()
    pack_changes(file, source, before, ROOM)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        assert tar.getnames() == ["src/run.sh"]


def test_a_file_and_a_folder_that_were_closed_to_their_owner_come_too(source, target):
    (source / "src" / "run.sh").chmod(0)
    (source / "src").chmod(0)
    assert unpack(packed({".": source}), target, ROOM)
    assert (target / "src" / "run.sh").read_text() == "echo\n"


def test_too_many_bytes_or_files_are_no_archive(source, monkeypatch):
    (source / "large").write_bytes(bytes(100_000))
    with pytest.raises(archive.TooMuchError):
        pack_changes(io.BytesIO(), source, {}, 50_000)
    monkeypatch.setattr(archive, "MAX_ENTRIES", 3)
    with pytest.raises(archive.TooMuchError):
        stamps(source)


def test_a_folder_that_is_nested_beyond_any_path_ends_somewhere():
    with scratch_folder() as folder:  # pytest could not remove it
        here = os.open(folder, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("deeper", dir_fd=here)
            below = os.open("deeper", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        assert 100 < len(stamps(folder)) < 1000


def nested(folder, depth):
    """Make a folder that is nested so often, by names of one letter."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_of_a_folder_that_is_nested_a_thousand_times_the_first_ones_are_taken(target):
    with scratch_folder() as here:  # pytest could not remove it
        nested(here, 1200)
        (here / "file").write_text("there")
        before = stamps(here)
        assert 100 < len(before) < 200
        assert unpack(packed({".": here}), target, ROOM)
    assert stamps(target).keys() == before.keys()
    deep = ("a/" * 1000 + "file", {"size": 1})
    assert unpack(tar_of(deep, ("d", {"size": 1})), target, ROOM)
    assert (target / "d").read_text() == "x"
    assert not (target / "a").exists()


@pytest.mark.parametrize(
    "member",
    [
        ("../out", {"size": 1}),
        ("/out", {"size": 1}),
        ("inside/../../out", {"size": 1}),
        ("device", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ("pipe", {"type": tarfile.FIFOTYPE}),
        ("hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": ""}),
        ("link", {"type": tarfile.SYMTYPE, "pax_headers": {"linkpath": "a\0b"}}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "a" * 5000}),
        ("a" * 300, {"size": 1}),
    ],
    ids=range(10),
)
def test_a_hostile_member_is_left_out_and_the_others_are_written(target, member):
    assert not unpack(tar_of(member, ("good", {"size": 1})), target, ROOM)
    assert list(target.parent.rglob("*")) == [target, target / "good"]


@pytest.mark.parametrize("mtime", ["nan", "inf", "1e300"])
def test_a_time_that_is_none_does_not_arrive(target, mtime):
    assert unpack(tar_of(("file", {"size": 1, "pax_headers": {"mtime": mtime}})), target, ROOM)
    assert (target / "file").read_text() == "x"


@pytest.mark.parametrize(
    "headers",
    [
        {"size": "-1"},
        {"GNU.sparse.size": "-1000000"},
        {"GNU.sparse.size": "none"},
        {"GNU.sparse.map": "0,1"},
        {"GNU.sparse.map": "none"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1000000"},
    ],
)
def test_a_size_that_is_none_is_damage(target, headers):
    hostile = ("hostile", {"size": 1, "pax_headers": headers})
    assert not unpack(tar_of(hostile, ("large", {"size": 100_000})), target, 50_000)
    assert not (target / "large").exists()


def test_what_comes_after_a_damaged_header_is_missed(target):
    damaged = bytearray(tar_of(("one", {"size": 1}), ("two", {"size": 1})).getvalue())
    damaged[1024] += 1  # the name of the second one
    assert not unpack(io.BytesIO(damaged), target, ROOM)
    whole = tar_of(("one", {"size": 1})).getvalue()
    assert not unpack(io.BytesIO(whole[:1024]), target, ROOM)


def test_more_files_than_a_folder_may_have_are_left_out(target, monkeypatch):
    monkeypatch.setattr(archive, "MAX_ENTRIES", 2)
    members = [(f"file-{number}", {"size": 1}) for number in range(3)]
    assert not unpack(tar_of(*members), target, ROOM)
    assert len(list(target.iterdir())) == 2


UNPACKS = """
import io, resource, sys, tarfile
from pathlib import Path
from rolltap.trainer.boxes.inside.archive import unpack

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


def test_nothing_is_written_through_a_link(target):
    link = ("way", {"type": tarfile.SYMTYPE, "linkname": str(target.parent)})
    assert unpack(tar_of(link, ("way/out", {"size": 1})), target, ROOM)
    assert (target / "way").is_dir()
    assert not (target.parent / "out").exists()
    (target / "there").symlink_to(target.parent)
    delete(target, ["there/target/way/out", "../target/way"])
    assert (target / "way" / "out").exists()


def test_a_setuid_bit_does_not_arrive(target):
    assert unpack(tar_of(("program", {"size": 1, "mode": 0o6755})), target, ROOM)
    assert stat.S_IMODE((target / "program").stat().st_mode) == 0o755


def test_an_archive_over_the_limit_or_cut_in_two_is_not_whole(source, target):
    assert not unpack(tar_of(("large", {"size": 100_000})), target, 50_000)
    assert not (target / "large").exists()
    cut = packed({".": source}).getvalue()[:700]
    assert not unpack(io.BytesIO(cut), target, ROOM)


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
    for folder in (here, new, outside):
        folder.mkdir()
    for folder in (here, new):
        (folder / "same").write_text("same")
    before = (here / "same").stat()
    (here / "link").symlink_to(outside)  # a folder there now
    (new / "link").mkdir()
    (new / "link" / "file").write_text("content")
    (here / "folder").mkdir()
    (new / "folder").symlink_to("/etc")
    (here / "mode").touch(0o644)
    (new / "mode").touch(0o755)
    take_changes(new, here)
    assert (here / "same").stat() == before
    assert list(outside.iterdir()) == []
    assert (here / "link" / "file").read_text() == "content"
    assert os.readlink(here / "folder") == "/etc"
    assert stat.S_IMODE((here / "mode").stat().st_mode) == 0o755
