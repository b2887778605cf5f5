"""Folders on the command line."""

from pathlib import Path

import click

RUN = click.Path(path_type=Path, file_okay=False, exists=True)
NEW = click.Path(path_type=Path, file_okay=False)

out_option = click.option("--out", type=NEW, required=True, help="The folder to write. It must be new or empty.")
