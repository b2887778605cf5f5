"""Make the miniature's checkout, its SWE-bench row and its Harbor task.

    python recipes/swe/mini/make.py runs/mini

`history/` has the commits as patches. The fix is the one before the last. The checkout is at the
commit before it, and its repository has all commits, as a clone has. The same commit ids come out
each time: dates, names and texts of the commits are those of the patches, and git's configuration
is not read.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
HISTORY = sorted((HERE / "history").glob("*.patch"))
FIX = -2
"""Place of the fix in `HISTORY`."""
COMMITTER = {"GIT_COMMITTER_NAME": "Spans", "GIT_COMMITTER_EMAIL": "spans@example.com"}
ALONE = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "TZ": "UTC", **COMMITTER}


def git(folder: Path, *arguments: str | Path) -> str:
    """Return the output of a git command in `folder`."""
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(
        command, env={**os.environ, **ALONE}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def make_checkout(folder: Path, history: list[Path]) -> None:
    """Make a repository of these commits in a new `folder`."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(
        folder,
        "am",
        "--quiet",
        "--committer-date-is-author-date",
        *(patch.absolute() for patch in history),
    )


def row(checkout: Path) -> dict[str, str]:
    """Return the SWE-bench row: the fields of `row.json`, and those that the repository has."""
    base, fixed = git(checkout, "rev-parse", "HEAD", "v0.3~1").split()
    fields = json.loads((HERE / "row.json").read_text())
    return {
        **{
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in fields.items()
        },
        "base_commit": base,
        "environment_setup_commit": base,
        "created_at": git(checkout, "log", "-1", "--format=%aI", fixed).strip(),
        "problem_statement": (HERE / "harbor" / "instruction.md").read_text(),
        "patch": git(checkout, "diff", base, fixed, "--", "spans"),
        "test_patch": git(checkout, "diff", base, fixed, "--", "tests"),
    }


def make_harbor_task(folder: Path, checkout: Path, patch: str) -> None:
    """Make the Harbor task in a new `folder`: `harbor/`, a checkout without the fix, the tests and
    the patch."""
    shutil.copytree(HERE / "harbor", folder)
    make_checkout(folder / "environment" / "repo", HISTORY[:FIX])
    for file in git(checkout, "ls-tree", "-r", "--name-only", "v0.3", "tests").split():
        (folder / file).write_text(git(checkout, "show", f"v0.3:{file}"))
    (folder / "solution" / "fix.patch").write_text(patch)


def main(out: Path) -> None:
    """Make all of it in a new folder."""
    checkout = out / "repositories" / "example__spans"
    make_checkout(checkout, HISTORY)
    git(checkout, "tag", "v0.3")
    git(checkout, "checkout", "--quiet", f"HEAD~{-FIX}")
    swe = row(checkout)
    (out / "tasks.jsonl").write_text(json.dumps(swe) + "\n")
    make_harbor_task(out / "harbor" / swe["instance_id"], checkout, swe["patch"])
    print(f"{swe['repo']} at {swe['base_commit']} in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit(f"usage: {sys.argv[0]} NEW_FOLDER")
    main(Path(sys.argv[1]))
