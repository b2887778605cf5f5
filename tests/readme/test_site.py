"""The site: every page is in its menu, messages are those of the code, and it loads nothing from
elsewhere."""

import re

import pytest

import rolltap
from tests.conftest import ROOT
from tests.readme.blocks import PAGES, SITE

BUILT = ROOT / "runs" / "site"
LOAD = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//|url\(["']?(?:https?:)?//"""
    r"""|@import[^;]*//|\bimport\(["']https?:|fetch\(["']https?:"""
)
"""Text that makes a browser load a file of another host, unlike a link that a reader follows."""
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def test_every_page_is_in_the_menu_once_and_is_named_on_the_first_one():
    assert sorted(PAGES) == sorted((SITE / "pages").glob("*.md"))
    first, *others = PAGES
    assert {page.name for page in others} <= set(re.findall(r"\]\((\S+?)\)", first.read_text()))


def test_the_reference_of_python_has_every_public_name():
    page = (SITE / "pages" / "api.md").read_text()
    assert sorted(re.findall(r"^::: rolltap\.(\w+)$", page, re.MULTILINE)) == sorted(
        rolltap.__all__
    )


def test_each_message_of_the_page_is_one_of_the_code():
    page = (SITE / "pages" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    files = [path for folder in ("addons", "trainer") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join("".join(STRING.findall(path.read_text())) for path in files)
    assert len(messages) > 20
    assert [message for message in messages if message not in code] == []


def test_the_first_page_has_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_built_site_loads_nothing_from_elsewhere():
    files = [path for path in BUILT.rglob("*") if path.suffix in (".html", ".js", ".css")]
    if not files:
        pytest.skip("it is not built: tests/run.sh builds it")
    assert [path for path in files if LOAD.search(path.read_text())] == []


@pytest.mark.parametrize(
    "text", ['<script src="https://a.b/c.js">', "a{src: url(//a.b/c.woff)}", 'fetch("https://a.b")']
)
def test_a_load_from_elsewhere_is_found(text):
    assert LOAD.search(text)
