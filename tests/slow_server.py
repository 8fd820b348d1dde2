"""A folder as a remote store: served over HTTP on loopback, each answer after a fixed delay.

    with Loopback(folder, delay_s=0.05) as store:
        ...                                   # read from store.url
        store.served()                        # {"requests": 88, "bytes": 79630000}

The delay is a sleep before each answer, the same for every request and for any number of them at a
time: latency without a limit of bandwidth, which threads can hide. The server is a process of its
own, so that it does not hold the interpreter's lock of the reader. It serves files and ranges of
files to this machine alone. It ends when its standard input closes, so at the latest when the
process ends that started it.
"""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COUNTS = "/-/served"
"""The path that returns the counts, at once and not counted itself."""


class Loopback(AbstractContextManager["Loopback"]):
    """A server in a process of its own, which closes with its context.

    Args:
        folder: the folder that it serves.
        delay_s: the seconds before each answer.
    """

    def __init__(self, folder: Path, delay_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(Path(folder).resolve()), repr(delay_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        port = self._process.stdout.readline().strip().decode()
        if not port:
            self.close()
            raise RuntimeError(f"no server of {folder} could be started on loopback")
        self.url = f"http://127.0.0.1:{port}"
        self.pid = self._process.pid

    def served(self) -> dict[str, int]:
        """The numbers of requests and of bytes of bodies so far: ``requests`` and ``bytes``."""
        with urllib.request.urlopen(self.url + COUNTS) as answer:
            return json.load(answer)

    def close(self) -> None:
        """End the server."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, delay_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.delay_s = folder, delay_s
        self.lock, self.requests, self.bytes = threading.Lock(), 0, 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server = self.server
        if self.path == COUNTS:
            counts = json.dumps({"requests": server.requests, "bytes": server.bytes}).encode()
            return self._send(HTTPStatus.OK, counts, len(counts))
        time.sleep(server.delay_s)
        path = (server.folder / unquote(self.path.partition("?")[0]).lstrip("/")).resolve()
        status, data, size = HTTPStatus.NOT_FOUND, b"", 0
        if path.is_relative_to(server.folder) and path.is_file():
            status, data, size = self._part(path) if body else (HTTPStatus.OK, b"", _size(path))
        with server.lock:
            server.requests += 1
            server.bytes += len(data)
        return self._send(status, data, size)

    def _part(self, path: Path) -> tuple[HTTPStatus, bytes, int]:
        """Status, bytes and their number: of the file, or of the range that the request names."""
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        with path.open("rb") as file:
            if asked is None or not any(asked.groups()):
                data = file.read()
                return HTTPStatus.OK, data, len(data)
            total = _size(path)
            first, last = asked.groups()
            start = int(first) if first else max(0, total - int(last))
            stop = min(total, int(last) + 1) if first and last else total
            file.seek(start)
            data = file.read(max(0, stop - start))
        self._range = f"bytes {start}-{stop - 1}/{total}"
        return HTTPStatus.PARTIAL_CONTENT, data, len(data)

    def _send(self, status: HTTPStatus, data: bytes, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", self._range)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _size(path: Path) -> int:
    return path.stat().st_size


def main(folder: str, delay_s: str) -> None:
    with _Server(Path(folder), float(delay_s)) as server:
        # It looks for the end twenty times a second: half a second would be added to each close.
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()
        server.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
