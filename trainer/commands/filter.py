"""`rolltap filter`: writes some sessions of a run to a new one."""

from pathlib import Path
from typing import get_args

import click

import rolltap
from rolltap.trainer.commands.options import RUN, examples, new_folder_option
from rolltap.types import CallRole, SessionStatus


@click.command(
    "filter",
    epilog=examples(
        "rolltap filter runs/first --min-reward 1 --out runs/solved",
        "rolltap filter runs/first --not-suspicious --out runs/sound",
    ),
)
@click.argument("run", type=RUN)
@new_folder_option
@click.option("--min-reward", type=float, help="Smallest reward.")
@click.option("--max-reward", type=float, help="Largest reward.")
@click.option("--harness", "harnesses", multiple=True, help="Name of the harness. Repeatable.")
@click.option(
    "--policy-version",
    "policy_versions",
    multiple=True,
    help="Weights of the session's first sampled token. Repeatable.",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(get_args(SessionStatus)),
    help="Session status. Repeatable.",
)
@click.option("--task", "tasks", multiple=True, metavar="ID", help="Name of the task. Repeatable.")
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    help="Where the session ran: process, sandbox, container or apptainer. Repeatable.",
)
@click.option(
    "--suspicious/--not-suspicious",
    default=None,
    help="Sessions with, or without, evidence of cheating. `rolltap inspect` shows it.",
)
@click.option(
    "--suspicion",
    "suspicions",
    multiple=True,
    metavar="RULE",
    help="Name of a rule that the session matched, as `rolltap inspect` shows it. Repeatable.",
)
@click.option("--session", "sessions", multiple=True, metavar="ID", help="Session id. Repeatable.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(get_args(CallRole)),
    help="Keep only calls of this role, and the calls that their prompts continue. A session without a call of these "
    "roles is left out. Repeatable.",
)
def filter_command(
    run: Path,
    out: Path,
    min_reward: float | None,
    max_reward: float | None,
    harnesses: tuple[str, ...],
    policy_versions: tuple[str, ...],
    statuses: tuple[SessionStatus, ...],
    tasks: tuple[str, ...],
    runtimes: tuple[str, ...],
    suspicious: bool | None,
    suspicions: tuple[str, ...],
    sessions: tuple[str, ...],
    roles: tuple[CallRole, ...],
) -> None:
    """Write some sessions of a RUN to a new run.

    They are those that meet every given criterion. An option that is given several times accepts each of its values. A
    session without a row has the status unknown, no harness, no policy version, no suspicions and no reward. Events
    without a session are left out.
    """
    run_of_them = rolltap.open_run(run).filter(
        out,
        min_reward=min_reward,
        max_reward=max_reward,
        harnesses=harnesses,
        policy_versions=policy_versions,
        statuses=statuses,
        session_ids=sessions,
        roles=roles,
        tasks=tasks,
        runtimes=runtimes,
        suspicious=suspicious,
        suspicions=suspicions,
    )
    click.echo(f"{len(run_of_them.sessions())} sessions in {out}")
