"""Servers of pages on loopback: read-only, and for one page only.

A page of another site must not read what lies on this machine through the user's browser. So a
server refuses requests whose Host is not one of its names (against DNS rebinding), and those whose
Origin is another page than the one that it is for. No request changes anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..base import UsageError

HOST = "127.0.0.1"


class LoopbackServer(ThreadingHTTPServer):
    """A server, and whom it answers."""

    daemon_threads = True

    def __init__(self, handler: type[LoopbackHandler], port: int) -> None:
        """Listen.

        Args:
            handler: Answers requests.
            port: The port; 0 for any that is free.

        Raises:
            UsageError: There is no such port, or it is taken.
        """
        if not 0 <= port < 2**16:
            raise UsageError(f"--port {port}: a port is from 0 to 65535")
        try:
            super().__init__((HOST, port), handler)
        except OSError as error:
            why = f"{error.strerror or error}; --port 0 takes any that is free"
            raise UsageError(f"--port {port}: {why}") from error
        self.port = int(self.server_address[1])
        self.hosts = (f"{HOST}:{self.port}", f"localhost:{self.port}")
        self.origins = tuple(f"http://{host}" for host in self.hosts)
        """Those of the page that may read; here the server's own."""

    def serve(self) -> None:
        """Answer until the process is interrupted, which is the only end."""
        with contextlib.suppress(KeyboardInterrupt):
            self.serve_forever()


class LoopbackHandler(BaseHTTPRequestHandler):
    """Refuses requests of others, and sends the headers that all answers share."""

    server: LoopbackServer

    def refused(self) -> bool:
        """Refuse a request that is not of the page; True if it was refused."""
        origin = self.headers.get("Origin", self.server.origins[0])
        ours = self.headers.get("Host", "").lower() in self.server.hosts
        if ours and origin.lower() in self.server.origins:
            return False
        self.send_error(403)
        return True

    def begin(self, status: int, kind: str, size: int, more: Mapping[str, str]) -> None:
        """Send the head of an answer of so many bytes."""
        self.send_response(status)
        about = {"Content-Type": kind, "Content-Length": str(size)}
        safe = {"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
        for name, value in (about | safe | dict(more)).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of a request: its address may hold a user's words."""
