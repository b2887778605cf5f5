"""`rolltap inspect`: shows a run, a session or a call."""

from pathlib import Path

import click

import rolltap
from rolltap.trainer.commands.options import FOLDER, examples, json_option, print_result


@click.command(
    "inspect",
    epilog=examples(
        "rolltap inspect runs/first",
        "rolltap inspect runs/first record-1a2b",
        "rolltap inspect runs/first record-1a2b 9f",
    ),
)
@click.argument("run", type=FOLDER)
@click.argument("session", required=False)
@click.argument("call", required=False)
@json_option
def inspect_command(run: Path, session: str | None, call: str | None, as_json: bool) -> None:
    """Show a RUN, the calls of a SESSION, or a CALL with its tokens.

    Unique prefixes of ids are accepted.
    """
    opened = rolltap.open_run(run)
    if session is None:
        print_result(opened.summary(), as_json)
    elif call is None:
        print_result(opened.inspect_session(session), as_json)
    else:
        print_result(opened.inspect_call(session, call), as_json)
