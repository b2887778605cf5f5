"""`rolltap env`: prints the variables that send a program through a recorder."""

import json
import secrets
import shlex
from pathlib import Path
from typing import TextIO

import click
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import engine_option, examples, harness_option


@click.command(
    "env",
    epilog=examples(
        'eval "$(rolltap env --proxy http://127.0.0.1:8080 --harness pi)"',
        "rolltap env --proxy http://127.0.0.1:8080 --format docker > session.env",
    ),
)
@click.option("--proxy", required=True, metavar="URL", help="The recorder as the program reaches it: http://HOST:PORT.")
@click.option("--session", metavar="ID", help="Names the session in the dataset; a new name if not given.")
@harness_option()
@engine_option(help="URL of the vLLM server.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path),
    default="~/.mitmproxy/mitmproxy-ca-cert.pem",
    show_default=True,
    help="The recorder's CA certificate.",
)
@click.option("--secret-file", type=click.File(), help="The file of the recorder's rolltap_secret_file, if it has one.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "docker", "json"]),
    default="shell",
    show_default=True,
    help="Lines for a shell's eval, for `docker run --env-file`, or JSON.",
)
def env_command(
    proxy: str,
    session: str | None,
    preset: str | None,
    engine: str,
    ca: Path,
    secret_file: TextIO | None,
    form: str,
) -> None:
    """Print the variables that send a program through a recorder.

    The recorder runs already: see `rolltap addon`. The file rolltap-ca-bundle.pem is written beside the CA, with the
    usual root certificates and the CA. A container needs both files under the same paths.
    """
    recorder = rolltap.Proxy(proxy, ca=ca, secret=secret_file.read().strip() if secret_file else "")
    console = Console(stderr=True)
    session = session or f"session-{secrets.token_hex(4)}"
    environment = recorder.environment(session)
    if preset is not None:
        harness = rolltap.Harness.load(preset)
        environment = {**harness.environment(engine), **environment}
        for line in (f"start it as: {shlex.join([harness.program, *harness.arguments])}", *harness.quirks):
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"session: {session}; certificates: {recorder.bundle}", markup=False, soft_wrap=True)
    if form == "json":
        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        click.echo(f"export {name}={shlex.quote(value)}" if form == "shell" else f"{name}={value}")
