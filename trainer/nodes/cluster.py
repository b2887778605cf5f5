"""A Ray cluster as rolltap uses it: its address, its nodes, and functions and actors on them."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rolltap.addons.errors import InputError
from rolltap.trainer.nodes.messages import Failure, require_ray

logger = logging.getLogger(__name__)

NAMESPACE = "rolltap"
"""Ray namespace of the actors."""
RESOURCE = "rolltap"
"""Ray resource: most sessions at once on a node. If a node has it, others are not used."""
CONNECT_SECONDS = 10.0
"""Longest wait for the cluster's address to accept a connection."""
STATUS_SECONDS = 10.0
"""Longest wait for what a node says of itself."""


class ClusterNode(NamedTuple):
    """A node that runs sessions: Ray's id of it, and the most sessions at once; None by default."""

    ray_id: str
    slots: int | None


class Cluster:
    """The cluster at an address. `connect` comes first, and raises `InputError` if none answers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.ray: Any = None
        """The module `ray`, from `connect` on."""

    def connect(self) -> None:
        """Connect this process to the cluster, once."""
        self.ray = connect(self.address)

    def nodes(self) -> dict[str, ClusterNode]:
        """Return name -> node, of the nodes that run sessions."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        chosen = [node for node in alive if RESOURCE in node["Resources"]] or alive
        nodes = {}
        for node in chosen:
            slots = node["Resources"].get(RESOURCE)
            if slots is not None:
                slots = int(slots)
            name = f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}"
            nodes[name] = ClusterNode(node["NodeID"], slots)
        return nodes

    def own_node(self) -> str:
        """Return Ray's id of the node of this process."""
        own: str = self.ray.get_runtime_context().get_node_id()
        return own

    def call_on_all(
        self,
        function: Callable[..., Any],
        arguments: Callable[[str], tuple[Any, ...]],
    ) -> dict[str, Any]:
        """Call a function on each node, with the arguments for it. Return node -> result."""
        remote = self.ray.remote(num_cpus=0, max_retries=0)(function)
        calls = {}
        for name, node in self.nodes().items():
            on_node = remote.options(scheduling_strategy=_only_on(node.ray_id))
            calls[name] = on_node.remote(*arguments(name))
        results = {}
        for name, call in calls.items():
            try:
                results[name] = self.ray.get(call)
            except self.ray.exceptions.RayError as error:
                why = str(error).strip().splitlines()[-1]
                what = f"{why}: install it there, in this version"
                raise InputError(f"node {name} cannot run rolltap: {what}") from error
        return results

    def start_actor(
        self,
        kind: type,
        ray_id: str,
        *arguments: Any,
        name: str,
    ) -> Any:
        """Start an actor on a node. It ends with this process."""
        remote = self.ray.remote(kind).options(
            num_cpus=0,
            scheduling_strategy=_only_on(ray_id),
            name=name,
        )
        return remote.remote(*arguments)


def _only_on(ray_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray_id, soft=False)


def connect(address: str) -> Any:
    """Connect this process to a cluster, once, and return the module `ray`. Raises `InputError`."""
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal()):
        raise InputError(f"--ray {address}: give HOST:PORT, as `ray start` prints it, or auto")
    ray = require_ray()
    try:
        if address != "auto":
            # Ray itself asks for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            ignore_reinit_error=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--ray {address}: {error}: give the address of a cluster of which this machine is a "
            "node (`ray start`), and RAY_AUTH_MODE as the cluster has it"
        ) from error
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        what = "asks for no token: whoever reaches a port of it runs code there"
        logger.warning("the cluster %s %s", address, what)
    # no option keeps the log of a dead node from stdout, where --json prints
    ray._private.worker._worker_logs_enabled = False
    return ray


async def nodes_status(address: str) -> list[dict[str, Any]]:
    """Return what the nodes of all runs on a cluster say of themselves. Raises `InputError`."""
    ray = connect(address)
    found = []
    for name in sorted(ray.util.list_named_actors()):
        run, _, node = name.partition("-")
        try:
            asked = ray.get_actor(name).status.remote()
            status: Mapping[str, Any] | Failure = await asyncio.wait_for(asked, STATUS_SECONDS)
        except TimeoutError:
            why = f"it did not answer within {STATUS_SECONDS:g} s"
            status = {"node": node, "error": why}
        except (ray.exceptions.RayError, ValueError) as error:
            status = {"node": node, "error": f"it does not answer: {error}"}
        if isinstance(status, Failure):
            status = {"node": status.node, "error": status.message}
        found.append({"run": run, **status})
    return found
