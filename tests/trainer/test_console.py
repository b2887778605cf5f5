"""Progress of work that takes hours, and of the engines that it needs."""

import os
import re
import subprocess
import sys
from io import StringIO
from threading import Event

import pytest
from rich.console import Console

from rolltap.trainer import console
from rolltap.trainer.console import SAY_SECONDS, Watch, nodes_started, watched

URL = "http://e"


class Watched:
    """A watch of the engines in `silent`. `shown` and `said` are what it gave to the bar and as
    lines."""

    def __init__(self):
        self.silent = []
        self.shown = []
        self.said = []
        self.watch = Watch(lambda: [*self.silent], self.show, self.said.append, 0.0)

    def show(self, *progress):
        self.shown.append(progress)


@pytest.fixture
def seen():
    return Watched()


@pytest.fixture
def watch(seen):
    return seen.watch


def test_a_line_comes_when_more_is_done_and_after_a_while_in_any_case(watch, seen):
    watch.tick(5)
    assert seen.said == []  # there is nothing to say
    watch.advance("0 of 2 sessions: 2 preparing", 0, 2)
    watch.tick(10)
    watch.advance("0 of 2 sessions: 2 running", 0, 2)
    watch.tick(SAY_SECONDS)
    watch.tick(SAY_SECONDS + 5)
    watch.advance("1 of 2 sessions: 1 running", 1, 2)
    watch.tick(SAY_SECONDS + 10)
    watch.tick(2 * SAY_SECONDS + 5)
    watch.tick(2 * SAY_SECONDS + 10)
    assert seen.said == ["0 of 2 sessions: 2 running", *["1 of 2 sessions: 1 running"] * 2]


def test_an_engine_that_ceases_to_answer_is_told_at_once_and_again_and_so_is_its_return(
    watch, seen
):
    watch.tick(5)
    seen.silent.append(URL)
    for now in range(10, 50, 5):
        watch.tick(now)
    seen.silent.clear()
    watch.tick(50)
    watch.tick(55 + SAY_SECONDS)
    gone = f"the engine at {URL} has not answered for"
    assert seen.said == [f"{gone} 5 s", f"{gone} 35 s", f"the engine at {URL} answers again"]


def test_the_bar_has_the_same_facts(watch, seen):
    seen.silent.append(URL)
    watch.advance("0 of 2 sessions", 0, 2)
    watch.tick(5)
    watch.advance("1 of 2 sessions", 1, 2)
    gone = f"the engine at {URL} has not answered for 5 s"
    assert seen.shown == [
        ("0 of 2 sessions", 0, 2),
        (f"0 of 2 sessions; {gone}", 0, 2),
        (f"1 of 2 sessions; {gone}", 1, 2),
    ]


@pytest.mark.parametrize(
    ("terminal", "bar", "lines"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_without_a_bar_there_are_lines(monkeypatch, terminal, bar, lines):
    monkeypatch.setattr(console, "ASK_SECONDS", 0.0)
    asked = Event()

    def ask():
        if written.getvalue() or shown.is_set():
            asked.set()
        return [URL]

    written, shown = StringIO(), Event()
    monkeypatch.setattr(console.Progress, "update", lambda *_, **how: shown.set())
    with watched(ask, Console(file=written, force_terminal=terminal), bar=bar):
        asked.wait()
        while lines and not written.getvalue().endswith(" s\n"):
            Event().wait(0.001)
    said = rf"the engine at {URL} has not answered for \d+ s\n"
    assert bool(re.search(said, written.getvalue())) == lines


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [({}, 1), ({"WORLD_SIZE": 8}, 1), ({"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4}, 2)],
)
def test_the_launcher_says_on_how_many_nodes_it_started(monkeypatch, variables, nodes):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert nodes_started() == nodes


WAITING = """
import signal
from rolltap.trainer.console import end_with_launcher
signal.signal(signal.SIGALRM, lambda *_: print("left", flush=True))
signal.alarm(600)
end_with_launcher()
print("ready", flush=True)
signal.pause()
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_ends_with_a_launcher_that_is_killed(rank):
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": str(rank)}
    command = [sys.executable, "-c", LAUNCHER, WAITING]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.read() == ""
