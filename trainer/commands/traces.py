"""`rolltap traces`: builds the traces of a run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TextIO, get_args

import click
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import FOLDER, examples
from rolltap.types import TRAINED_ROLES, CallRole, Strategy


def _roles(value: str | tuple[CallRole, ...]) -> tuple[CallRole, ...]:
    """Return roles that are separated by commas as a tuple, each once, in their usual order."""
    if isinstance(value, tuple):
        return value
    asked = {role.strip() for role in value.split(",")}
    known = get_args(CallRole)
    if unknown := asked - set(known):
        raise click.BadParameter(f"{', '.join(map(repr, sorted(unknown)))}: choose among {', '.join(known)}")
    return tuple(role for role in known if role in asked)


@click.command(
    "traces",
    epilog=examples(
        "rolltap traces runs/first --out first-traces",
        "rolltap traces runs/first --json --roles agent,subagent > traces.jsonl",
    ),
)
@click.argument("run", type=FOLDER)
@click.option(
    "--strategy",
    type=click.Choice(get_args(Strategy)),
    default="prefix_merging",
    show_default=True,
    help="per_request: one trace for each trained call. prefix_merging: one for each path of the call tree. tree: the "
    "same, with the prefix that each shares with an earlier one.",
)
@click.option(
    "--roles",
    type=_roles,
    default=TRAINED_ROLES,
    metavar="ROLE,...",
    help=f"Roles of the calls to train: {', '.join(get_args(CallRole))}; by default {', '.join(TRAINED_ROLES)}.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="Cut off the end of longer traces.")
@click.option("--out", type=FOLDER, help="Write a dataset into this folder, which must be new or empty.")
@click.option("--json", "as_json", is_flag=True, help="Print each trace as a line of JSON.")
@click.option("--ledger", "ledger_file", type=click.File("w", lazy=True), help="Write the ledger as JSON.")
def traces_command(
    run: Path,
    strategy: Strategy,
    roles: tuple[CallRole, ...],
    max_tokens: int | None,
    out: Path | None,
    as_json: bool,
    ledger_file: TextIO | None,
) -> None:
    """Build the traces of a RUN, to train on.

    `datasets.load_from_disk` opens what --out names. Sessions without a reward are there too, with the reward null;
    the ledger has their tokens as fault or no_reward.
    """
    if out is None and not as_json and ledger_file is None:
        raise click.UsageError("say where the traces go: --out DIR, --json, or --ledger FILE for their ledger alone")
    traces = rolltap.open_run(run).traces(strategy, roles=roles, max_tokens=max_tokens)
    each = _print_json if as_json else None
    totals = traces.totals(each) if out is None else traces.save(out, each)
    if ledger_file is not None:
        ledger_file.write(json.dumps(asdict(totals.ledger), indent=2) + "\n")
    console = Console(stderr=True)
    where = "" if out is None else f" in {out}"
    console.print(f"{totals.traces:,} traces of {totals.sessions:,} sessions{where}", markup=False, soft_wrap=True)
    console.print(totals.ledger)


def _print_json(trace: rolltap.Trace) -> None:
    click.echo(json.dumps(trace.to_json()))
