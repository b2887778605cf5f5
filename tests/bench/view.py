"""Measure `rolltap view` on a large run: time to the first answers, a long call, memory, and a run
as one file.

    python -m tests.bench.view --model MODEL

The run has sessions that grow to 40,000 tokens of MODEL in 60 calls. Memory is what the server
itself holds (RssAnon), without the mapped files of the run.
"""

import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import httpx
from transformers import AutoTokenizer

from tests.bench.frame import Rows, command, folder_option, model_option
from tests.bench.growing import call_id, calls_option, session_id, tokens_option, write_run
from tests.bench.processes import resident_mb

ROLLTAP = Path(sys.executable).with_name("rolltap")
CHROMIUM = Path("/usr/bin/chromium")
SAMPLED = 0.3
"""Share of the sampled tokens."""
FILED = 50
"""Sessions of a file."""


def last_call(session: int, turns: int) -> str:
    """Return the path of the last call of a session, which has all its tokens."""
    return f"api/sessions/{session_id(session)}/calls/{call_id(session, turns - 1)}"


class Server:
    """`rolltap view` as a process; a context manager."""

    def __init__(self, run: Path) -> None:
        self.began = time.perf_counter()
        self._process = subprocess.Popen([ROLLTAP, "view", run], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        found = re.search(r"http://\S+", self._process.stderr.readline())
        assert found is not None
        self.link = found[0]
        self.client = httpx.Client(follow_redirects=True, timeout=600, trust_env=False)
        self.client.get(self.link)
        self.url = self.link.partition("?")[0]

    def seconds(self) -> float:
        """Return the time since its start."""
        return time.perf_counter() - self.began

    def get(self, path: str) -> tuple[Any, float]:
        """Return an answer, and the seconds that it took."""
        start = time.perf_counter()
        answer = self.client.get(f"{self.url}{path}")
        seconds = time.perf_counter() - start
        assert answer.status_code == 200, answer.text
        return answer.json(), seconds

    def megabytes(self) -> float:
        return resident_mb(self._process.pid)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGINT)
        self._process.communicate()


def serve_times(run: Path, turns: int) -> dict[str, float]:
    """Return what the answers of a server took that began with the first of them."""
    last = last_call(0, turns)
    with Server(run) as server:
        found = {"listens s": server.seconds()}

        def ask(what: str, path: str) -> None:
            _, found[f"{what} s"] = server.get(path)

        ask("first api/run", "api/run")
        ask("first api/sessions", "api/sessions")
        ask("first call", last)
        found["MB at first"] = peak = server.megabytes()
        ask("call of another session", last_call(1, turns))
        longest = 0.0
        while True:
            answer, seconds = server.get("api/run")
            peak = max(peak, server.megabytes())
            longest = max(longest, seconds)
            if answer["read"]["sessions"] == answer["read"]["of"]:
                break
            _, seconds = server.get(last)
            longest = max(longest, seconds)
            time.sleep(0.5)
        found["longest while it reads s"] = longest
        found["all read s"] = server.seconds()
        ask("api/sessions", "api/sessions")
        ask("session", f"api/sessions/{session_id(1)}")
        ask("call", last)
        ask("search", "api/search?q=no%20such%20words")
        shown = in_browser(server.link, last)
        memory = {"MB at most": peak, "MB when all is read": server.megabytes()}
    return found | memory | shown


def in_browser(address: str, call: str) -> dict[str, float]:
    """Return the seconds until a browser shows a page, and from clicks to the sessions and to a
    call in it.

    Needs playwright and Debian's Chromium; without them there are none.
    """
    if find_spec("playwright") is None or not CHROMIUM.exists():
        return {}
    from playwright.sync_api import sync_playwright

    _, _, session, _, last = call.split("/")
    views = {
        "sessions": ("#/sessions", "[type=search]"),
        "call": (f"#/session/{session}/call/{last}", ".tokens span"),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        start = time.perf_counter()
        page.goto(address)
        page.wait_for_selector("main table")
        found = {"browser: run s": time.perf_counter() - start}
        for name, (place, shown) in views.items():
            start = time.perf_counter()
            page.evaluate("place => { location.hash = place }", place)
            page.wait_for_selector(shown)
            found[f"browser: {name} s"] = time.perf_counter() - start
        browser.close()
    return found


def size_of(run: Path) -> int:
    return sum(file.stat().st_size for file in run.glob("*.arrow"))


def file_times(run: Path, out: Path, turns: int, filed: int, share: float) -> dict[str, Any]:
    """Return what a file of some sessions takes. `share` is their share of the run."""
    ids = ",".join(map(session_id, range(filed)))
    start = time.perf_counter()
    command = [ROLLTAP, "view", run, "--out", out, "--sessions", ids]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, resident_mb(process.pid))
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    size = out.stat().st_size
    whole = size_of(run) * share
    return {
        "sessions": filed,
        "MB": size / 1e6,
        "MB in the run": whole / 1e6,
        "of the run": size / whole,
        "seconds": seconds,
        "MB of memory": peak,
        "wrong": process.returncode,
        **in_browser(out.as_uri(), last_call(0, turns)),
    }


@command
@model_option
@click.option("--sessions", default=1000)
@calls_option
@tokens_option
@folder_option
def main(
    model: Path, sessions: int, turns: int, tokens: int, folder: Path | None
) -> dict[str, Rows]:
    """Measure the server of the page, and a file."""
    words = len(AutoTokenizer.from_pretrained(model))
    how = {"share": SAMPLED, "text": True, "model": str(model), "vocabulary": words}
    how |= {"dialect": "openai-chat", "finish_reason": "stop"}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        start = time.perf_counter()
        run = write_run(Path(scratch, "run"), sessions, turns, tokens, **how)
        written = {
            "sessions": sessions,
            "tokens": sessions * tokens,
            "MB": size_of(run) / 1e6,
            "seconds to write": time.perf_counter() - start,
        }
        served = serve_times(run, turns)
        filed = min(sessions, FILED)
        file = file_times(run, Path(scratch, "run.html"), turns, filed, filed / sessions)
    return {"run": [written], "server": [served], "file": [file]}


if __name__ == "__main__":
    main()
