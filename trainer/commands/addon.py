"""`rolltap addon`: the path of the recorder's script."""

import click

import rolltap


@click.command("addon")
def addon_command() -> None:
    """Print the path of the recorder's mitmproxy script.

    For `mitmdump -s "$(rolltap addon)"`.
    """
    click.echo(rolltap.Recorder.script())
