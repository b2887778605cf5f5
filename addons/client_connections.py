"""Closing connections of the proxy. mitmproxy gives addons no call for it."""

from mitmproxy import connection, ctx
from mitmproxy.proxy.server import ConnectionHandler


def close_client(client: connection.Client) -> None:
    """Close the connection of a client, and those that were opened for it."""
    handler = _handler(client)
    transport = handler.transports.get(client) if handler is not None else None
    if handler is not None and transport is not None and transport.handler is not None:
        handler.close_connection(client)


def close_server(client: connection.Client, server: connection.Server) -> None:
    """Close a connection that was opened for `client`. Nothing is written to it from now on."""
    handler = _handler(client)
    if handler is not None and server in handler.transports:
        writer = handler.transports[server].writer
        if writer is not None:
            writer.close()


def _handler(client: connection.Client) -> ConnectionHandler | None:
    connections: dict[object, ConnectionHandler] = ctx.master.addons.get("proxyserver").connections
    return connections.get(client.id)
