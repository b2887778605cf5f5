from pathlib import Path

import pytest

from rolltap.trainer.boxes.programs import projects_around, tool_folders


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A home folder with installations as package managers make them."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))

    def write(path, text="\x7fELF", mode=0o755):
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file

    def link(path, target):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).symlink_to(target)

    # npm in a folder
    write("cache/agent-1/node_modules/agent/cli.js", "#!/usr/bin/env -S node --flag\n")
    link("cache/agent-1/node_modules/.bin/agent", "../agent/cli.js")
    # node below a prefix, with global packages
    write(".nvm/versions/v22/bin/node")
    write(".nvm/versions/v22/lib/node_modules/global/cli.js", "#!/usr/bin/env node\n")
    link(".nvm/versions/v22/bin/global", "../lib/node_modules/global/cli.js")
    # a virtual environment of a Python of pyenv
    write(".pyenv/versions/3.11/bin/python3.11")
    link(".pyenv/versions/3.11/bin/python3", "python3.11")
    (home / ".pyenv/versions/3.11/lib/python3.11").mkdir(parents=True)
    write("venv/pyvenv.cfg", f"home = {home}/.pyenv/versions/3.11/bin\nversion = 3.11\n")
    link("venv/bin/python", home / ".pyenv/versions/3.11/bin/python3.11")
    for path in (
        "run/session.log",
        "share/tasks",
        "etc/key",
        "lib/secret.py",
    ):  # made at the root of a project
        write(f"venv/{path}")
    write("venv/bin/mini", f"#!{home}/venv/bin/python\n")
    write(".pyenv/shims/tox", "#!/usr/bin/env sh\n")
    # pip install --user, pipx, a native program
    write(".local/bin/user-agent", "#!/usr/bin/env sh\n")
    (home / ".local/lib/python3.11").mkdir(parents=True)
    link(".local/bin/mini-by-pipx", "../../venv/bin/mini")
    write(".local/share/claude/versions/2")
    link(".local/bin/claude", "../share/claude/versions/2")
    write("scripts/run.sh", "#!/bin/sh\n")
    write("scripts/not-a-program", mode=0o644)
    write("project/shims/deploy", "#!/bin/sh\n")
    write("project/secret")
    return home


FOLDERS = [
    "cache/agent-1/node_modules/.bin",
    ".nvm/versions/v22/bin",
    "venv/bin",
    ".pyenv/shims",
    ".local/bin",
    "scripts",
    "project/shims",
]
NODE = [".nvm/versions/v22/bin", ".nvm/versions/v22/lib"]
ENVIRONMENT = [
    "venv/pyvenv.cfg",
    "venv/bin",
    ".pyenv/versions/3.11/bin",
    ".pyenv/versions/3.11/lib",
]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("agent", ["cache/agent-1/node_modules", *NODE]),
        ("global", [*NODE, ".nvm/versions/v22/lib/node_modules"]),
        ("mini", ENVIRONMENT),
        ("tox", [".pyenv/shims", ".pyenv/versions"]),
        ("deploy", ["project/shims/deploy"]),
        ("user-agent", [".local/bin/user-agent", ".local/lib/python3.11"]),
        ("mini-by-pipx", [".local/bin/mini-by-pipx", ".local/lib/python3.11", *ENVIRONMENT]),
        (
            "claude",
            [".local/bin/claude", ".local/lib/python3.11", ".local/share/claude/versions/2"],
        ),
        ("run.sh", ["scripts/run.sh"]),
        ("not-a-program", []),
        ("no-such-program", []),
        ("sh", []),
    ],
)
def test_a_program_is_found_with_all_of_its_installation_and_no_more(place, program, expected):
    path = ":".join([*(str(place / folder) for folder in FOLDERS), "/usr/bin", "/bin"])
    found = tool_folders(program, path)
    assert {folder.relative_to(place) for folder in found} == {Path(folder) for folder in expected}


def test_a_program_of_a_folder_that_rolltap_runs_in_is_found_only_by_an_absolute_path(
    place, monkeypatch
):
    monkeypatch.chdir(place / "scripts")
    assert tool_folders("./run.sh", "") == tool_folders("run.sh", ".:") == ()
    assert tool_folders(f"{place}/scripts/run.sh", "") == (place / "scripts" / "run.sh",)


def test_a_project_of_the_system_is_found_around_its_environment():
    places = [
        "/usr/local/p/.venv",
        "/usr/local/p",
        "/usr/share/p/envs/a",
        "/usr/lib/venv",
        "/srv/p/.venv",
        "/usr",
    ]
    found = projects_around([Path(place, "pyvenv.cfg") for place in places])
    assert found == [
        Path(path) for path in ("/usr/local/p", "/usr/local/p", "/usr/share/p", "/usr/lib/venv")
    ]
