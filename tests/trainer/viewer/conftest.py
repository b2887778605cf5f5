import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn

from rolltap.trainer.viewer.app import link, make_app
from rolltap.trainer.viewer.reader import RunReader
from tests.trainer.viewer.runs import write_viewed_run


@contextmanager
def serving(run: Path) -> Iterator[str]:
    """Serve a run, and yield the link that opens it. It ends when the server has."""
    reader = RunReader(run)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(make_app(reader, "secret"), log_level="warning", lifespan="off")
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield link("127.0.0.1", listening.getsockname()[1], "secret")
        finally:
            server.should_exit = True
            thread.join()
            reader.close()


@pytest.fixture(scope="module")
def viewed_run(tmp_path_factory, tokenizer, tokenizer_folder) -> Path:
    """A run that tests do not change."""
    folder = tmp_path_factory.mktemp("viewed") / "run"
    return write_viewed_run(folder, tokenizer, str(tokenizer_folder))


@pytest.fixture(scope="module")
def browser():
    """A Chromium. It ends with the module: Playwright's event loop would be in the way of tests
    with their own."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed; recipes/environments.sh installs it")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    options = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-sync",
        "--disable-quic",
        "--no-first-run",
    ]
    options += ["--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=program, args=options)
        yield chromium
        chromium.close()


@pytest.fixture
def serve():
    """Return a function that serves a run and returns the link that opens it, until after the
    test."""
    with ExitStack() as stack:
        yield lambda run: stack.enter_context(serving(run))


@pytest.fixture
def open_page(browser, serve):
    """Return a function that opens a link in a page. A message of an error or a request elsewhere
    fails the test."""
    opened = []
    faults = []

    def open_link(url: str, **options):
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        own = (url.split("?")[0], "data:")

        def note_message(message):
            if message.type == "error":
                faults.append(message.text)

        def note_request(request):
            if not request.url.startswith(own):
                faults.append(request.url)

        def note_error(error):
            faults.append(str(error))

        page.on("console", note_message)
        page.on("pageerror", note_error)
        page.on("request", note_request)
        page.goto(url)
        page.wait_for_selector("h1")
        return page

    yield open_link
    for context in opened:
        context.close()
    assert faults == []


@pytest.fixture
def page(open_page, served):
    """The page of the run of `viewed_run`, of which all sessions were read."""
    shown = open_page(served)
    all_read(shown)
    return shown


def all_read(page) -> None:
    """Wait until the page of the run `viewed_run` shows that all its sessions were read."""
    page.wait_for_selector("text=left out: auxiliary")
    page.wait_for_selector("[role=status]", state="detached")


@pytest.fixture(scope="module")
def served(viewed_run):
    with serving(viewed_run) as url:
        yield url
