"""Git repositories with a secret in their later history, and the search for it in a folder."""

import os
import subprocess
import zlib
from contextlib import suppress
from pathlib import Path

SECRET = b"THE-ANSWER-OF-LATER"


def git(folder: Path, *arguments: str) -> str:
    """Run git as its user does, with the settings of nobody."""
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": "/",
    }
    settings = [
        "-c",
        "user.name=dev",
        "-c",
        "user.email=dev@example.org",
        "-c",
        "protocol.file.allow=always",
    ]
    command = ["git", *settings, *arguments]
    return subprocess.check_output(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ).strip()


def commit(folder: Path, name: str, text: str, message: str = "change") -> str:
    """Write a file and commit it. Return the commit's id."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    git(folder, "add", "--all", name)
    git(folder, "commit", "--quiet", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def make_repository(folder: Path) -> str:
    """Make a checkout whose later history has the secret everywhere. Return the base commit, with
    one before it."""
    folder.mkdir(parents=True)
    secret = SECRET.decode()
    git(folder, "init", "--quiet", "--initial-branch=trunk")
    commit(folder, "code.py", "bug = 1\n" * 200, "first")
    git(folder, "tag", "v1")
    git(folder, "tag", "-a", "v1-annotated", "-m", f"solved later: {secret}", "v1")
    base = commit(folder, "tests/test_code.py", "def test_code(): ...\n", "base")
    later = commit(folder, "code.py", "bug = 1\n" * 199 + f"# {secret}\n", f"fix: {secret}")
    git(folder, "tag", f"v2-{secret}")
    git(folder, "branch", f"fixed-{secret}")
    git(folder, "notes", "add", "-m", f"note {secret}", base)
    git(folder, "update-ref", "refs/replace/" + base, later)
    (folder / ".git" / "info" / "grafts").write_text(f"{base} {later}\n")
    (folder / "code.py").write_text(f"stashed = '{secret}'\n")
    git(folder, "stash")
    for name in ("ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD"):
        (folder / ".git" / name).write_text(f"{later}\t\tbranch '{secret}'\n")
    git(folder, "remote", "add", "origin", f"https://{secret}@example.org/x.git")
    git(folder, "update-ref", f"refs/remotes/origin/{secret}", later)
    git(folder, "pack-refs", "--all")
    (folder / ".git" / "hooks").mkdir(exist_ok=True)
    (folder / ".git" / "hooks" / "post-checkout").write_text(f"#!/bin/sh\necho {secret}\n")
    (folder / ".git" / "hooks" / "post-checkout").chmod(0o755)
    (folder / ".git" / "more.config").write_text(f"[alias]\n\tanswer = !echo {secret}\n")
    git(folder, "config", "include.path", "more.config")
    git(folder, "bundle", "create", ".git/later.bundle", "trunk")
    worktree = str(folder.parent / f"{folder.name}-worktree")
    git(folder, "--no-replace-objects", "worktree", "add", "--quiet", "--detach", worktree, base)
    git(folder, "checkout", "--quiet", "--detach", "HEAD")
    git(folder, "--no-replace-objects", "reset", "--quiet", "--hard", base)
    (folder / ".git" / "info" / "grafts").write_text(f"{base} {later}\n")
    return base


def find_secret(folder: Path) -> list[str]:
    """Return the files that have the secret: in their names, their bytes, or a zlib stream anywhere
    in them."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if SECRET.decode() in name:
            found.append(name)
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        streams = [data]
        for offset in range(len(data) - 1):
            if data[offset] & 0x0F == 8 and int.from_bytes(data[offset : offset + 2]) % 31 == 0:
                with suppress(zlib.error):
                    streams.append(zlib.decompressobj().decompress(data[offset:]))
        if any(SECRET in stream for stream in streams):
            found.append(name)
    return found
