import os

import pytest

from rolltap.trainer.doctor.node import fetch_uses_proxy, node_version


@pytest.mark.parametrize(
    ("version", "follows"),
    [
        ("20.20.2", False),
        ("22.20.0", False),
        ("22.21.0", True),
        ("23.11.0", False),
        ("24.4.1", False),
        ("24.5.0", True),
        ("26.1.0", True),
    ],
)
def test_fetch_follows_the_proxy_from_the_versions_that_know_the_variable(version, follows):
    assert fetch_uses_proxy(version) == follows


@pytest.mark.parametrize(
    ("name", "first_line", "version"),
    [
        ("tool", "#!/usr/bin/env node", "20.1.2"),
        ("tool", "#!/usr/bin/env -S node --no-warnings", "20.1.2"),
        ("tool", "#!/usr/bin/env python3", ""),
        ("tool", "ELF", ""),
        ("node", "#!/bin/sh", "20.1.2"),
    ],
)
def test_a_program_of_node_is_known_by_its_first_line(name, first_line, version, tmp_path):
    for program, text in (("node", "#!/bin/sh\necho v20.1.2\n"), (name, f"{first_line}\necho v20.1.2\n")):
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    assert node_version(name, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == version


def test_a_program_that_is_not_there_has_no_node(tmp_path):
    assert node_version("tool", {"PATH": str(tmp_path)}) == ""


def test_node_at_a_path_of_its_own_is_asked_itself(tmp_path):
    for folder, version in (("first", "v22.21.0"), ("other", "v20.1.2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "node").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / folder / "node").chmod(0o755)
    assert node_version(str(tmp_path / "other" / "node"), {"PATH": f"{tmp_path / 'first'}:/bin"}) == "20.1.2"
