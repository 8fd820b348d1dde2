"""A real S3 server behind a door that answers badly, or not at all, when a test says so."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from ..ports import held_port

BODY = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>{1}</Message></Error>"


class Door:
    """Lets requests for chunks through to a server, or answers them itself."""

    def __init__(self, endpoint: str) -> None:
        self.behind = urlsplit(endpoint).netloc
        self.answers: dict[str, tuple[int, str]] = {}
        """The status and body that a method (GET, PUT) gets for a chunk."""
        self.refused = 0
        self.silent: threading.Event | None = None
        """Requests for chunks wait for this before they get anything."""
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.held: socket.socket | None = None
        """Keeps the port while nobody listens there."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen at the port of before."""
        handler = type("Handler", (_Handler,), {"door": self})
        self.server = _Server(("127.0.0.1", self.port), handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.let_go()
        threading.Thread(target=self.server.serve_forever, args=(0.01,)).start()

    def close(self) -> None:
        """Refuse connections, those that are open too."""
        server, self.server = self.server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self.held = held_port(self.port)

    def let_go(self) -> None:
        """Give the port back."""
        if self.held is not None:
            self.held.close()
            self.held = None

    def answer(self, method: str, path: str) -> tuple[int, str] | None:
        """What a request gets from here; None lets it through."""
        is_chunk = "/c/" in path
        if is_chunk and method in self.answers and self.silent is not None:
            self.silent.wait(300)
        with self.lock:
            if not is_chunk or method not in self.answers:
                return None
            self.refused += 1
        return self.answers[method]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone."""


class _Handler(BaseHTTPRequestHandler):
    door: Door
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        if self.door.server is None:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if (bad := self.door.answer(self.command, self.path)) is not None:
            self._reply(bad[0], {}, bad[1].encode())
            return
        behind = http.client.HTTPConnection(self.door.behind)
        try:
            behind.request(self.command, self.path, body, dict(self.headers.items()))
            answer = behind.getresponse()
            content = answer.read()
        finally:
            behind.close()
        kept = {k: v for k, v in answer.getheaders() if k.lower() in ("etag", "content-range")}
        self._reply(answer.status, kept, content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def door_to(endpoint: str) -> Iterator[Door]:
    door = Door(endpoint)
    door.open()
    try:
        yield door
    finally:
        door.close()
        door.let_go()


def spec(door: Door, name: str) -> dict[str, Any]:
    """An array of a bucket behind a door."""
    bucket = {"driver": "s3", "bucket": "test-bucket", "endpoint": door.url,
              "aws_region": "us-west-2", "path": f"{name}/"}  # fmt: skip
    return {"driver": "zarr3", "kvstore": bucket}


def put(door: Door, name: str, array: NDArray[Any], chunk: int) -> dict[str, Any]:
    """Write an array into the bucket, and return its spec."""
    layout = ts.ChunkLayout(chunk_shape=(chunk,) * array.ndim)
    made = ts.open(spec(door, name), create=True, dtype=array.dtype.name, shape=array.shape,
                   chunk_layout=layout).result()  # fmt: skip
    made.write(array).result()
    return spec(door, name)


def new(door: Door, name: str, array: NDArray[Any], chunk: int) -> dict[str, Any]:
    """The spec of an output like an array."""
    grid = {"name": "regular", "configuration": {"chunk_shape": (chunk,) * array.ndim}}
    metadata = {"shape": array.shape, "data_type": array.dtype.name, "chunk_grid": grid}
    return {**spec(door, name), "metadata": metadata, "create": True}


def get(door: Door, name: str) -> NDArray[Any]:
    """All of an array of the bucket."""
    return ts.open(spec(door, name)).result().read().result()


def write_model(folder: Path, name: str, body: str) -> str:
    """A model of the user's whose forward is ``body``, for ``--model-type``."""
    file = folder / f"{name}.py"
    lines = "\n        ".join(body.splitlines())
    file.write_text(
        "import os\nimport time\nimport torch\n\n\nclass Net(torch.nn.Module):\n"
        f"    def forward(self, x):\n        {lines}\n"
    )
    return f"{file}:Net"


def distinct(side: int) -> NDArray[Any]:
    return np.arange(1, side**3 + 1).reshape((side,) * 3).astype("uint16")
