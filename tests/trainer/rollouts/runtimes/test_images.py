import os
import subprocess

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.container import copy_from_root_folder, root_folder_digest
from rolltap.trainer.rollouts.runtimes.engine_box import call


@pytest.fixture
def root(tmp_path):
    """A root folder with a file, a link, a folder and a FIFO."""
    root = tmp_path / "root"
    (root / "testbed" / "empty").mkdir(parents=True)
    (root / "testbed" / "file").write_text("start")
    (root / "testbed" / "link").symlink_to("/etc/passwd")
    os.mkfifo(root / "fifo")
    return root


CHANGES = {
    "a content": lambda root: (root / "testbed" / "file").write_text("other"),
    "a mode": lambda root: (root / "testbed" / "file").chmod(0o755),
    "a name": lambda root: (root / "testbed" / "file").rename(root / "testbed" / "renamed"),
    "an empty folder": lambda root: (root / "testbed" / "empty").rmdir(),
    "the target of a link": lambda root: (
        (root / "testbed" / "link").unlink(),
        (root / "testbed" / "link").symlink_to("/etc/group"),
    ),
}


def test_the_digest_of_a_root_folder_is_that_of_its_copy(root, tmp_path):
    subprocess.run(["cp", "-a", root, tmp_path / "copy"], check=True)
    assert root_folder_digest(root) == root_folder_digest(tmp_path / "copy")
    assert root_folder_digest(root).startswith("sha256:")


@pytest.mark.parametrize("what", CHANGES)
def test_the_digest_of_a_root_folder_changes_with(what, root):
    before = root_folder_digest(root)
    CHANGES[what](root)
    assert root_folder_digest(root) != before


def test_a_root_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="absent is no folder of this machine; an image name does not begin with /"):
        root_folder_digest(tmp_path / "absent")


def test_a_folder_is_copied_out_of_a_root_folder_with_its_links_as_they_are(root, tmp_path):
    copy_from_root_folder(root, "/testbed", tmp_path / "start")
    assert (tmp_path / "start" / "file").read_text() == "start"
    assert os.readlink(tmp_path / "start" / "link") == "/etc/passwd"


@pytest.mark.parametrize("workdir", ["/absent", "/../outside", "/out", "/testbed/file"])
def test_nothing_but_a_folder_of_the_root_folder_is_copied(workdir, root, tmp_path):
    (tmp_path / "outside").mkdir()
    (root / "out").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match=f"has no folder {workdir}"):
        copy_from_root_folder(root, workdir, tmp_path / "start")


def test_a_command_that_fails_says_its_own_message():
    with pytest.raises(OSError, match=r"`sh -c 'echo why >&2; exit 3' \.\.\.` fails with status 3: why"):
        call(["sh", "-c", "echo why >&2; exit 3"])
    with pytest.raises(OSError, match=r"does not end within 0\.1 s"):
        call(["sleep", "60"], timeout=0.1)
