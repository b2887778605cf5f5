"""`rolltap reward`: gives a recorded session its reward."""

import json
from pathlib import Path

import click

import rolltap
from rolltap.trainer.commands.options import RUN, examples, json_option


@click.command(
    "reward",
    epilog=examples(
        "rolltap reward runs/first record-1a2b 0.5",
        "rolltap reward runs/first record-1a2b 1 --task words --part style=0.5",
    ),
    context_settings={"ignore_unknown_options": True},
)
@click.argument("run", type=RUN)
@click.argument("session")
@click.argument("value", type=float)
@click.option("--task", default="", metavar="ID", help="Name of the task. Sessions of a task are of one group.")
@click.option("--group", default="", metavar="ID", help="Sessions that are compared with each other.")
@click.option("--part", "parts", multiple=True, metavar="NAME=VALUE", help="A part of the reward. Repeatable.")
@click.option("--change", is_flag=True, help="Replace the reward that the session has.")
@json_option
def reward_command(
    run: Path,
    session: str,
    value: float,
    task: str,
    group: str,
    parts: tuple[str, ...],
    change: bool,
    as_json: bool,
) -> None:
    """Give SESSION of RUN the reward VALUE, a finite number.

    For sessions that `rolltap rollout` did not start: of `rolltap record`, or of programs of your own. A reward that
    was given before stays in the run, the newest counts. A session without a completed call has none. Unique prefixes
    of ids are accepted.
    """
    numbers = dict(map(_part, parts))
    opened = rolltap.open_run(run)
    rewarded = opened.reward(session, value, parts=numbers, task=task, group=group, change=change)
    if as_json:
        click.echo(json.dumps(opened.inspect_session(rewarded.session_id).to_json()["session"]))
        return
    where = f"task {rewarded.task_id or '-'}, group {rewarded.group_id or '-'}, revision {rewarded.revision}"
    click.echo(f"{rewarded.session_id}: {rewarded.reward:g} ({where})")


def _part(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, float(value)
    except ValueError:
        raise click.BadParameter(f"--part {text!r} is not written as NAME=NUMBER") from None
