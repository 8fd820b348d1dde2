"""The server of the dashboard: on loopback by default, and read-only.

A page of another site must not read runs through the user's browser. So the server refuses requests
whose Host is not one of its names (against DNS rebinding), and websockets whose Origin is another
page. No request changes a file or names one.
"""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil

from ..base import UsageError, require
from .catalogue import Catalogue
from .view import view_of

TITLE = "Penstock: runs"
_EXTRA = "dashboard"
_LOOPBACK = ("localhost", "127.0.0.1")


def serve_dashboard(catalogue: Catalogue, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted.

    Args:
        catalogue: The runs, refreshed once.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        say: Function that takes the address of the page when it is served.

    Raises:
        UsageError: The port is taken, or the address is none of this machine.
        MissingDependency: Panel is not installed.
    """
    server = make_server(catalogue, host, port)
    ended = threading.Event()
    follower = threading.Thread(target=catalogue.follow, args=(ended,), daemon=True)
    follower.start()
    name = "localhost" if host in ("127.0.0.1", "0.0.0.0") else host
    say(f"http://{name}:{server.port}/")
    try:
        server.start()
        server.io_loop.start()  # an interrupt stops it
    finally:
        ended.set()
        server.stop()


def make_server(catalogue: Catalogue, host: str, port: int) -> Any:
    """The server, listening but not started.

    Args:
        catalogue: The runs.
        host: The address to listen on.
        port: The port; 0 for any that is free.

    Returns:
        A server of Bokeh.

    Raises:
        UsageError: The port is taken, or the address is none of this machine.
        MissingDependency: Panel is not installed.
    """
    panel = require("panel", _EXTRA)
    from bokeh.settings import settings
    from panel.io.server import get_server
    from tornado.routing import HostMatches, Rule, RuleRouter

    from .downloads import ROUTE, Downloads

    settings.resources = "server"  # load no code from the network, whatever the environment says
    panel.extension(design="native", notifications=False)
    names = names_of(host)
    try:
        port = port or _free_port(host)
        server = get_server(
            {"/": lambda: _page(catalogue)},
            port=port,
            address=host,
            websocket_origin=[f"{name}:{port}" for name in names],
            title=TITLE,
            extra_patterns=[(ROUTE, Downloads, {"catalogue": catalogue})],
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"--port {port} is taken; give another, or 0 for any") from error
        raise UsageError(f"--host {host} --port {port}: {error.strerror or error}") from error
    ours = "|".join(map(re.escape, names))
    server._http.request_callback = RuleRouter([Rule(HostMatches(f"(?:{ours})$"), server._tornado)])
    return server


def _free_port(host: str) -> int:
    """Find a free port. The allowed origins of websockets need its number before the server
    listens."""
    with socket.create_server((host, 0)) as taken:
        return int(taken.getsockname()[1])


def _page(catalogue: Catalogue) -> Any:
    """The page of a new user, as the link asks for it."""
    import panel as pn

    from .page import TICK_MS, Page

    search = pn.state.location.search if pn.state.location else ""
    page = Page(catalogue, view_of(search or ""))
    pn.state.add_periodic_callback(page.tick, TICK_MS)
    return page.layout()


def names_of(host: str) -> list[str]:
    """The host names under which users may reach a server that listens on ``host``.

    Raises `UsageError` for an IPv6 address, which Bokeh's list of origins cannot hold.
    """
    if ":" in host:
        raise UsageError(f"--host {host}: give a name or an IPv4 address such as 127.0.0.1")
    names = [*_LOOPBACK, host.lower()]
    if host == "0.0.0.0":
        names += [socket.gethostname().lower(), socket.getfqdn().lower()]
        each = (address for listed in psutil.net_if_addrs().values() for address in listed)
        names += [address.address for address in each if address.family == socket.AF_INET]
    return [name for name in dict.fromkeys(names) if name and ":" not in name]
