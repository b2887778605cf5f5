"""Measure `rolltap view` on a large run: time to the first answers, a long call, memory, and a run
as one file.

    python -m tests.bench.view --model MODEL

The run has sessions that grow to 40,000 tokens in 60 calls, with text that the tokenizer of MODEL
made of words. Memory is what the server itself holds (RssAnon), without the mapped files of the
run.
"""

import json
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
import numpy as np
from transformers import AutoTokenizer

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.traces.tokens import Tokens
from tests.bench.frame import Rows, command
from tests.factories import START, make_session

ROLLTAP = Path(sys.executable).with_name("rolltap")
CHROMIUM = Path("/usr/bin/chromium")
WORDS = [
    "the",
    "file",
    "has",
    "a",
    "test",
    "that",
    "fails",
    "when",
    "I",
    "run",
    "it",
    "so",
    "read",
    "one",
    "line",
]
SAMPLED = 0.3
"""Share of the sampled tokens."""
GROUP = 8


def write_run(folder: Path, model: Path, sessions: int, calls: int, tokens: int) -> Path:
    """Write a run whose sessions have `tokens` tokens each. The same arguments give the same
    run."""
    some = np.random.default_rng(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = " ".join(some.choice(WORDS, 50_000))
    ids = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    stream, places = ids["input_ids"], ids["offset_mapping"]
    turn = tokens // calls
    sampled = max(1, int(turn * SAMPLED))
    logprobs = (-some.exponential(0.3, len(stream))).tolist()
    write_metadata(folder, {"model": str(model)})
    with RunWriter(folder, "never") as writer:
        for number in range(sessions):
            session_id, before = f"session-{number:04}", None
            for place, start in enumerate(some.integers(0, len(stream) - turn, calls).tolist()):
                middle, end = start + turn - sampled, start + turn
                given, said = (
                    text[places[a][0] : places[b - 1][1]]
                    for a, b in ((start, middle), (middle, end))
                )
                known = 0 if before is None else len(before)
                prompt = Tokens(stream[start:middle], before)
                writer.add_call(
                    Call(
                        session_id=session_id,
                        call_id=f"{number:08x}{place:024x}",
                        parent_id=f"{number:08x}{place - 1:024x}" if place else None,
                        prefix_length=known,
                        kind="bridged" if place else "root",
                        prompt_ids=prompt,
                        completion_ids=stream[middle:end],
                        logprobs=logprobs[middle:end],
                        weight_versions=[VersionSpan(version="1", start=0, end=sampled)],
                        dialect="openai-chat",
                        model="model",
                        finish_reason="stop",
                        messages=json.dumps(
                            [{"role": "tool" if place else "user", "content": given}]
                        ),
                        reply=json.dumps({"role": "assistant", "content": said}),
                        started_at=START,
                    )
                )
                before = Tokens(stream[middle:end], prompt)
            group = f"g{number // GROUP}"
            writer.add_session(
                make_session(
                    session_id, group_id=group, task_id=group, reward=float(some.integers(2))
                )
            )
            writer.end_session()
    return folder


def last_call(session: int, calls: int) -> str:
    """Return the path of the last call of a session, which has all its tokens."""
    return f"api/sessions/session-{session:04}/calls/{session:08x}{calls - 1:024x}"


def own_megabytes(process: int) -> float:
    """Return the memory of a process without mapped files; 0 when it has ended."""
    found = re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[0]) / 1024 if found else 0.0


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

    def get(self, path: str) -> tuple[Any, float]:
        """Return an answer, and the seconds that it took."""
        start = time.perf_counter()
        answer = self.client.get(f"{self.url}{path}")
        seconds = time.perf_counter() - start
        assert answer.status_code == 200, answer.text
        return answer.json(), seconds

    def megabytes(self) -> float:
        """Return the memory of the process, without mapped files."""
        return own_megabytes(self._process.pid)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=60)


def serve_times(run: Path, calls: int) -> Rows:
    """Return what the answers of a server took that began with the first of them."""
    last = last_call(0, calls)
    with Server(run) as server:
        listens = time.perf_counter() - server.began
        _, first_run = server.get("api/run")
        _, first_rows = server.get("api/sessions")
        _, first_call = server.get(last)
        early = server.megabytes()
        _, other_call = server.get(last_call(1, calls))
        longest, peak = 0.0, early
        while True:
            found, seconds = server.get("api/run")
            longest, peak = max(longest, seconds), max(peak, server.megabytes())
            if found["read"]["sessions"] == found["read"]["of"]:
                break
            _, seconds = server.get(last)
            longest = max(longest, seconds)
            time.sleep(0.5)
        all_read = time.perf_counter() - server.began
        _, rows = server.get("api/sessions")
        _, session = server.get("api/sessions/session-0001")
        _, call = server.get(last)
        _, search = server.get("api/search?q=no%20such%20words")
        shown = in_browser(server.link, last)
        return [
            {
                "listens s": listens,
                "first api/run s": first_run,
                "first api/sessions s": first_rows,
                "first call s": first_call,
                "call of another session s": other_call,
                "longest while it reads s": longest,
                "all read s": all_read,
                "api/sessions s": rows,
                "session s": session,
                "call s": call,
                "search s": search,
                "MB at first": early,
                "MB at most": peak,
                "MB when all is read": server.megabytes(),
                **shown,
            }
        ]


def in_browser(address: str, call: str) -> dict[str, float]:
    """Return the seconds until a browser shows a page, and from clicks to the sessions and to a
    call in it.

    Needs playwright and Debian's Chromium; without them there are none.
    """
    if find_spec("playwright") is None or not CHROMIUM.exists():
        return {}
    from playwright.sync_api import sync_playwright

    _, _, session_id, _, call_id = call.split("/")
    views = {"sessions": ("#/sessions", "[type=search]")}
    views["call"] = f"#/session/{session_id}/call/{call_id}", ".tokens span"
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


def file_times(run: Path, folder: Path, calls: int, sessions: int, share: float) -> Rows:
    """Return what a file of some sessions takes. `share` is their share of the run."""
    out = folder / "run.html"
    ids = ",".join(f"session-{number:04}" for number in range(sessions))
    start = time.perf_counter()
    process = subprocess.Popen(
        [ROLLTAP, "view", run, "--out", out, "--sessions", ids], stderr=subprocess.DEVNULL
    )
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, own_megabytes(process.pid))
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    size, whole = (
        out.stat().st_size,
        sum(file.stat().st_size for file in run.glob("*.arrow")) * share,
    )
    row = {
        "sessions": sessions,
        "MB": size / 1e6,
        "MB in the run": whole / 1e6,
        "of the run": size / whole,
    }
    shown = in_browser(out.as_uri(), last_call(0, calls))
    return [{**row, "seconds": seconds, "MB of memory": peak, "wrong": process.returncode, **shown}]


@command
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True),
    required=True,
    help="Folder with a tokenizer.",
)
@click.option("--sessions", default=1000, show_default=True)
@click.option("--calls", default=60, show_default=True, help="Calls of a session.")
@click.option("--tokens", default=40_000, show_default=True, help="Tokens of a session.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="On the disk to measure.  [default: the system's]",
)
def main(
    model: Path, sessions: int, calls: int, tokens: int, folder: Path | None
) -> dict[str, Rows]:
    """Measure the server of the page, and a file."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        start = time.perf_counter()
        run = write_run(Path(scratch) / "run", model, sessions, calls, tokens)
        size = sum(file.stat().st_size for file in run.glob("*.arrow"))
        written = {"sessions": sessions, "tokens": sessions * tokens, "MB": size / 1e6}
        written["seconds to write"] = time.perf_counter() - start
        served = serve_times(run, calls)
        few = min(sessions, 50)
        return {
            "run": [written],
            "server": served,
            "file": file_times(run, Path(scratch), calls, few, few / sessions),
        }


if __name__ == "__main__":
    main()
