"""The `rolltap` command: its group, and how a command ends."""

import signal
import sys
from types import FrameType

import click
from rich.console import Console

from rolltap.addons.store.metadata import RunError
from rolltap.trainer.commands.addon import addon_command
from rolltap.trainer.commands.check import check_command
from rolltap.trainer.commands.env import env_command
from rolltap.trainer.commands.export import export_command
from rolltap.trainer.commands.inspect import inspect_command
from rolltap.trainer.commands.record import record_command
from rolltap.trainer.commands.rollout import rollout_command
from rolltap.trainer.commands.runs import filter_command, import_command, merge_command, split_command, verify_command
from rolltap.trainer.commands.serve import serve_command
from rolltap.trainer.commands.traces import traces_command
from rolltap.trainer.commands.train import train_command
from rolltap.trainer.errors import UserError
from rolltap.trainer.traces.ledger import LedgerError

_COMMANDS = [
    addon_command,
    serve_command,
    record_command,
    env_command,
    rollout_command,
    train_command,
    inspect_command,
    check_command,
    traces_command,
    export_command,
    import_command,
    merge_command,
    split_command,
    filter_command,
    verify_command,
]


@click.group(commands=_COMMANDS)
@click.version_option(package_name="rolltap")
def rolltap() -> None:
    """Taps agent rollouts off the wire, and trains on them."""


def main() -> None:
    """The console script."""
    run(rolltap)


def run(command: click.Command) -> None:
    """Run a command as a program: a user's error, a full disk and the like end it with status 1 and a message, Ctrl-C
    or SIGTERM with 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (UserError, RunError, LedgerError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        Console(stderr=True).print("stopped; nothing that was recorded is lost")
        sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop as Ctrl-C does: while an event loop runs its own handler cancels the tasks in order."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(number, frame)
    else:  # Ctrl-C is ignored
        raise KeyboardInterrupt
