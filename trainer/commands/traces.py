"""`rolltap traces`: a run as something to train on."""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click
from rich.console import Console

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import CallRole
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.commands.options import FOLDER
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.traces.build import TRAINED_ROLES, Strategy
from rolltap.trainer.traces.reader import count_sessions
from rolltap.trainer.traces.sessions import Totals, TracedSession, TraceOptions, iter_traces
from rolltap.trainer.views.report import print_ledger


class _Roles(click.ParamType):
    """Roles of calls, separated by commas."""

    name = "roles"

    def convert(
        self, value: str | tuple[CallRole, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[CallRole, ...]:
        """The roles as a tuple, each once, in their usual order."""
        if isinstance(value, tuple):
            return value
        asked = {role.strip() for role in value.split(",")}
        if unknown := asked - set(get_args(CallRole)):
            self.fail(f"{', '.join(map(repr, sorted(unknown)))}: choose among {', '.join(get_args(CallRole))}")
        return tuple(role for role in get_args(CallRole) if role in asked)


@click.command("traces")
@click.argument("run", type=FOLDER)
@click.option(
    "--strategy",
    type=click.Choice(get_args(Strategy)),
    default="prefix_merging",
    show_default=True,
    help="One trace per call; one per path of the call tree; or the latter, naming what paths share.",
)
@click.option(
    "--roles",
    type=_Roles(),
    default=TRAINED_ROLES,
    metavar="ROLE,...",
    help=f"What calls to train: {', '.join(get_args(CallRole))}; by default {', '.join(TRAINED_ROLES)}.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="Cut longer traces off at their end.")
@click.option("--out", type=FOLDER, help="Write a dataset into this folder, which must be new or empty.")
@click.option("--json", "as_json", is_flag=True, help="Print each trace as a line of JSON.")
@click.option(
    "--ledger", "ledger_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the ledger as JSON."
)
def traces_command(
    run: Path,
    strategy: Strategy,
    roles: tuple[CallRole, ...],
    max_tokens: int | None,
    out: Path | None,
    as_json: bool,
    ledger_file: Path | None,
) -> None:
    """Build the traces of a RUN, to train on.

    `datasets.load_from_disk` opens what --out names. Sessions without a reward are there too, with the reward null.
    """
    if out is None and not as_json and ledger_file is None:
        raise click.UsageError("say where the traces go: --out DIR, --json, or --ledger FILE for their ledger alone")
    # datasets takes a second to import, and the other commands do not need it
    from rolltap.trainer.exports.card import traces_card
    from rolltap.trainer.exports.features import trace_json
    from rolltap.trainer.exports.trace_dataset import save_traces

    options, totals = TraceOptions(strategy, roles, max_tokens), Totals()
    console = Console(stderr=True)
    total = count_sessions(run)
    with progress_bar(console) as advance:

        def sessions() -> Iterator[TracedSession]:
            for traced in iter_traces(run, options):
                totals.add(traced)
                if as_json:
                    for trace in traced.traces:
                        click.echo(json.dumps(trace_json(trace)))
                yield traced
                advance("sessions", totals.sessions, total)

        if out is None:
            deque(sessions(), maxlen=0)
        else:
            save_traces(sessions(), out, lambda: traces_card(run, options, totals))
    totals.ledger.check()
    if ledger_file is not None:
        text = json.dumps(asdict(totals.ledger), indent=2) + "\n"
        try:
            write_atomically(ledger_file, text)
        except OSError as error:
            raise InputError(f"the ledger could not be written: {error}") from error
    where = "" if out is None else f" in {out}"
    console.print(f"{totals.traces:,} traces of {totals.sessions:,} sessions{where}", markup=False, soft_wrap=True)
    print_ledger(totals.ledger, console)
