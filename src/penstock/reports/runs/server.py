"""The server of a page that is renewed as records come."""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from ..content import Report
from ..html import html_page
from ..loopback import LoopbackHandler, LoopbackServer
from .catalogue import Catalogue
from .page_data import page_data

_MOST_ASKED = 200
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def serve_runs(
    catalogue: Catalogue, about: Callable[[], Report], port: int, say: Callable[[str], None]
) -> None:
    """Serve the page until the process is interrupted.

    Args:
        catalogue: The runs.
        about: Makes the report that the page holds beside the runs.
        port: The port; 0 for any that is free.
        say: Function that takes the address of the page when it is served.

    Raises:
        UsageError: The port is taken.
    """
    with RunsServer(_PageHandler, port) as server:
        server.catalogue, server.about = catalogue, about
        say(f"http://localhost:{server.port}/")
        server.serve()


class RunsServer(LoopbackServer):
    """The server, and what its answers are made of."""

    catalogue: Catalogue
    about: Callable[[], Report]


class _PageHandler(LoopbackHandler):
    """Answers a request for the page or its data. No request names a file."""

    server: RunsServer

    def do_GET(self) -> None:
        if self.refused():
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
        self.begin(status, f"{kind}; charset=utf-8", len(body), _HEADERS)
        self.wfile.write(body)
