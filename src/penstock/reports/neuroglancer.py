"""Stores of this machine, served to Neuroglancer: a page of another site that reads from loopback.

The page runs in the user's browser, and what it reads goes nowhere else. Only that site may read.
Files below a store are all that there is: no lists of folders, and no link or ``..`` is followed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ..data import AXES, METERS, Source, open_source
from .loopback import HOST, LoopbackHandler, LoopbackServer

_PIECE = 2**20
"""The most bytes of a file that are in memory for a request."""


def serve_stores(
    stores: Sequence[Path], viewer: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve stores until the process is interrupted.

    Args:
        stores: Folders, each a Zarr array or an OME-Zarr group.
        viewer: The address of Neuroglancer's page.
        port: The port; 0 for any that is free.
        say: Function that takes the link that shows all of them, once they are served.

    Raises:
        UsageError: One is no such store, there is no such port, or it is taken.
    """
    with _StoreServer(_FileHandler, port) as server:
        sources = [open_source(str(store), name="PATH") for store in stores]
        layers = [_layer(store, source) for store, source in zip(stores, sources, strict=True)]
        dimensions = _dimensions(sources[0])
        server.stores = [store.resolve() for store in stores]
        server.origins = ("{0.scheme}://{0.netloc}".format(urlsplit(viewer.lower())),)
        for number, (store, layer) in enumerate(zip(server.stores, layers, strict=True)):
            layer["source"] = f"zarr://http://{HOST}:{server.port}/{number}/{quote(store.name)}/"
        state = {
            "dimensions": dimensions,
            "layers": layers,
            "layout": "4panel" if "z" in dimensions else "xy",
        }
        say(f"{viewer}#!{quote(json.dumps(state), safe='')}")
        server.serve()


def _layer(store: Path, source: Source) -> dict[str, Any]:
    layer: dict[str, Any] = {"name": store.name, "type": "image"}
    if getattr(source, "holds_labels", False):
        layer["type"] = "segmentation"
    elif windows := [each["window"] for each in getattr(source, "omero", ()) if "window" in each]:
        ends = [windows[0][end] for end in ("start", "end")]
        layer["shaderControls"] = {"normalized": {"range": ends}}
    return layer


def _dimensions(source: Source) -> dict[str, Any]:
    """The size of a voxel by axis, in metres where its unit is a length."""
    dimensions = {}
    for axis, size, unit in zip(AXES, source.scale or (1.0,) * 5, source.units, strict=True):
        if axis in source.axes and axis in "zyx":
            dimensions[axis] = [size * METERS.get(unit or "", 1.0), "m" if unit in METERS else ""]
    return dict(reversed(dimensions.items()))


class _StoreServer(LoopbackServer):
    """The server, and its folders."""

    stores: Sequence[Path]


class _FileHandler(LoopbackHandler):
    """Answers a request for a file of a store, or for a range of its bytes."""

    server: _StoreServer
    protocol_version = "HTTP/1.1"

    def do_OPTIONS(self) -> None:
        """A browser asks before a page of another site reads from loopback."""
        if not self.refused():
            asked = "Access-Control-Allow-"
            self._begin(204, 0, {f"{asked}Headers": "Range", f"{asked}Private-Network": "true"})

    def do_GET(self) -> None:
        if self.refused():
            return
        file = file_of(self.server.stores, self.path)
        if file is None:  # a page may read that there is no such chunk
            self._begin(404, 0)
            return
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start, stop = range_of(self.headers.get("Range"), size)
            if start >= stop and size:
                self.send_error(416)
                return
            if (start, stop) == (0, size):
                self._begin(200, size)
            else:
                part = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
                self._begin(206, stop - start, part)
            stream.seek(start)
            while self.command == "GET" and start < stop:
                piece = stream.read(min(_PIECE, stop - start))
                self.wfile.write(piece)
                start += len(piece) or stop  # a file that has become shorter

    do_HEAD = do_GET

    def _begin(self, status: int, size: int, more: Mapping[str, str] = {}) -> None:
        page = {"Access-Control-Allow-Origin": self.server.origins[0], "Cache-Control": "no-cache"}
        page |= {"Accept-Ranges": "bytes", **more}
        self.begin(status, "application/octet-stream", size, page)


def file_of(stores: Sequence[Path], asked: str) -> Path | None:
    """The file of a store that a request asks for.

    Args:
        stores: The resolved folders.
        asked: The path of the request: the number of a store, its name, and a key of it.

    Returns:
        The file; None where there is none, or a link or ``..`` is on the way to it.
    """
    _, number, _, *key = unquote(urlsplit(asked).path).split("/", 3) + [""] * 3
    if not number.isdecimal() or int(number) >= len(stores) or "\0" in key[0]:
        return None
    root = stores[int(number)]
    file = root / key[0]  # a key that begins with a slash is a path of its own
    inside = file.is_relative_to(root) and file.resolve() == file
    return file if inside and file.is_file() else None


def range_of(header: str | None, size: int) -> tuple[int, int]:
    """The first byte of a range and the one after its last; all of ``size`` bytes by default.

    >>> range_of("bytes=10-19", 100), range_of("bytes=-16", 100), range_of("bytes=90-", 100)
    ((10, 20), (84, 100), (90, 100))
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or not any(match.groups()):
        return 0, size
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size
