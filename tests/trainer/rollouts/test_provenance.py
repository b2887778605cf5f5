"""Which program ran, in which version."""

import hashlib
import logging
import sys
from pathlib import Path

import pytest

from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.provenance import Provenances, find_version


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("2.1.329 (Claude Code)\n", "2.1.329"),
        ("codex-cli 0.169.0\n", "0.169.0"),
        ("This is mini-swe-agent version 2.4.6.\nCheck the v2 guide\n", "2.4.6"),
        ("v1.18.33", "1.18.33"),
        ("tool 1.2.0-beta.3+build5, 2026", "1.2.0-beta.3+build5"),
        (
            (
                "jwt.py:25: Warning: gone\nIt will be compatible before version 2.0.0.\n\nOpenHands"
                " CLI 1.16.0\n"
            ),
            "1.16.0",
        ),
        ("GitHub Copilot CLI 1.0.102.\nRun 'copilot update'\n", "1.0.102"),
        ("usage: sh [-c]", ""),
        ("", ""),
    ],
)
def test_the_version_is_the_first_number_at_the_end_of_a_line_or_the_first_that_a_program_prints(
    output, version
):
    assert find_version(output) == version


def harness(tmp_path, script, **fields):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Harness(name="x", program=str(program), headless=[], **fields)


async def test_the_program_is_asked_once_and_its_file_and_its_preset_have_digests(tmp_path):
    asked = tmp_path / "asked"
    found = harness(
        tmp_path, f'echo "$@" >> {asked}; echo x 1.2.3', version="1.2.3", version_arguments=["-V"]
    )
    provenances = Provenances(found, ProcessRuntime(), tmp_path)
    known = await provenances.of(None)
    assert known == await provenances.of(None)
    assert asked.read_text() == "-V\n"
    assert known.harness_version == "1.2.3"
    assert known.program_digest == hashlib.sha256(Path(found.program).read_bytes()).hexdigest()
    assert known.preset_digest == found.digest()


OTHER = (
    "has the version 1.3.0, and its preset was tested with 1.2.3: install it with `pip install x`,"
    " or expect"
)


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 1.3.0", "1.3.0"),
        ("echo 1.2.3; exit 2", ""),
        ("echo no number", ""),
        ("kill -9 $$", ""),
    ],
)
async def test_another_version_than_the_presets_is_a_warning_and_an_untold_one_is_none(
    tmp_path, caplog, script, version
):
    caplog.set_level(logging.WARNING)
    found = harness(tmp_path, script, version="1.2.3", install="pip install x")
    assert (
        await Provenances(found, ProcessRuntime(), tmp_path).of(None)
    ).harness_version == version
    assert [OTHER in line for line in caplog.messages] == ([True] if version else [])


def test_the_digest_of_a_preset_is_that_of_how_it_is_started():
    plain = Harness(name="x", program=sys.executable, headless=[])
    assert plain.digest() == plain.model_copy(update={"quirks": ["q"], "install": "i"}).digest()
    assert plain.digest() != plain.model_copy(update={"arguments": ["-I"]}).digest()


@pytest.mark.parametrize("named", ["./agent/__main__.py", "./agent", "{folder}/agent/__main__.py"])
async def test_a_change_of_a_file_that_the_preset_names_is_another_program(tmp_path, named):
    agent = tmp_path / "agent" / "__main__.py"
    agent.parent.mkdir()
    agent.write_text("")
    word = named.format(folder=tmp_path)
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nprogram = "python3"\narguments = ["{word}"]\nheadless = []\n'
    )
    harness = Harness.load(str(tmp_path / "x.toml"))

    async def digest():
        return (await Provenances(harness, ProcessRuntime(), tmp_path).of(None)).program_digest

    before = await digest()
    (agent.parent / "__pycache__").mkdir()
    (agent.parent / "__pycache__" / "agent.pyc").write_text("written by a session")
    assert await digest() == before
    agent.write_text("pass")
    assert await digest() != before
