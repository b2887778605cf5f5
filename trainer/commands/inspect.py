"""`rolltap inspect`: a run, a session or a call."""

import json
from pathlib import Path

import click
from rich.console import Console

from rolltap.trainer.commands.options import FOLDER
from rolltap.trainer.views import show
from rolltap.trainer.views.inspect import view_call, view_session
from rolltap.trainer.views.report import print_summary, summarize


def print_run(run: Path, as_json: bool) -> None:
    """Print the summary of a run. Raises as `summarize`."""
    summary = summarize(run)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
    else:
        print_summary(summary, Console())


@click.command("inspect")
@click.argument("run", type=FOLDER)
@click.argument("session", required=False)
@click.argument("call", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def inspect_command(run: Path, session: str | None, call: str | None, as_json: bool) -> None:
    """Show a RUN, the call tree of a SESSION, or all of a CALL.

    A run: rewards, sessions, calls and the ledger of its tokens. The beginning of an id will do for it.
    """
    if session is None:
        print_run(run, as_json)
    elif call is None:
        session_view = view_session(run, session)
        if as_json:
            click.echo(json.dumps(session_view.to_json()))
        else:
            show.print_session(session_view, Console())
    else:
        call_view = view_call(run, session, call)
        if as_json:
            click.echo(json.dumps(call_view.to_json()))
        else:
            show.print_call(call_view, show.load_decoder(run), Console())
