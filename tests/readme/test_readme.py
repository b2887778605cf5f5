"""Every code block of the pages runs, in the order of the pages, or a table says why not."""

import re
import shlex
import shutil

import pytest

import rolltap
from rolltap.trainer.cli.main import load
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.traces.reader import RecordedCalls
from rolltap.trainer.training.recipe import load_recipe
from tests.conftest import ROOT
from tests.readme.blocks import BLOCKS, DOCUMENTS, blocks_of, prose_of
from tests.readme.tables import EXAMPLE, FILES, SERVERS, SKIPPED, SUBSTITUTIONS
from tests.readme.workshop import RUNNABLE, Workshop, file_name
from tests.trainer.runs.exports.hub import loopback_hub

PROGRAMS = ("bash", "bwrap", "curl", "mini")
"""Programs that the blocks start and that are not in the environment of the tests."""
COMMAND = re.compile(r"^(?:\S*/)?rolltap ([^>\n]*)", re.MULTILINE)


@pytest.fixture(scope="module")
def workshop(engine, tmp_path_factory):
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}; tests/run.sh installs mini-swe-agent")
    with loopback_hub() as hub:
        workshop = Workshop(tmp_path_factory.mktemp("readme"), engine.url, engine.model_dir, hub)
        try:
            yield workshop
        finally:
            workshop.close()


def parameters():
    for block in BLOCKS:
        if reason := SKIPPED.get(block.first_line):
            yield pytest.param(block, id=str(block), marks=pytest.mark.skip(reason=reason))
        elif block in RUNNABLE:
            yield pytest.param(block, id=str(block))


@pytest.mark.engine
@pytest.mark.harness
@pytest.mark.parametrize("block", list(parameters()))
def test_a_block_ends_with_status_0(workshop, block):
    workshop.run_through(block)


@pytest.mark.engine
@pytest.mark.harness
def test_the_runs_of_the_blocks_are_sound_and_hold_calls(workshop):
    workshop.run_through(RUNNABLE[-1])
    runs = {path.parent.name: path.parent for path in (workshop.folder / "runs").glob("*/run.json")}
    names = "try first grpo a b wire imported both best my-agent my-agent-trained"
    assert runs.keys() == set(names.split())
    for name, run in runs.items():
        assert verify_run(run, lambda *_: None).sound, name
        assert RecordedCalls(run), name


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_or_is_a_file_or_is_named_with_a_reason(block):
    places = [block in RUNNABLE, file_name(block) is not None, block.first_line in SKIPPED]
    assert places.count(True) == 1, f"{block}: see tests/readme/tables.py"


def test_the_tables_name_only_what_is_there():
    texts = [block.text for block in BLOCKS]
    assert SKIPPED.keys() <= {block.first_line for block in BLOCKS}
    for start in (*FILES, *SERVERS):
        assert any(text.startswith(start) for text in texts), start
    for pattern in SUBSTITUTIONS:
        assert any(re.search(pattern, text) for text in texts), pattern


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_code_is_fenced(document):
    prose = prose_of(document)
    assert "```" not in prose
    assert not re.search(r"^\n {4,}\S", prose, re.MULTILINE)


def test_the_files_are_what_the_commands_expect(tmp_path):
    for block in BLOCKS:
        if (name := file_name(block)) is not None:
            (tmp_path / name).write_text(block.text)
    (tmp_path / "start").mkdir()
    assert [task.id for task in load_tasks(tmp_path / "tasks.jsonl")] == ["count"]
    assert load_recipe(tmp_path / "recipe.toml").tasks == tmp_path / "tasks.jsonl"
    harness = rolltap.Harness.load(str(tmp_path / "my-agent.toml"))
    assert harness.command_for("Work") == ["my-agent", "--no-telemetry", "--task=Work"]


def test_the_page_of_an_own_agent_shows_the_files_that_init_writes():
    page = ROOT / "recipes" / "site" / "pages" / "your-own-agent.md"
    shown = [block.text for block in blocks_of(page) if block.language != "sh"]
    assert sorted(shown) == sorted(EXAMPLE)


def test_a_command_that_is_not_run_has_options_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name in ("first", "try"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("recipe.toml", "recorder.secret", "tasks.jsonl"):
        (tmp_path / name).touch()
    for folder in ("repositories", "harbor", "tasks.jsonl"):
        (tmp_path / "runs" / "mini" / folder).mkdir(parents=True)
    for block in BLOCKS:
        if block.first_line in SKIPPED:
            for command in COMMAND.findall(block.text.replace("\\\n", "")):
                name, *arguments = shlex.split(command, comments=True)
                with load(name).make_context(name, arguments):
                    pass
