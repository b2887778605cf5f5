"""`rolltap filter`: some sessions of a run as a new one."""

from pathlib import Path
from typing import get_args

import click
from rich.console import Console

from rolltap.addons.store.records import CallRole, SessionStatus
from rolltap.trainer.commands.options import RUN, new_folder_option
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.runs.parts import Filter, filter_run


@click.command("filter")
@click.argument("run", type=RUN)
@new_folder_option
@click.option("--min-reward", type=float, help="The reward is at least this.")
@click.option("--max-reward", type=float, help="The reward is at most this.")
@click.option("--harness", "harnesses", multiple=True, help="The harness has this name.")
@click.option("--policy-version", "policy_versions", multiple=True, help="The session started with these weights.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(get_args(SessionStatus)), help="It ended so.")
@click.option("--session", "sessions", multiple=True, metavar="ID", help="The session has this id.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(get_args(CallRole)),
    help="Only calls of this role, and those that their prompts continue.",
)
def filter_command(
    run: Path,
    out: Path,
    min_reward: float | None,
    max_reward: float | None,
    harnesses: tuple[str, ...],
    policy_versions: tuple[str, ...],
    statuses: tuple[str, ...],
    sessions: tuple[str, ...],
    roles: tuple[CallRole, ...],
) -> None:
    """Write the sessions of a RUN that fit to a new run.

    They fit all that is asked for.
    An option that is given several times accepts each of its values. Sessions without a row in the run fit only
    --session and --role; those without a reward fit no --min-reward and --max-reward. Events of no session are left
    out.
    """
    criteria = Filter(min_reward, max_reward, harnesses, policy_versions, statuses, sessions, roles)
    with progress_bar(Console(stderr=True)) as advance:
        kept = filter_run(run, out, criteria, advance)
    click.echo(f"{kept} sessions in {out}")
