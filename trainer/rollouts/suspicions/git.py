"""Git commands that read more of a repository than the commits before its start."""

import re
from collections.abc import Iterator, Sequence

INTERNALS = re.compile(
    r"(^|/)\.git/(objects|logs|packed-refs|refs/(remotes|tags|stash)|ORIG_HEAD|FETCH_HEAD|worktrees|modules)\b"
)
"""Files of a repository that hold, or name, other commits than the ones before its start."""

_ALWAYS = frozenset({"reflog", "fsck", "fetch", "pull", "ls-remote", "unpack-objects", "verify-pack", "show-index"})
_LOOKS = frozenset({"log", "show", "rev-list", "shortlog", "diff", "whatchanged", "grep", "format-patch"})
_TAKES_REFS = _LOOKS | {
    *("checkout", "switch", "restore", "cherry-pick", "merge", "rebase", "reset", "archive", "worktree", "blame"),
    *("cat-file", "ls-tree", "rev-parse", "apply", "merge-base"),
}
_EVERYWHERE = re.compile(r"--(all|branches|remotes|tags|glob|reflog|walk-reflogs|alternate-refs)(=.*)?|-g")
_LATER = re.compile(
    r"(origin|upstream)/.+|(.*/)?(FETCH_HEAD|ORIG_HEAD)\b.*|.*@\{(u|upstream|push|-?[0-9]+|[a-z]+)\}.*|"
    r"refs/(remotes|stash).*|(HEAD|@)\.\.\.?.+"
)
_HASH = re.compile(r"[0-9a-f]{7,64}")
_WITH_VALUE = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace"})


def reads_history(words: Sequence[str]) -> bool:
    """Return True for a git command that reads other commits than those before the current one.

    `words` begin with the program. These are all references (`log --all`), the reflog, loose and packed objects
    (`fsck`, `cat-file` of a hash), other repositories (`fetch`, `pull`, `clone URL`), and names of later commits
    (`origin/main`, `HEAD..main`, `HEAD@{1}`).
    """
    subcommand, *arguments = list(_without_options(words[1:])) or [""]
    if subcommand in _ALWAYS or (subcommand == "remote" and "update" in arguments):
        return True
    if subcommand == "clone":
        return any("://" in word or re.match(r"[\w.-]+@?[\w.-]*:", word) for word in arguments)
    if subcommand == "cat-file":
        return any(word.startswith("--batch") or _HASH.fullmatch(word) for word in arguments)
    refs = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if subcommand in _LOOKS and any(_EVERYWHERE.fullmatch(word) for word in refs):
        return True
    return subcommand in _TAKES_REFS and any(_LATER.fullmatch(word) for word in refs)


def _without_options(words: Sequence[str]) -> Iterator[str]:
    """Yield the subcommand and its arguments, without git's own options before it."""
    rest = iter(words)
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            yield word
            yield from rest
