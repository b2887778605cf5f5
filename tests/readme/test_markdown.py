"""The pages are shown as they are meant: a row of a table is one line."""

import re

import pytest

from tests.conftest import ROOT
from tests.readme.blocks import prose_of
from tests.readme.test_links import READERS

BROKEN_ROW = re.compile(r"^\|.*[^|\n]$", re.MULTILINE)


@pytest.mark.parametrize("document", READERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_row_of_a_table_is_one_line(document):
    assert BROKEN_ROW.findall(prose_of(document)) == []


def test_a_broken_row_is_found():
    assert BROKEN_ROW.findall("| a | b |\n| c | broken\nover two lines |\n") == ["| c | broken"]
