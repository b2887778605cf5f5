"""The `rolltap` command: its subcommands, and its exit status."""

import signal
import sys
from types import FrameType

import click

from rolltap.addons.errors import RolltapError
from rolltap.trainer.cli import doctor, edit, fleet, init, rerun, rollout, runs, service, tasks, train, view
from rolltap.trainer.console import plain_console, runs_first


class InOrder(click.Group):
    """A group whose help lists its commands in the order of work, not of the alphabet."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of the commands as they were given."""
        return list(self.commands)


@click.group(
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"]},
    commands=[
        train.serve_command,
        rollout.record_command,
        rerun.rerun_command,
        rerun.fork_command,
        rollout.env_command,
        doctor.doctor_command,
        init.init_command,
        tasks.tasks_group,
        rollout.rollout_command,
        rollout.reward_command,
        tasks.judge_command,
        service.service_command,
        fleet.fleet_group,
        train.train_command,
        runs.inspect_command,
        view.view_command,
        runs.check_command,
        runs.score_command,
        runs.compare_command,
        train.engine_command,
        runs.traces_command,
        runs.export_command,
        edit.import_command,
        edit.merge_command,
        edit.split_command,
        edit.filter_command,
        runs.verify_command,
        rollout.addon_command,
    ],
)
@click.version_option(package_name="rolltap", prog_name="rolltap")
def rolltap() -> None:
    """Record agent rollouts off the wire, and train on them."""


def main() -> None:
    """The console script."""
    run(rolltap)


def run(command: click.Command) -> None:
    """Run a command as a program.

    Exit status: 1 after `RolltapError` or `OSError`, with a message; 2 after a wrong option or model; 130 after Ctrl-C
    or SIGTERM. Of several processes that a launcher started, the first one alone says what is said on all of them.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        if runs_first():
            error.show()
        sys.exit(error.exit_code)
    except (RolltapError, OSError) as error:
        plain_console().print(f"error: {error}", style="red")
        sys.exit(getattr(error, "exit_status", 1))
    except (KeyboardInterrupt, click.Abort):
        if runs_first():
            plain_console().print("stopped by a signal; committed calls stay in the run")
        sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does: an event loop's own handler cancels its main task."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(number, frame)
    else:  # Ctrl-C is ignored
        raise KeyboardInterrupt
