"""Git checkouts that end at a commit: no later objects, refs, reflogs, remotes, hooks or settings.

The git commands read nothing but the repository that they are given.
"""

import os
import subprocess
from pathlib import Path
from typing import IO, Any

from rolltap.addons.errors import InputError

_SETTINGS = {
    "safe.directory": "*",  # a dataset may belong to another user
    "core.logAllRefUpdates": "false",
    # they may have been written with replacements or grafts, and reach later commits then
    "pack.useBitmaps": "false",
}


def git(
    *arguments: str,
    folder: Path,
    stdin: str | IO[bytes] = "",
    stdout: IO[bytes] | None = None,
    may_fail: bool = False,
) -> str:
    """Run git in a repository, and return its output without the last line end.

    Settings of the user and of the system, replacements, grafts, and the network have no effect.
    The repository is `folder` itself, never one above it. Raises `InputError` when git is not
    installed, and when it fails; with `may_fail` its output is returned then.

    Args:
        stdin: Text, or a file that is open for reading.
        stdout: File for the output. The result is empty then.
    """
    given: dict[str, Any] = {"stdin": stdin}
    if isinstance(stdin, str):
        given = {"input": stdin.encode()}
    try:
        ended = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=_environment(folder),
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
            **given,
        )
    except FileNotFoundError as error:
        why = f"{error.strerror}: {error.filename}"
        raise InputError(f"git cannot run in {folder}: {why}") from error
    if ended.returncode != 0 and not may_fail:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"status {ended.returncode}"
        raise InputError(f"`git {arguments[0]}` failed in {folder}: {reason}")
    output: bytes = ended.stdout or b""
    return output.decode(errors="surrogateescape").removesuffix("\n")


def _environment(folder: Path) -> dict[str, str]:
    settings = {"GIT_CONFIG_COUNT": str(len(_SETTINGS))}
    for number, (name, value) in enumerate(_SETTINGS.items()):
        settings[f"GIT_CONFIG_KEY_{number}"] = name
        settings[f"GIT_CONFIG_VALUE_{number}"] = value
    return {
        **settings,
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_ALLOW_PROTOCOL": "none",  # a partial clone would fetch what it lacks
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_GRAFT_FILE": os.devnull,
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }


def head_commit(checkout: Path) -> str | None:
    """Return the commit that is checked out; None before the first.

    Raises `InputError` for a broken repository.
    """
    git("rev-parse", "--git-dir", folder=checkout)
    return commit_id(checkout, "HEAD")


def require_inside(checkout: Path, around: Path) -> None:
    """Raise `InputError` when a part of a checkout's repository is outside of the folder `around`.

    git follows links, `gitdir:`, `commondir` and alternates to any folder of this machine, and
    whoever made the checkout wrote them.
    """
    top = around.resolve()
    outside = InputError(
        f"the git checkout {checkout.relative_to(around)} has a part outside of the image",
    )
    for name in ("--git-dir", "--git-common-dir"):
        folder = Path(git("rev-parse", "--path-format=absolute", name, folder=checkout)).resolve()
        if not folder.is_relative_to(top) or (folder / "objects" / "info" / "alternates").exists():
            raise outside
        for path in folder.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise outside


def give_history(
    source: Path,
    target: Path,
    commit: str | None,
    *,
    files: bool,
) -> None:
    """Make `target` a repository with the commits up to one of `source`, and nothing else of it.

    The new repository has one branch, `main`, at the commit, and a plain tag for each tag on a
    commit of its history. A shallow `source` gives a shallow `target`. Raises `InputError` for what
    cannot be had: the commit, a part of its history, a submodule, files that Git LFS keeps.

    Args:
        source: Checkout, worktree, submodule or bare repository.
        target: Folder; it may have files.
        commit: Commit that the history ends at; None: what is checked out.
        files: True: write the files of the commit. False: leave the files as they are, which git
            shows as changes.
    """
    head = commit_id(source, commit or "HEAD")
    if head is None and commit is not None:
        raise InputError(f"{source} has no commit {commit}: fetch it there")
    target.mkdir(parents=True, exist_ok=True)
    kind = git("rev-parse", "--show-object-format", folder=source)
    form = f"--object-format={kind}"
    git("init", "--quiet", "--template=", "--initial-branch=main", form, folder=target)
    if head is None:
        return
    _copy_objects(source, target, head)
    refs = [f"create refs/heads/main {head}"]
    form = "--format=%(refname) %(objectname) %(*objectname)"
    tags = git("for-each-ref", f"--merged={head}", form, "refs/tags", folder=source)
    for name, tagged, *commits in map(str.split, tags.splitlines()):
        refs.append(f"create {name} {commits[0] if commits else tagged}")
    git("update-ref", "--stdin", folder=target, stdin="\n".join(refs) + "\n")
    git("pack-refs", "--all", folder=target)
    git("read-tree", head, folder=target)
    if files:
        _refuse_lfs(target, head, source)
        git("checkout-index", "--all", "--force", "--quiet", folder=target)
        git("update-index", "-q", "--refresh", folder=target, may_fail=True)
        _add_submodules(source, target, head)


def commit_id(repository: Path, name: str) -> str | None:
    """Return the id of the commit that a name stands for; None without one."""
    commit = f"{name}^{{commit}}"
    found = git("rev-parse", "--verify", "--quiet", commit, folder=repository, may_fail=True)
    return found or None


def _copy_objects(source: Path, target: Path, head: str) -> None:
    """Copy the objects that `head` reaches.

    Replacements and grafts of `source` do not count: they may point later.
    """
    if git("rev-parse", "--is-shallow-repository", folder=source) == "true":
        path = ("--path-format=absolute", "--git-path", "shallow")
        shallow = Path(git("rev-parse", *path, folder=source))
        reached = set(git("rev-list", head, folder=source).split())
        ends = [line for line in shallow.read_text().split() if line in reached]
        (target / ".git" / "shallow").write_text("".join(f"{line}\n" for line in ends))
    pack = target / ".git" / "start.pack"
    with pack.open("wb") as file:
        all_of = ("pack-objects", "--revs", "--stdout", "--quiet")
        git(*all_of, folder=source, stdin=f"{head}\n", stdout=file)
    with pack.open("rb") as file:
        git("index-pack", "--stdin", folder=target, stdin=file)
    pack.unlink()


def _refuse_lfs(target: Path, head: str, source: Path) -> None:
    attributes = ("filter=lfs", head, "--", ":(glob)**/.gitattributes")
    if not git("grep", "-l", *attributes, folder=target, may_fail=True):
        return
    pointer = "^version https://git-lfs.github.com/spec/"
    files = git("grep", "-l", pointer, head, folder=target, may_fail=True)
    if files:
        name = files.splitlines()[0].partition(":")[2]
        raise InputError(
            f"{name} of commit {head[:12]} in {source} is kept by Git LFS: check the commit "
            "out, and give the checkout without 'commit'"
        )


def _add_submodules(source: Path, target: Path, head: str) -> None:
    for line in git("ls-tree", "-r", head, folder=target).splitlines():
        entry, _, name = line.partition("\t")
        mode, _, commit = entry.split()
        if mode != "160000":
            continue
        if not (source / name / ".git").exists():
            raise InputError(
                f"commit {head[:12]} of {source} has the submodule {name}, which is not there: run "
                f"`git -C {source} submodule update --init`"
            )
        give_history(source / name, target / name, commit, files=True)
