"""`rolltap addon`: where the recorder's script is."""

import click

from rolltap.trainer.rollouts.recorder import addon_path


@click.command("addon")
def addon_command() -> None:
    """Print the path of the recorder's mitmproxy script.

    For `mitmdump -s "$(rolltap addon)"`.
    """
    click.echo(addon_path())
