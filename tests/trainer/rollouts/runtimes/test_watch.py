"""Limits as data. `tests/security/attacks.py` has programs that exceed them."""

import os
import subprocess
from pathlib import Path

import pytest

from rolltap.trainer.rollouts.runtimes.watch import choose_cores, disk_bytes, rlimits, tmpfs_bytes
from rolltap.trainer.rollouts.tasks.limits import Limits


@pytest.mark.parametrize("cpus", [None, 10_000.0])
def test_a_box_without_a_limit_of_cores_has_all(cpus):
    assert choose_cores(Limits(cpus=cpus)) == []


@pytest.mark.parametrize(("cpus", "number"), [(0.5, 1), (1.0, 1)])
def test_a_part_of_a_core_is_a_core(cpus, number, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    cores = choose_cores(Limits(cpus=cpus))
    assert len(cores) == number
    assert set(cores) < {3, 5, 7}


def test_one_file_is_no_larger_than_the_disk_limit():
    assert rlimits(Limits(disk_gib=0.5))["RLIMIT_FSIZE"] == 1 << 29
    assert "RLIMIT_FSIZE" not in rlimits(Limits())


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


def test_a_folder_that_is_gone_has_no_size(tmp_path):
    assert disk_bytes([tmp_path / "none"]) == 0


def test_names_that_look_like_options_are_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["mkdir", "--", "--version"], check=True)
    assert disk_bytes([tmp_path / "--version"]) > 0


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_a_box_that_is_being_made_and_still_sees_this_machine_has_nothing_in_memory(folder):
    assert tmpfs_bytes(Path(f"/proc/{os.getpid()}/root{folder}")) == 0
