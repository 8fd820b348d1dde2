"""Ports of loopback that nobody else is given."""

import socket


def held_port(port: int = 0) -> socket.socket:
    """A socket bound to a port, by default a free one. Whoever connects there is refused.

    A server that sets ``SO_REUSEADDR``, as most do, may listen there; nobody else is given the port
    before the socket is closed.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held
