"""The `rolltap` command: its subcommands, and its exit status."""

import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

try:
    import click

    from rolltap.addons.errors import RolltapError
    from rolltap.trainer.console import plain_console, runs_first
except KeyboardInterrupt:  # Ctrl-C at once: these imports take most of the time until `run`
    sys.exit(130)

COMMANDS = {
    "serve": ("train", "Start vLLM for recording and publishing."),
    "record": ("record", "Run one COMMAND under the recorder, and exit with its status."),
    "rerun": ("rerun", "Run a COMMAND again against SESSION of RUN, without an engine."),
    "fork": (
        "rerun",
        "Run the harness of SESSION of RUN again up to a call, and sample from there.",
    ),
    "env": ("record", "Print the variables that send a program through a recorder."),
    "doctor": (
        "doctor",
        "Try a program without an engine, or examine a model, and say what to set.",
    ),
    "init": ("init", "Write a preset, a task with its judge and a recipe into FOLDER."),
    "tasks": ("tasks", "Work on tasks before a rollout."),
    "rollout": ("rollout", "Run every task several times and record it."),
    "reward": ("record", "Give SESSION of RUN a reward."),
    "judge": ("tasks", "Judge recorded sessions of RUN again, without running them."),
    "service": ("service", "Serve rollouts by HTTP."),
    "fleet": ("fleet", "See the nodes that run sessions on a Ray cluster."),
    "train": ("train", "Record, train, publish and repeat, as a RECIPE says."),
    "inspect": ("runs", "Show a RUN, the calls of a SESSION, or a CALL with its tokens."),
    "view": ("view", "Show a RUN in the browser: rewards, sessions, calls and tokens."),
    "check": ("runs", "Score calls of a RUN again on a running engine."),
    "score": ("runs", "Store the log-probabilities of another model in a RUN."),
    "compare": ("runs", "Compare the mean rewards of two runs on the same tasks."),
    "engine": ("train", "Say what an engine serves, or reset it."),
    "traces": ("runs", "Build the traces of a RUN, to train on."),
    "export": ("runs", "Write a RUN in another format, or push it to the Hub."),
    "import": ("edit", "Write calls that another program made to a new RUN."),
    "merge": ("edit", "Write the sessions of several RUNS to one."),
    "split": ("edit", "Write the sessions of a RUN to several runs."),
    "filter": ("edit", "Write some sessions of a RUN to a new run."),
    "verify": ("runs", "Check a RUN for damage."),
    "addon": ("record", "Print the path of the recorder's mitmproxy script."),
}
"""Command -> its module and its line of the help, in the order of work. A module is imported when
its command runs."""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a command as Ctrl-C does."""
_AGAIN_SECONDS = 0.05
RESUMED = ("rollout", "fork", "service", "train", "score", "judge")
"""Commands that go on where they were stopped."""


class Rolltap(click.Group):
    """The group of `COMMANDS`. Its `commands` have their line of the help alone, so the help
    imports none of them."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of the commands as they were given."""
        return list(self.commands)

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is run."""
        name, command, rest = super().resolve_command(context, arguments)
        if name in COMMANDS:
            command = load(name)
        return name, command, rest


def load(name: str) -> click.Command:
    """Return the command `name`, whose module is imported."""
    module = import_module(f"rolltap.trainer.cli.{COMMANDS[name][0]}")
    for value in vars(module).values():
        if isinstance(value, click.Command) and value.name == name:
            return value
    raise LookupError(name)


@click.group(
    cls=Rolltap,
    context_settings={"help_option_names": ["-h", "--help"]},
    commands=[click.Command(name, short_help=line) for name, (_, line) in COMMANDS.items()],
)
@click.version_option(package_name="rolltap", prog_name="rolltap")
def rolltap() -> None:
    """Record agent rollouts off the wire, and train on them."""


def main() -> None:
    """The console script."""
    run(rolltap)


def run(command: click.Command) -> None:
    """Run a command as a program.

    Exit status: 1 after `RolltapError` or `OSError`, with a message; 2 after a wrong option or
    model; 130 after Ctrl-C or another of `SIGNALS`. Of several processes that a launcher started,
    the first one alone says what is said on all of them.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)
    try:
        with _dropped_signals_come_again():
            command.main(standalone_mode=False)
    except click.ClickException as error:
        if runs_first():
            error.show()
        sys.exit(error.exit_code)
    except (RolltapError, OSError) as error:
        plain_console().print(f"error: {error}", style="red")
        sys.exit(getattr(error, "exit_status", 1))
    except (KeyboardInterrupt, click.Abort):
        with suppress(OSError):  # the terminal is gone after SIGHUP
            if runs_first():
                plain_console().print(said_when_stopped(sys.argv[1:]))
        sys.exit(130)


def said_when_stopped(arguments: Sequence[str]) -> str:
    """Return what a command that a signal stopped says. `arguments` are those of `rolltap`."""
    name = next(iter(arguments), "")
    if name in RESUMED:
        line = shlex.join(["rolltap", *arguments])
        return f"stopped by a signal; the same command goes on: {line}"
    if name == "record":
        return "stopped by a signal; committed calls stay in the run"
    return "stopped by a signal"


@contextmanager
def _dropped_signals_come_again() -> Iterator[None]:
    """Raise a signal's `KeyboardInterrupt` again which Python has dropped.

    Python drops an exception of `__del__` and of a weak reference's callback, and calls
    `sys.unraisablehook`. Each import ends with such a callback, so without this a signal during one
    is lost, and the command goes on for ever.
    """
    hook = sys.unraisablehook

    def again(dropped: "sys.UnraisableHookArgs") -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            hook(dropped)
            return
        # from another thread, because this function's own exceptions are dropped too
        main_thread = threading.main_thread().ident
        timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main_thread, signal.SIGTERM))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does: an event loop's own handler cancels its main task."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(number, frame)
    else:  # Ctrl-C is ignored
        raise KeyboardInterrupt
