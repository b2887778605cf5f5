"""`rolltap inspect`: a run, a session or a call."""

from pathlib import Path

import click

from rolltap.trainer.commands.options import FOLDER, json_option, print_result
from rolltap.trainer.views.inspect import view_call, view_session
from rolltap.trainer.views.report import print_summary, summarize
from rolltap.trainer.views.show import load_decoder, print_call, print_session


@click.command("inspect")
@click.argument("run", type=FOLDER)
@click.argument("session", required=False)
@click.argument("call", required=False)
@json_option
def inspect_command(run: Path, session: str | None, call: str | None, as_json: bool) -> None:
    """Show a RUN, the call tree of a SESSION, or all of a CALL.

    A run: rewards, sessions, calls and the ledger of its tokens. The beginning of an id will do for it.
    """
    if session is None:
        print_result(summarize(run), as_json, print_summary)
    elif call is None:
        print_result(view_session(run, session), as_json, print_session)
    else:
        view = view_call(run, session, call)
        print_result(view, as_json, lambda view, console: print_call(view, load_decoder(run), console))
