"""Pages link to files of the checkout, which the site does not have: their paths are named. Pictures are copied."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PICTURES = [*ROOT.glob("trainer/viewer/screenshots/*.png")]
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures of the pages."""
    for picture in PICTURES:
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name the path in the place of a link that leads out of the pages."""

    def named(link: re.Match[str]) -> str:
        target = os.path.normpath(Path(config.docs_dir, link[3]))
        path = os.path.relpath(target, ROOT)
        if link[1]:
            return f"![{link[2]}]({Path(path).name})"
        if link[2].startswith("`"):
            return f"`{path}`"
        return f"{link[2]} (`{path}`)"

    return OUTSIDE.sub(named, markdown)
