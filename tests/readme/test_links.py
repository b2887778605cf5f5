"""Links inside of the repository lead to files and headings that are there, and a row of a table is
one line."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.readme.blocks import DOCUMENTS, prose_of

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
BROKEN_ROW = re.compile(r"^\|.*[^|\n]$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
READERS = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "tests/bench/README.md"]


def anchors(document: Path) -> set[str]:
    """The names by which a page on the web shows the headings of a document."""
    found = set()
    for heading in HEADING.findall(prose_of(document)):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


def broken(document: Path) -> list[str]:
    lost = []
    for target, anchor in LINK.findall(prose_of(document)):
        there = (document.parent / target).resolve() if target else document
        page = there / "README.md" if there.is_dir() else there
        if not there.exists() or (anchor and anchor not in anchors(page)):
            lost.append(f"{target}#{anchor}" if anchor else target)
    return lost


@pytest.mark.parametrize("document", READERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_and_a_row_is_one_line(document):
    assert broken(document) == []
    assert BROKEN_ROW.findall(prose_of(document)) == []


def test_a_link_to_nothing_and_a_broken_row_are_found(tmp_path):
    assert BROKEN_ROW.findall("| a | b |\n| c | broken\nover two lines |\n") == ["| c | broken"]
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: of `code`\n[a](page.md#a-title-of-code) [b](#b) [c](none.md) [d](https://x.y/none)\n"
    )
    assert broken(page) == ["#b", "none.md"]


def test_every_reference_is_reached_from_the_first_page():
    reached = [ROOT / "README.md"]
    for page in reached:
        for target, _ in LINK.findall(prose_of(page)):
            there = (page.parent / target).resolve()
            if there.suffix == ".md" and there.is_file() and there not in reached:
                reached.append(there)
    assert set(DOCUMENTS) <= set(reached)
