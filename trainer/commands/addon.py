"""`rolltap addon`: the path of the recorder's script."""

import click

import rolltap
from rolltap.trainer.commands.options import examples


@click.command(
    "addon",
    epilog=examples(
        'mitmdump -s "$(rolltap addon)" --set rolltap_out=runs/first \\',
        "    --set rolltap_engine=http://127.0.0.1:8000 \\",
        "    --set rolltap_model=Qwen/Qwen3-4B",
    ),
)
def addon_command() -> None:
    """Print the path of the recorder's mitmproxy script.

    For `mitmdump -s "$(rolltap addon)"`.
    """
    click.echo(rolltap.Recorder.script())
