import asyncio
import gc
import os
import shutil
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.preparation import Starts
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.task import Task
from tests.trainer.tasks.checkouts import SECRET, commit, find_secret, git, make_repository


@pytest.fixture
def start_of(tmp_path):
    """Return a function that makes the start of a task with these fields."""

    def start_of(runtime=None, **fields):
        task = Task(id="t", instruction="Do it.", evaluate=["true"], **fields)
        return asyncio.run(Starts(tmp_path / "starts", runtime).of(task))

    return start_of


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    return folder, make_repository(folder)


def new_repository(folder):
    folder.mkdir()
    git(folder, "init", "--quiet")
    return folder


CLONES = {
    "bare mirror": ["--mirror", "repository"],
    "alternates": ["--shared", "--no-checkout", "repository"],
    "separate git folder": ["--no-checkout", "--separate-git-dir=elsewhere", "repository"],
    "shallow clone": ["--depth=2", "--no-single-branch", "file://{folder}"],
}
FORMS = ["checkout", "one pack with bitmap", "worktree", *CLONES]


def in_form(form, folder, base):
    """Return a folder that has the repository in a form in which users have it."""
    if form == "worktree":
        return folder.parent / "repository-worktree"
    if form == "one pack with bitmap":
        git(folder, "repack", "-q", "-a", "-d", "-b")
    if form not in CLONES:
        return folder
    clone = folder.parent / "clone"
    arguments = [argument.format(folder=folder) for argument in CLONES[form]]
    git(folder.parent, "clone", "--quiet", *arguments, "clone")
    if form != "bare mirror":
        git(clone, "--no-replace-objects", "checkout", "--quiet", "--detach", base)
    return clone


@pytest.mark.parametrize(
    ("form", "by_id"),
    [(form, by_id) for form in FORMS for by_id in (True, False) if by_id or form != "bare mirror"],
)
def test_nothing_of_the_later_history_can_be_found_in_a_start(repository, start_of, form, by_id):
    folder, base = repository
    source = in_form(form, folder, base)
    assert find_secret(folder)
    start = start_of(workspace=source, commit=base if by_id else None).folder

    assert find_secret(start) == []
    assert git(start, "log", "--all", "--reflog", "--format=%s").splitlines() == ["base", "first"]
    assert git(start, "rev-parse", "HEAD") == base
    assert git(start, "status", "--porcelain") == ""
    reached = git(start, "rev-list", "--objects", "--no-object-names", "--all")
    there = git(start, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    assert {*there.split()} == {*reached.split()}
    assert git(start, "fsck", "--full", "--lost-found", "--strict") == ""
    for listed in (["stash", "list"], ["remote"], ["notes", "list"]):
        assert git(start, *listed) == ""
    assert git(start, "worktree", "list").splitlines() == [f"{start}  {base[:7]} [main]"]
    refs = git(start, "for-each-ref", "--format=%(refname) %(objecttype)").splitlines()
    assert refs == [
        "refs/heads/main commit",
        "refs/tags/v1 commit",
        "refs/tags/v1-annotated commit",
    ]
    assert (start / ".git").is_dir()
    names = {path.name for path in (start / ".git").rglob("*")}
    heads = {"ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD"}
    assert not names & {*heads, "logs", "alternates", "hooks", "grafts", "worktrees"}
    settings = git(start, "config", "--local", "--name-only", "--list").split()
    assert settings == ["core.repositoryformatversion", "core.filemode", "core.bare"]


def test_a_shallow_checkout_stays_shallow_and_a_partial_clone_that_lacks_files_is_refused(
    tmp_path, start_of
):
    folder = new_repository(tmp_path / "whole")
    git(folder, "config", "uploadpack.allowFilter", "true")
    (folder / "0").touch()
    without_commits = start_of(workspace=folder).folder
    assert git(without_commits, "status", "--porcelain") == "?? 0"
    for number in range(4):
        last = commit(folder, "a", f"{number}", f"number {number}")
    clone = ["clone", "--quiet", f"file://{folder}"]
    git(tmp_path, *clone, "--depth=2", "shallow")
    start = start_of(workspace=tmp_path / "shallow", commit=last).folder
    assert git(start, "log", "--format=%s").splitlines() == ["number 3", "number 2"]
    missing = r"task 't': .*shallow has no commit 1234567: fetch it there"
    with pytest.raises(InputError, match=missing):
        start_of(workspace=tmp_path / "shallow", commit="1234567")
    git(tmp_path, *clone, "--filter=blob:none", "--no-checkout", "partial")
    with pytest.raises(InputError, match=r"`git pack-objects` failed in .*partial: "):
        start_of(workspace=tmp_path / "partial", commit=last)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_checkout_of_another_user_is_read(repository, tmp_path, start_of):
    folder, base = repository
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert find_secret(start_of(workspace=folder, commit=base).folder) == []


def test_a_start_keeps_what_is_not_committed_and_one_with_a_commit_has_the_files_of_the_commit(
    repository, tmp_path, start_of
):
    folder, base = repository
    (folder / "code.py").write_text("changed = 1\n")
    (folder / "staged.py").write_text("new = 1\n")
    git(folder, "add", "staged.py")
    (folder / "untracked.txt").write_text("here\n")
    (folder / "tests" / "test_code.py").unlink()
    start = start_of(workspace=folder).folder
    changed = ["M code.py", " D tests/test_code.py", "?? staged.py", "?? untracked.txt"]
    assert git(start, "status", "--porcelain").splitlines() == changed
    assert (start / "code.py").read_text() == "changed = 1\n"
    assert find_secret(start) == []
    start = start_of(workspace=folder, commit=base[:10]).folder
    assert sorted(path.name for path in start.iterdir()) == [".git", "code.py", "tests"]
    assert (start / "code.py").read_text() == "bug = 1\n" * 200


def test_a_checkout_below_the_workspace_has_no_later_history_either(repository, tmp_path, start_of):
    folder, base = repository
    (tmp_path / "outer").mkdir()
    shutil.move(folder, tmp_path / "outer" / "inner")
    start = start_of(workspace=tmp_path / "outer").folder
    assert find_secret(start) == []
    assert git(start / "inner", "rev-parse", "HEAD") == base
    assert not (start / ".git").exists()


def test_a_submodule_has_the_history_up_to_its_commit(repository, tmp_path, start_of):
    folder, base = repository
    outer = new_repository(tmp_path / "outer")
    git(outer, "submodule", "--quiet", "add", str(folder), "part")
    git(outer / "part", "--no-replace-objects", "checkout", "--quiet", "--detach", base)
    git(outer, "add", "part")
    outer_commit = commit(outer, "readme", "outer", "outer")
    for fixed in (None, outer_commit):
        start = start_of(workspace=outer, commit=fixed).folder
        assert git(start / "part", "log", "--all", "--format=%s").splitlines() == ["base", "first"]
        assert find_secret(start) == []
        assert git(start, "status", "--porcelain") == ""
    shutil.rmtree(outer / "part")
    (outer / "part").mkdir()
    with pytest.raises(
        InputError, match=r"has the submodule part, which is not there: run `git -C .* --init`"
    ):
        start_of(workspace=outer, commit=outer_commit)


def test_files_that_git_lfs_keeps_are_refused_with_a_commit(tmp_path, start_of):
    folder = new_repository(tmp_path / "large")
    commit(folder, "sub/.gitattributes", "*.bin filter=lfs\n")
    base = commit(
        folder, "sub/x.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(
        InputError, match=r"sub/x\.bin of commit .* is kept by Git LFS: check the commit out"
    ):
        start_of(workspace=folder, commit=base)
    assert start_of(workspace=folder).folder.is_dir()


def test_hooks_filters_and_settings_of_the_checkout_run_nothing(repository, tmp_path, start_of):
    folder, base = repository
    proof = tmp_path / "ran"
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        hook = folder / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {proof}\n")
        hook.chmod(0o755)
    for name in (
        "core.fsmonitor",
        "core.pager",
        "filter.x.smudge",
        "filter.x.clean",
        "core.sshCommand",
    ):
        git(folder, "config", name, f"touch {proof}")
    (folder / ".gitattributes").write_text("* filter=x\n")
    start_of(workspace=folder)
    start_of(workspace=folder, commit=base)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        ("pipe", None, "pipe is a FIFO: a workspace starts with files"),
        ("out", "../secret", r"out is a symlink to \.\./secret, outside"),
        ("out", "/etc/passwd", "out is a symlink to /etc/passwd, outside"),
        ("out", "../workspace/a", r"symlink to \.\./workspace/a, outside"),
        ("out", "sub/up/../secret", r"out is a symlink to sub/up/\.\./secret, outside"),
    ],
)
def test_what_a_workspace_cannot_start_with_is_named(tmp_path, start_of, link, target, message):
    folder = tmp_path / "workspace"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "up").symlink_to("..")
    if target is None:
        os.mkfifo(folder / link)
    else:
        (folder / link).symlink_to(target)
    with pytest.raises(InputError, match=f"task 't': .*{message}"):
        start_of(workspace=folder)


@pytest.mark.usefixtures("repository")
def test_a_bare_repository_in_a_workspace_is_refused(tmp_path, start_of):
    git(tmp_path, "clone", "--quiet", "--bare", "repository", "outer/hidden")
    with pytest.raises(
        InputError, match="hidden is a bare git repository, which shows later history"
    ):
        start_of(workspace=tmp_path / "outer")
    with pytest.raises(InputError, match="hidden is a bare git repository: give 'commit'"):
        start_of(workspace=tmp_path / "outer" / "hidden")


def test_an_unreadable_file_is_named(tmp_path, start_of, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Permission denied", source)

    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "closed").touch()
    monkeypatch.setattr(shutil, "copy2", refuse)  # root reads all files
    with pytest.raises(InputError, match=r"cannot copy .*closed: Permission denied"):
        start_of(workspace=tmp_path / "workspace")


def test_a_broken_repository_is_named(tmp_path, start_of):
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / ".git").write_text("gitdir: /nowhere\n")
    broken = r"task 't': `git rev-parse` failed in .*workspace: .*/nowhere"
    with pytest.raises(InputError, match=broken):
        start_of(workspace=tmp_path / "workspace")


def test_a_folder_inside_a_larger_repository_is_a_plain_folder(repository, tmp_path, start_of):
    folder, base = repository
    start = start_of(workspace=folder / "tests").folder
    assert [path.name for path in start.iterdir()] == ["test_code.py"]
    with pytest.raises(InputError, match="tests is not a git checkout, so it has no commit"):
        start_of(workspace=folder / "tests", commit=base)


def test_copies_keep_links_and_modes_and_share_nothing(tmp_path, start_of):
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "a").write_text("a")
    (folder / "a").chmod(0o4755)
    os.link(folder / "a", folder / "hard")
    (folder / "soft").symlink_to("a")
    (folder / "python").symlink_to("/usr/bin/python3")
    start = start_of(workspace=folder)
    start.copy_to(tmp_path / "one")
    (tmp_path / "one" / "a").write_text("b")
    (tmp_path / "one" / "hard").write_text("c")
    assert os.readlink(tmp_path / "one" / "soft") == "a"
    assert os.readlink(tmp_path / "one" / "python") == "/usr/bin/python3"
    assert (start.folder / "a").stat().st_mode & 0o7777 == 0o755
    assert [(start.folder / name).read_text() for name in ("a", "hard")] == ["a", "a"]
    assert [(folder / name).read_text() for name in ("a", "hard")] == ["a", "a"]


def test_files_are_laid_over_the_workspace(tmp_path, start_of):
    texts = {"workspace/a": "old", "more/a": "new", "more/sub/b": "b", "single": "one"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = {".": tmp_path / "more", "deep/x": tmp_path / "single"}
    start = start_of(workspace=tmp_path / "workspace", files=files).folder
    found = {}
    for path in start.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(start))] = path.read_text()
    assert found == {"a": "new", "sub/b": "b", "deep/x": "one"}


async def test_a_start_is_made_once(tmp_path):
    starts = Starts(tmp_path / "starts", None)
    task = task_of(tmp_path, "a")
    first, *others = await asyncio.gather(starts.of(task), starts.of(task), starts.of(task))
    assert all(start is first for start in others)


def test_the_digest_of_a_start_is_of_its_content(repository, tmp_path, start_of):
    folder, base = repository
    first = start_of(workspace=folder, commit=base)
    git(tmp_path, "clone", "--quiet", "--mirror", "repository", "mirror")
    assert start_of(workspace=tmp_path / "mirror", commit=base).digest == first.digest
    (folder / "code.py").write_text("")
    assert start_of(workspace=folder).digest != first.digest


def task_of(folder, name):
    """Return a task whose workspace has one file of 100 KB."""
    workspace = folder / name
    workspace.mkdir(exist_ok=True)
    (workspace / "file").write_text(name * 100_000)
    return Task(id=name, instruction="Do it.", evaluate=["true"], workspace=workspace)


async def removed(start):
    """Wait until a start has been removed."""
    while start.folder.exists():
        await asyncio.to_thread(gc.collect)


async def test_the_starts_that_nobody_uses_are_removed_the_one_that_waited_longest_first(tmp_path):
    starts = Starts(tmp_path / "starts", None, kept_bytes=250_000)
    tasks = {name: task_of(tmp_path, name) for name in "abc"}
    folders = {name: (await starts.of(tasks[name])).folder for name in "ab"}
    await starts.of(tasks["a"])
    await starts.of(tasks["c"])
    await removed(Start(folders["b"], ""))
    assert folders["a"].exists()
    again = await starts.of(tasks["b"])
    assert (again.folder / "file").read_text() == "b" * 100_000
    assert again.folder != folders["b"]


async def test_a_start_in_use_stays_until_its_last_user_has_left(tmp_path):
    starts = Starts(tmp_path / "starts", None, kept_bytes=1)
    used = await starts.of(task_of(tmp_path, "a"))
    folder = used.folder
    await starts.of(task_of(tmp_path, "b"))
    again = await starts.of(task_of(tmp_path, "a"))
    assert again.folder != folder
    assert (used.folder / "file").exists()
    del used
    await removed(Start(folder, ""))


async def test_a_start_that_would_be_another_one_when_it_is_made_again_is_refused(tmp_path):
    starts = Starts(tmp_path / "starts", None, kept_bytes=1)
    task = task_of(tmp_path, "a")
    await starts.of(task)
    await starts.of(task_of(tmp_path, "b"))
    (task.workspace / "file").write_text("changed")
    with pytest.raises(
        InputError, match=r"task 'a': its start has changed since .*: leave its folder alone"
    ):
        await starts.of(task)


class Images:
    """A runtime whose images have the folders of this machine."""

    name = "container"
    warning = None
    isolated = True
    programs_here = True
    check = box = image_digest = show = print

    def copy_out(self, image, workdir, dest):
        if not Path(workdir).is_dir():
            raise InputError(f"the image {image} has no folder {workdir}")
        shutil.copytree(workdir, dest, symlinks=True)


def test_a_start_in_an_image_keeps_its_files_and_ends_at_the_commit(repository, tmp_path, start_of):
    folder, base = repository
    (folder / "built.so").write_text("built")
    later = commit(folder, "setup.py", "setup", f"SWE-bench {SECRET.decode()}")
    assert later != base
    (folder / "python").symlink_to("/nowhere/bin/python")
    start = start_of(Images(), image="image", workdir=str(folder), commit=base).folder
    assert find_secret(start) == []
    assert git(start, "rev-parse", "HEAD") == base
    assert git(start, "status", "--porcelain").splitlines() == [
        "?? built.so",
        "?? python",
        "?? setup.py",
    ]
    assert [*start.parent.iterdir()] == [start]


def test_an_image_without_what_the_task_names_is_refused(tmp_path, start_of):
    with pytest.raises(InputError, match=r"task 't': the image image has no folder .*none"):
        start_of(Images(), image="image", workdir=str(tmp_path / "none"))
    (tmp_path / "plain").mkdir()
    no_commit = "task 't': the image has no git checkout, so it has no commit 1234567"
    with pytest.raises(InputError, match=no_commit):
        start_of(Images(), image="i", workdir=str(tmp_path / "plain"), commit="1234567")


@pytest.mark.parametrize(
    "fields", [{}, {"image": "i", "workdir": "/workspace", "image_optional": True}]
)
def test_a_task_without_workspace_and_an_optional_image_start_with_no_files(start_of, fields):
    assert list(start_of(Images(), **fields).folder.iterdir()) == []
