"""The line that ends a command: what a person may do next."""

import os
import signal
import subprocess
import sys
import threading

import click
import pytest

from rolltap.trainer.cli.main import SIGNALS, run, said_when_stopped
from rolltap.trainer.cli.options import next_line
from tests.trainer.cli.program import ROLLTAP


def test_the_next_command_can_be_pasted():
    assert next_line("view", "runs/my first") == "next: rolltap view 'runs/my first'"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "r.toml", "--out", "a b"],
            "; the same command goes on: rolltap train r.toml --out 'a b'",
        ),
        (["rollout", "t.jsonl"], "; the same command goes on: rolltap rollout t.jsonl"),
        (["service", "runs/1"], "; the same command goes on: rolltap service runs/1"),
        (["fork", "runs/1", "s"], "; the same command goes on: rolltap fork runs/1 s"),
        (["record", "--", "true"], "; committed calls stay in the run"),
        (["view", "runs/first"], ""),
        ([], ""),
    ],
)
def test_a_command_that_a_signal_stopped_says_how_it_goes_on(arguments, said):
    assert said_when_stopped(arguments) == f"stopped by a signal{said}"


@pytest.fixture
def signals(monkeypatch):
    """Put the handlers of signals back afterwards."""
    monkeypatch.setattr("sys.argv", ["work"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)}
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore some of them
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, *SIGNALS])
def test_every_signal_that_asks_a_command_to_end_does_what_ctrl_c_does(signals, capsys, number):
    with pytest.raises(SystemExit) as ended:
        run(click.Command("work", callback=lambda: signal.raise_signal(number)))
    assert ended.value.code == 130
    assert "stopped by a signal" in capsys.readouterr().err


class SignalledAtItsEnd:
    """Python drops an exception of `__del__`, as of the callbacks with which an import ends."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_python_drops_while_it_collects_an_object_comes_again(signals, capsys):
    hook = sys.unraisablehook

    def work():
        SignalledAtItsEnd()
        threading.Event().wait(60)

    with pytest.raises(SystemExit) as ended:
        run(click.Command("work", callback=work))
    assert ended.value.code == 130
    assert "Exception ignored" not in capsys.readouterr().err
    assert sys.unraisablehook is hook


def test_a_command_of_nohup_goes_on_without_its_terminal(signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(click.Command("work", callback=lambda: signal.raise_signal(signal.SIGHUP)))


def test_ctrl_c_while_the_program_is_loaded_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([ROLLTAP, "-h"], env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
