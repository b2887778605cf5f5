"""The pictures of the page in `trainer/viewer/screenshots`, of a small run that is written for
them.

    python -m tests.trainer.viewer.screenshots

They need Chromium and the fonts DejaVu, which have every character of them: `apt-get install
chromium fonts-dejavu`.
"""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from rolltap.addons.store.records import Event
from tests.factories import write_run
from tests.trainer.viewer.conftest import serving
from tests.trainer.viewer.runs import Conversation, later, tool, user

ROOT = Path(__file__).parents[3]
PICTURES = {
    "session": "#/session/parser.0-1",
    "call": "#/session/parser.0-1/call/parser-4?color=log-probability",
    "compare": "#/compare?a=parser.0-0&b=parser.0-1",
}
READY = {"session": ".callblock", "call": ".tokens span", "compare": "text=then in"}
"""The last part of each view that is drawn."""
SYSTEM = {
    "role": "system",
    "content": (
        "You are a programmer who works in a shell. Read the files before you change them. Run the"
        " tests after each change. Say in one sentence what you did when the tests pass."
    ),
}
ASKED = user(
    "The parser in dates.py refuses 2026.01.31. Accept dots beside dashes, and keep the tests"
    " green."
)
SOURCE = """from datetime import date


def parse(text):
    year, month, day = text.split("-")
    return date(int(year), int(month), int(day))"""
FAILED = """FAILED test_dates.py::test_dots - ValueError: not enough values to unpack (expected 3, got 1)
1 failed, 4 passed in 0.03s"""


def write_session(tokenizer, session_id: str, start: float, *, is_right: bool) -> list:
    """Return the rows of a session that reads, tests and changes the parser, rightly or not."""
    talk = Conversation(tokenizer, session_id, start)
    first = talk.say([SYSTEM, ASKED], "I read the parser first.", "cat dates.py", seconds=3)
    second = talk.say([tool(SOURCE)], "Now the tests.", "pytest -q", after=first, seconds=2)
    helper = talk.say(
        [user("Find every caller of dates.parse.")],
        "I search.",
        "grep -rn parse .",
        role="subagent",
        seconds=2,
    )
    talk.say(
        [tool("report.py:12: parse(row[0])")],
        "One: report.py.",
        after=helper,
        role="subagent",
        seconds=2,
    )
    if is_right:
        command = 'sed -i \'s/text.split("-")/re.split("[-.]", text)/; 1i import re\' dates.py'
        third = talk.say([tool(FAILED)], "I split at both.", command, after=second, seconds=4)
        fourth = talk.say([tool("")], "I run the tests again.", "pytest -q", after=third)
        talk.say(
            [tool("5 passed in 0.02s")], "Dots are accepted, and all tests pass.", after=fourth
        )
    else:
        command = 'sed -i \'s/split("-")/split(".")/\' dates.py'
        third = talk.say([tool(FAILED)], "I split at the dot.", command, after=second, seconds=4)
        talk.say([tool("")], "The parser accepts dots now.", after=third)
    refused = Event(
        session_id=session_id, kind="refused", host="pypi.org", path="/simple", at=later(start + 8)
    )
    passed = "passed" if is_right else "failed"
    row = talk.end(
        task_id="parser",
        group_id="parser.0",
        harness="mini-swe-agent",
        reward=float(is_right),
        evidence={"tests": {"test_dots": "passed", "test_dashes": passed}},
    )
    row.started_at = later(start - 2)
    return [*talk.calls, refused, row]


def take_pictures(folder: Path) -> None:
    """Write the pictures to a folder."""
    sys.path.insert(0, str(ROOT / "recipes" / "quickstart"))
    import words
    from transformers import AutoTokenizer

    with TemporaryDirectory() as temporary, sync_playwright() as started:
        model = Path(temporary, "model")
        words.make_tokenizer(words.filler_text()).save_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        rows = write_session(tokenizer, "parser.0-0", 0, is_right=True)
        rows += write_session(tokenizer, "parser.0-1", 3, is_right=False)
        run = write_run(Path(temporary, "first"), *rows, model=str(model))
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        with serving(run) as url:
            page.goto(url)
            for name, address in PICTURES.items():
                page.evaluate("address => { location.hash = address }", address)
                page.wait_for_selector(f"{READY[name]} >> visible=true")
                page.screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    take_pictures(ROOT / "trainer" / "viewer" / "screenshots")
