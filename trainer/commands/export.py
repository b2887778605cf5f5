"""`rolltap export`: a run in other programs' formats."""

import importlib
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.staging import new_folder
from rolltap.trainer.commands.options import FOLDER
from rolltap.trainer.progress import progress_bar

_FORMATS = ("parquet", "openenv", "atif", "messages")
"""The modules of `rolltap.trainer.exports` that write a folder."""


@click.command("export")
@click.argument("run", type=FOLDER)
@click.option(
    "--to",
    "target",
    type=click.Choice([*_FORMATS, "hub"]),
    required=True,
    help="parquet: a dataset for the Hub and its viewer. hub: the same, pushed. openenv: TrainingTrace JSON. "
    "atif: Harbor's trajectories. messages: plain chats.",
)
@click.option("--out", type=FOLDER, help="Write into this folder, which must be new or empty.")
@click.option("--repo", metavar="ORG/NAME", help="The dataset repository that --to hub pushes to.")
@click.option("--public", is_flag=True, help="Let a new repository be public; private if not given.")
def export_command(run: Path, target: str, out: Path | None, repo: str | None, public: bool) -> None:
    """Write a RUN in another format, or push it to the Hub.

    The Hub's token is that of `hf auth login` or HF_TOKEN. Nothing is pushed to a repository that is public already,
    unless --public says so; its former Parquet files and card are replaced.
    """
    console = Console(stderr=True)
    if target == "hub":
        if repo is None or out is not None:
            raise click.UsageError("--to hub takes --repo ORG/NAME, and no --out")
        url = _push(run, repo, public, console)
        console.print(f"{run} is at {url}", markup=False, soft_wrap=True)
        return
    if out is None or repo is not None or public:
        raise click.UsageError(f"--to {target} takes --out DIR, and neither --repo nor --public")
    # datasets takes a second to import, and the other commands do not need it
    export = importlib.import_module(f"rolltap.trainer.exports.{target}").export
    with new_folder(out) as folder, progress_bar(console) as advance:
        records = export(run, folder, advance)
    console.print(f"{records:,} records in {out}", markup=False, soft_wrap=True)


def _push(run: Path, repo: str, public: bool, console: Console) -> str:
    """Push the run as Parquet; returns where it is."""
    from rolltap.trainer.exports import parquet
    from rolltap.trainer.exports.hub import Repository

    read_metadata(run)
    repository = Repository(repo, public=public)
    with TemporaryDirectory(prefix="rolltap-") as temporary:
        folder = Path(temporary) / "data"
        with new_folder(folder) as unfinished, progress_bar(console) as advance:
            parquet.export(run, unfinished, advance, where=repository.name)
        return repository.upload(folder, f"{run.resolve().name}, exported by rolltap")
