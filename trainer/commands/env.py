"""`rolltap env`: the variables that send a program through a recorder."""

import json
import os
import secrets
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import click
from rich.console import Console

from rolltap.addons.errors import InputError
from rolltap.trainer.commands.options import engine_option, harness_option
from rolltap.trainer.rollouts.environment import proxy_environment, proxy_url, write_bundle
from rolltap.trainer.rollouts.harness import load_harness


@click.command("env")
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
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "docker", "json"]),
    default="shell",
    show_default=True,
    help="Lines for a shell's eval, for `docker run --env-file`, or JSON.",
)
def env_command(proxy: str, session: str | None, preset: str | None, engine: str, ca: Path, form: str) -> None:
    """Print the variables that send a program through a recorder.

    The recorder runs already.
    ROLLTAP_SECRET holds the recorder's secret, if it has one. A file with the usual root certificates and the
    recorder's CA, rolltap-ca-bundle.pem, is written beside the CA. A container needs both files under the same paths.
    """
    address = urlsplit(proxy)
    if address.scheme != "http" or not address.hostname or "@" in address.netloc or address.path.strip("/"):
        raise InputError(f"--proxy {proxy}: write it as http://HOST:PORT")
    ca = ca.expanduser().absolute()
    if not ca.is_file():
        raise InputError(f"there is no CA certificate {ca}: the recorder makes it when it first starts; see --ca")
    console = Console(stderr=True)
    session = session or f"session-{secrets.token_hex(4)}"
    environment = {}
    if preset is not None:
        harness = load_harness(preset)
        environment = harness.environment(engine)
        for line in (f"start it as: {shlex.join([harness.program, *harness.arguments])}", *harness.quirks):
            console.print(line, markup=False, soft_wrap=True)
    bundle = ca.with_name("rolltap-ca-bundle.pem")
    try:
        write_bundle(ca, bundle)
    except OSError as error:
        raise InputError(f"cannot write {bundle}: {error.strerror}; copy the CA elsewhere and see --ca") from error
    url = proxy_url(address.netloc, session, os.environ.get("ROLLTAP_SECRET", ""))
    environment = {**environment, **proxy_environment(url, ca, bundle)}
    console.print(f"session: {session}; certificates: {bundle}", markup=False, soft_wrap=True)
    if form == "json":
        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        click.echo(f"export {name}={shlex.quote(value)}" if form == "shell" else f"{name}={value}")
