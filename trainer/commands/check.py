"""`rolltap check`: compares recorded log-probabilities with a running engine's."""

import sys
from pathlib import Path

import click

import rolltap
from rolltap.trainer.commands.options import FOLDER, engine_option, examples, json_option, print_result


@click.command(
    "check",
    epilog=examples(
        "rolltap check runs/first",
        "rolltap check runs/first --engine http://127.0.0.1:8000 --sample 20",
    ),
)
@click.argument("run", type=FOLDER)
@engine_option(help="URL of the vLLM server.")
@click.option(
    "--sample", default=100, show_default=True, type=click.IntRange(1), help="Maximum number of calls to score."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the choice of calls.")
@click.option(
    "--threshold",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0),
    help="Maximum mean absolute difference, in nats, for exit status 0. The default is provisional: a float32 engine "
    "on CPU reproduces its log-probabilities within 0.0001; in bfloat16 differences are larger, because results depend "
    "on the batch, and were not measured.",
)
@json_option
def check_command(run: Path, engine: str, sample: int, seed: int, threshold: float, as_json: bool) -> None:
    """Score calls of a RUN again on a running engine.

    The log-probabilities of both times are compared.

    Exit status 0: the mean absolute difference of every kind of prompt and policy version is within the threshold.
    Exit status 1: one is not. Calls of weights that the engine does not serve are skipped and counted. So are those
    of the model that the engine was started with, unless run.json names the same one.
    """
    report = rolltap.open_run(run).check(engine, sample=sample, seed=seed, threshold=threshold)
    print_result(report, as_json)
    sys.exit(0 if report.within else 1)
