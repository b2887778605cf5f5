"""The commands that read a run folder: `rolltap inspect` and `rolltap check`."""

import json
import sys
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from rolltap.trainer.progress import progress_bar
from rolltap.trainer.views import show
from rolltap.trainer.views.check import check_run, print_report
from rolltap.trainer.views.inspect import view_call, view_session
from rolltap.trainer.views.report import print_summary, summarize

_RUN = click.Path(path_type=Path, file_okay=False)


def print_run(run: Path, as_json: bool) -> None:
    """Print the summary of a run. Raises as `summarize`."""
    summary = summarize(run)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
    else:
        print_summary(summary, Console())


@click.command("inspect")
@click.argument("run", type=_RUN)
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


@click.command("check")
@click.argument("run", type=_RUN)
@click.option("--engine", default="http://127.0.0.1:8000", show_default=True, help="URL of the vLLM server.")
@click.option("--sample", default=100, show_default=True, type=click.IntRange(1), help="Calls to score at most.")
@click.option("--seed", default=0, show_default=True, help="Chooses the calls.")
@click.option(
    "--threshold",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0),
    help="The mean absolute difference that is still within, in nats. An engine in float32 on CPU repeats itself "
    "within 0.0001; bfloat16 differs more, as results depend on what is computed in the same batch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check_command(run: Path, engine: str, sample: int, seed: int, threshold: float, as_json: bool) -> None:
    """Score calls of a RUN again on a running engine.

    Their log-probabilities are compared with the recorded ones.
    Ends with status 0 when the mean absolute difference of every kind of prompt and policy version is within the
    threshold, else with 1. Calls of weights that the engine does not serve any more are skipped.
    """
    with progress_bar(Console(stderr=True)) as advance:
        report = check_run(
            run,
            engine,
            sample=sample,
            seed=seed,
            threshold=threshold,
            progress=partial(advance, "calls scored"),
        )
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        print_report(report, Console())
    sys.exit(0 if report.within else 1)
