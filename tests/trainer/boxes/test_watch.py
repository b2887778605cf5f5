"""Limits as data. `tests/security/attacks.py` has programs that exceed them."""

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import psutil
import pytest

from rolltap.trainer.boxes import watch
from rolltap.trainer.boxes.watch import Nameless, choose_cores, disk_bytes, exceeded, pause_after
from rolltap.trainer.folders import scratch_folder
from rolltap.trainer.tasks.task import Limits


def test_a_box_has_as_many_cores_as_its_limit_and_a_part_of_one_is_one(monkeypatch):
    assert choose_cores(Limits()) == choose_cores(Limits(cpus=10_000)) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    for cpus, number in ((0.5, 1), (1.0, 1), (1.5, 2)):
        cores = choose_cores(Limits(cpus=cpus))
        assert len(cores) == number
        assert set(cores) < {3, 5, 7}


def test_space_on_disk_is_counted_once_for_each_file_and_not_through_links(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").write_bytes(bytes(1 << 20))
    (tmp_path / "folder" / "file").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "folder" / "file", tmp_path / "folder" / "same")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "elsewhere")
    with open(tmp_path / "folder" / "hole", "wb") as hole:
        hole.truncate(1 << 30)
    assert 1 << 20 <= disk_bytes([tmp_path / "folder"]) < 2 << 20
    assert disk_bytes([tmp_path / "folder", tmp_path / "elsewhere"]) >= 2 << 20


def test_a_folder_that_is_gone_has_no_size_and_names_that_look_like_options_are_names(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert disk_bytes(["--version"]) == 0
    (tmp_path / "--version").mkdir()
    assert disk_bytes(["--version"]) > 0


CLOSED = """
import os, sys
from pathlib import Path
from rolltap.trainer.boxes.watch import disk_bytes
folder = Path(sys.argv[1])
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
(folder / "closed").mkdir()
(folder / "closed" / "file").write_bytes(bytes(1 << 20))
(folder / "closed").chmod(0o333)
print(disk_bytes([folder]))
(folder / "closed").chmod(0o777)
"""


def test_a_folder_that_a_program_has_closed_is_counted(tmp_path):
    with scratch_folder() as folder:  # nobody can enter it, other than pytest's
        folder.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", CLOSED, str(folder)], capture_output=True, text=True
        )
    assert done.stderr == ""
    assert float(done.stdout) >= 1 << 20


def test_a_folder_that_cannot_be_counted_is_over_every_limit(tmp_path, monkeypatch):
    (tmp_path / "du").write_text(
        "#!/bin/sh\necho 'du: cannot read: Permission denied' >&2; echo 4096 total; exit 1\n"
    )
    (tmp_path / "du").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert disk_bytes([tmp_path]) == float("inf")


def test_many_open_files_are_counted_a_part_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_SLICE_SECONDS", 0)
    code = (
        "import os; f = os.memfd_create('x'); os.write(f, bytes(1 << 20)); print(flush=True);"
        " input()"
    )
    command = [sys.executable, "-c", code]
    nameless = Nameless()
    looks = []
    with ExitStack() as stack:
        processes = []
        for _ in range(2):
            opens = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(opens)  # it ends with its input
            opens.stdout.readline()
            processes.append(psutil.Process(opens.pid))
        for _ in range(2):
            nameless.look(lambda: list(processes))
            looks.append(nameless.in_memory >> 20)
    assert looks == [1, 2]


async def test_the_looks_at_many_boxes_keep_no_other_work_waiting():
    go_on = threading.Event()
    boxes = 64

    def find(*_):
        go_on.wait()
        return []

    limits = Limits(memory_gib=1, processes=1)
    watches = [asyncio.create_task(exceeded(limits, find, [])) for _ in range(boxes)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # each has asked for its looks
    try:
        assert await asyncio.wait_for(asyncio.to_thread(int), 120) == 0
    finally:
        go_on.set()
        for each in watches:
            each.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


def test_the_looks_at_many_boxes_share_a_table_of_the_machines_processes(monkeypatch):
    monkeypatch.setattr(watch, "_table", None)
    monkeypatch.setattr(watch, "_PAUSE_SECONDS", 3600.0)
    tables = {id(watch._find_now(lambda table: table)) for _ in range(64)}
    assert tables == {id(watch._table[1])}


def test_a_table_has_the_children_of_children_and_the_processes_of_a_namespace():
    script = "sleep 1000 & sleep 1000 & wait"
    with subprocess.Popen(
        ["sh", "-c", f"sh -c '{script}' & echo; wait"], stdout=subprocess.PIPE
    ) as shell:
        try:
            while len(found := watch.ProcessTable().descendants(shell.pid)) < 3:
                pass
            assert len(found) == 3
            assert {*found} <= {*watch.ProcessTable().in_namespace_of(os.getpid())}
            assert watch.ProcessTable().in_namespace_of(2**30) == []
        finally:
            for process in [*found, shell]:
                process.kill()


def test_a_second_look_at_a_table_may_come_while_the_first_one_reads(monkeypatch):
    table = watch.ProcessTable()
    read = watch._pid_namespace
    asked = []
    second = []

    def read_and_look(pid):
        asked.append(pid)
        if len(asked) == 2:
            second.extend(table.in_namespace_of(os.getpid()))
        return read(pid)

    monkeypatch.setattr(watch, "_pid_namespace", read_and_look)
    first = table.in_namespace_of(os.getpid())
    assert psutil.Process() in first
    assert psutil.Process() in second


@pytest.mark.parametrize(
    ("seconds", "pause"), [(0.0, 0.25), (0.05, 1.0), (1.0, 2.0), (1000.0, 2.0)]
)
def test_no_look_makes_the_pause_after_it_long(seconds, pause):
    assert pause_after(seconds, 1, 2.0) == pause


@pytest.mark.parametrize(("boxes", "pause"), [(1, 0.25), (10, 2.0), (40, 8.0), (256, 10.0)])
def test_the_looks_at_many_boxes_take_no_more_of_a_core_than_the_looks_at_one(boxes, pause):
    assert pause_after(0.01, boxes, 10.0) == pause


async def test_a_box_without_limits_is_not_looked_at():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(exceeded(Limits(cpus=1), list, []), 0.05)
