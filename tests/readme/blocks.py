"""The fenced code blocks of the pages for readers, in the order in which their blocks run."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

SITE = ROOT / "recipes" / "site"
MENU = re.findall(r"- (?:\w+: )?(\S+\.md)$", (SITE / "mkdocs.yml").read_text(), re.MULTILINE)
PAGES = [SITE / "pages" / name for name in MENU]
"""The pages of the site, in the order of its menu."""
DOCUMENTS = [
    *(ROOT / folder / "README.md" for folder in (".", "addons", "trainer")),
    *PAGES,
    *sorted((ROOT / "recipes").rglob("README.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block. `line` is that of its first line of code, counted from 1."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        """The first line of code without a comment after it."""
        return self.text.partition("\n")[0].partition("  #")[0].rstrip()

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(document, text.count("\n", 0, match.start(2)) + 1, match[1], match[2])
        for match in FENCE.finditer(text)
    ]


def prose_of(document: Path) -> str:
    return FENCE.sub("", document.read_text())


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
