"""`rolltap fleet`: the nodes of runs on a Ray cluster."""

import click
from rich.console import Console
from rich.table import Table

from rolltap.rollouts import fleet_status
from rolltap.trainer.cli.options import examples, exit_unless, json_option, print_json

_EXAMPLES = examples("rolltap fleet status --ray 10.0.0.1:6379")


@click.group("fleet", epilog=_EXAMPLES)
def fleet_group() -> None:
    """See the nodes that run sessions on a Ray cluster."""


@fleet_group.command("status", epilog=_EXAMPLES)
@click.option(
    "--ray",
    "address",
    default="auto",
    show_default=True,
    help="Address of the cluster, as for `rolltap rollout`.",
)
@json_option
def status_command(address: str, as_json: bool) -> None:
    """Show the nodes of all runs on a cluster: slots, sessions by phase, the last error.

    The line of a run's driver says why it lost a node, the last time. Exit status 1: a line has an
    error.
    """
    nodes = fleet_status(address)
    if as_json:
        print_json(nodes)
    else:
        table = Table("run", "node", "slots", "groups", "sessions", "engine", "asked", "error")
        for node in nodes:
            phases = [f"{number} {phase}" for phase, number in node.get("phases", {}).items()]
            asked = ""
            if "asked_seconds_ago" in node:
                asked = f"{node['asked_seconds_ago']:.0f} s ago"
            table.add_row(
                node["run"],
                node["node"],
                str(node.get("slots", "")),
                str(node.get("groups", "")),
                ", ".join(phases),
                node.get("engine", ""),
                asked,
                node["error"],
            )
        Console(soft_wrap=True).print(table)
    exit_unless(not any(node["error"] for node in nodes))
