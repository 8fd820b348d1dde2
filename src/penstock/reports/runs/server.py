"""The server of a page that is renewed as records come: on loopback by default, and read-only.

A page of another site must not read runs through the user's browser. So the server refuses requests
whose Host is not one of its names (against DNS rebinding), and those whose Origin is another page.
No request changes a file or names one.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import psutil

from ...base import UsageError
from ..content import Report
from ..html import html_page
from .catalogue import Catalogue
from .page_data import page_data

_LOOPBACK = ("localhost", "127.0.0.1")
_MOST_ASKED = 200
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def serve_runs(
    catalogue: Catalogue,
    about: Callable[[], Report],
    host: str,
    port: int,
    say: Callable[[str], None],
) -> None:
    """Serve the page until the process is interrupted.

    Args:
        catalogue: The runs.
        about: Makes the report that the page holds beside the runs.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        say: Function that takes the address of the page when it is served.

    Raises:
        UsageError: The port is taken, or the address is none of this machine.
    """
    names = names_of(host)
    try:
        server = RunsServer((host, port), _PageHandler)
    except OSError as error:
        why = f"{error.strerror or error}; --port 0 takes any that is free"
        raise UsageError(f"--host {host} --port {port}: {why}") from error
    with server:
        server.catalogue, server.about = catalogue, about
        port = int(server.server_address[1])
        server.allowed = [f"{name}:{port}" for name in names]
        say(f"http://{'localhost' if host in ('127.0.0.1', '0.0.0.0') else host}:{port}/")
        with contextlib.suppress(KeyboardInterrupt):  # it has no other end
            server.serve_forever()


class RunsServer(ThreadingHTTPServer):
    """The server, and what its answers are made of."""

    daemon_threads = True
    catalogue: Catalogue
    about: Callable[[], Report]
    allowed: Sequence[str]
    """The hosts, with the port, by which a request may call it."""


class _PageHandler(BaseHTTPRequestHandler):
    """Answers a request for the page or its data."""

    server: RunsServer

    def do_GET(self) -> None:
        origin = self.headers.get("Origin")
        origins = [f"http://{each}" for each in self.server.allowed]
        ours = self.headers.get("Host", "").lower() in self.server.allowed
        if not ours or (origin is not None and origin.lower() not in origins):
            self.send_error(403)
            return
        asked = urlsplit(self.path)
        query = parse_qs(asked.query, max_num_fields=2 * _MOST_ASKED)
        keys, catalogue = query.get("run", [])[:_MOST_ASKED], self.server.catalogue
        catalogue.refresh()
        if asked.path == "/":
            page = html_page(self.server.about(), page_data(catalogue, keys, live=True))
            self._answer("text/html", page)
        elif asked.path != "/data.json":
            self.send_error(404)
        elif "again" not in query and query.get("version") == [str(catalogue.version)]:
            self._answer("application/json", "", 204)
        else:
            document = page_data(catalogue, keys, live=True)
            self._answer("application/json", json.dumps(document))

    def _answer(self, kind: str, text: str, status: int = 200) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of a request: its address may hold a user's words."""


def names_of(host: str) -> list[str]:
    """The host names under which users may reach a server that listens on ``host``."""
    names = [*_LOOPBACK, host.lower()]
    if host == "0.0.0.0":
        names += [socket.gethostname().lower(), socket.getfqdn().lower()]
        each = (address for listed in psutil.net_if_addrs().values() for address in listed)
        names += [address.address for address in each if address.family == socket.AF_INET]
    return [name for name in dict.fromkeys(names) if name and ":" not in name]
