"""`rolltap export`: writes a run in other programs' formats."""

from pathlib import Path
from typing import Literal, get_args

import click
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import FOLDER, examples
from rolltap.types import ExportFormat


@click.command(
    "export",
    epilog=examples(
        "rolltap export runs/first --to parquet --out first-parquet",
        "rolltap export runs/first --to hub --repo me/first",
    ),
)
@click.argument("run", type=FOLDER)
@click.option(
    "--to",
    "target",
    type=click.Choice([*get_args(ExportFormat), "hub"]),
    required=True,
    help="parquet: a dataset for the Hub and its viewer. hub: the same, pushed. openenv: TrainingTrace JSON. "
    "atif: Harbor's trajectories. messages: plain chats.",
)
@click.option("--out", type=FOLDER, help="Write into this folder, which must be new or empty.")
@click.option("--repo", metavar="ORG/NAME", help="The dataset repository that --to hub pushes to.")
@click.option("--public", is_flag=True, help="Create or update a public repository.")
def export_command(
    run: Path, target: ExportFormat | Literal["hub"], out: Path | None, repo: str | None, public: bool
) -> None:
    """Write a RUN in another format, or push it to the Hub.

    The Hub's token is that of `hf auth login` or HF_TOKEN. A repository that is public already is refused without
    --public. Former Parquet files and the card of the repository are replaced.
    """
    opened, console = rolltap.open_run(run), Console(stderr=True)
    if target == "hub":
        if repo is None or out is not None:
            raise click.UsageError("--to hub takes --repo ORG/NAME, and no --out")
        url = opened.push_to_hub(repo, public=public)
        console.print(f"{run} is at {url}", markup=False, soft_wrap=True)
        return
    if out is None or repo is not None or public:
        raise click.UsageError(f"--to {target} takes --out DIR, and neither --repo nor --public")
    records = opened.export(target, out)
    console.print(f"{records:,} records in {out}", markup=False, soft_wrap=True)
