"""`rolltap check`: recorded log-probabilities against a running engine's."""

import sys
from pathlib import Path

import click
from rich.console import Console

from rolltap.trainer.commands.options import FOLDER, engine_option, json_option, print_result
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.views.check import check_run, print_report


@click.command("check")
@click.argument("run", type=FOLDER)
@engine_option(help="URL of the vLLM server.")
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
@json_option
def check_command(run: Path, engine: str, sample: int, seed: int, threshold: float, as_json: bool) -> None:
    """Score calls of a RUN again on a running engine.

    Their log-probabilities are compared with the recorded ones.
    Ends with status 0 when the mean absolute difference of every kind of prompt and policy version is within the
    threshold, else with 1. Calls of weights that the engine does not serve any more are skipped.
    """
    with progress_bar(Console(stderr=True)) as advance:
        report = check_run(run, engine, sample=sample, seed=seed, threshold=threshold, advance=advance)
    print_result(report, as_json, print_report)
    sys.exit(0 if report.within else 1)
