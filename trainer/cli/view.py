"""`rolltap view`: shows a run in the browser."""

from pathlib import Path

import click

import rolltap
from rolltap.trainer.cli.options import PORT, RUN, command
from rolltap.trainer.console import plain_console


@command(
    "view",
    "rolltap view runs/first",
    "rolltap view runs/first --out first.html --sessions a-1,a-2",
)
@click.argument("run", type=RUN)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=PORT,
    default=0,
    show_default=True,
    help="Port to listen on; 0 is a free one.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one HTML file instead, to send or to keep.",
)
@click.option(
    "--sessions",
    metavar="ID,...",
    help="Sessions that the file has. By default all, if the run has at most 50.",
)
@click.option(
    "--redact",
    multiple=True,
    metavar="TEXT",
    help="Text that the file must not have. Repeatable.",
)
def view_command(
    run: Path,
    host: str,
    port: int,
    out: Path | None,
    sessions: str | None,
    redact: tuple[str, ...],
) -> None:
    """Show a RUN in the browser: rewards, sessions, calls and tokens.

    Prints a link, and serves until Ctrl-C. A run that is being recorded is followed.

    With --out it writes a file that opens without a network. Known forms of keys and tokens are
    redacted in it, and it says which.
    """
    console = plain_console()
    if out is not None:
        chosen = None
        if sessions is not None:
            chosen = [each.strip() for each in sessions.split(",") if each.strip()]
        written = rolltap.open_run(run).view_file(out, sessions=chosen, redact=redact)
        console.print(f"{out}:")
        for line in written.lines():
            console.print(line)
        return
    if sessions is not None or redact:
        raise click.UsageError("--sessions and --redact are for a file: give --out FILE.html")
    rolltap.view_run(
        run,
        host=host,
        port=port,
        say=lambda link: console.print(f"the run is shown at {link}"),
    )
