"""Git checkouts that end at a commit: no later objects, refs, reflogs, remotes, hooks or settings."""

from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.tasks.git import git


def head_commit(checkout: Path) -> str | None:
    """Return the commit that is checked out; None before the first. Raises `InputError` for a broken repository."""
    git("rev-parse", "--git-dir", folder=checkout)
    return _commit(checkout, "HEAD")


def give_history(source: Path, target: Path, commit: str | None, *, files: bool) -> None:
    """Make `target` a repository with the commits up to one of `source`, and nothing else of it.

    The new repository has one branch, `main`, at the commit, and a plain tag for each tag on a commit of its history. A
    shallow `source` gives a shallow `target`. Raises `InputError` for what cannot be had: the commit, a part of its
    history, a submodule, files that Git LFS keeps.

    Args:
        source: Checkout, worktree, submodule or bare repository.
        target: Folder; it may have files.
        commit: Commit that the history ends at; None: what is checked out.
        files: True: write the files of the commit. False: leave the files as they are, which git shows as changes.
    """
    head = _commit(source, commit or "HEAD")
    if head is None and commit is not None:
        raise InputError(f"{source} has no commit {commit}: fetch it there")
    target.mkdir(parents=True, exist_ok=True)
    kind = git("rev-parse", "--show-object-format", folder=source)
    git("init", "--quiet", "--template=", "--initial-branch=main", f"--object-format={kind}", folder=target)
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


def _commit(repository: Path, name: str) -> str | None:
    return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", folder=repository, may_fail=True) or None


def _copy_objects(source: Path, target: Path, head: str) -> None:
    """Copy the objects that `head` reaches. Replacements and grafts of `source` do not count: they may point later."""
    if git("rev-parse", "--is-shallow-repository", folder=source) == "true":
        shallow = Path(git("rev-parse", "--path-format=absolute", "--git-path", "shallow", folder=source))
        reached = set(git("rev-list", head, folder=source).split())
        ends = [line for line in shallow.read_text().split() if line in reached]
        (target / ".git" / "shallow").write_text("".join(f"{line}\n" for line in ends))
    pack = target / ".git" / "start.pack"
    with pack.open("wb") as file:
        git("pack-objects", "--revs", "--stdout", "--quiet", folder=source, stdin=f"{head}\n", stdout=file)
    with pack.open("rb") as file:
        git("index-pack", "--stdin", folder=target, stdin=file)
    pack.unlink()


def _refuse_lfs(target: Path, head: str, source: Path) -> None:
    if git("grep", "-l", "filter=lfs", head, "--", ":(glob)**/.gitattributes", folder=target, may_fail=True):
        files = git("grep", "-l", "^version https://git-lfs.github.com/spec/", head, folder=target, may_fail=True)
        if files:
            name = files.splitlines()[0].partition(":")[2]
            raise InputError(
                f"{name} of commit {head[:12]} in {source} is kept by Git LFS: check the commit out, and give the "
                "checkout without 'commit'"
            )


def _add_submodules(source: Path, target: Path, head: str) -> None:
    for line in git("ls-tree", "-r", head, folder=target).splitlines():
        (mode, _, commit), name = line.partition("\t")[0].split(), line.partition("\t")[2]
        if mode != "160000":
            continue
        if not (source / name / ".git").exists():
            raise InputError(
                f"commit {head[:12]} of {source} has the submodule {name}, which is not there: run "
                f"`git -C {source} submodule update --init`"
            )
        give_history(source / name, target / name, commit, files=True)
