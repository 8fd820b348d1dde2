"""``penstock view``: the planes of an array as a picture."""

import argparse
import contextlib
import http.client
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main, view
from penstock.data import Box, open_source
from penstock.reports import neuroglancer

from ..later import imported_later

imported_later("matplotlib")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("volume.npy", np.arange(6 * 40 * 30, dtype="float32").reshape(6, 40, 30))
    np.save("plane.npy", np.full((40, 30), np.nan))


def test_a_volume_has_three_planes() -> None:
    assert main(["view", "volume.npy"]) == 0
    before = Path("view.png").read_bytes()
    assert before.startswith(b"\x89PNG")
    assert main(["view", "volume.npy", "plane.npy"]) == 0, "which replaces what view has drawn"
    assert Path("view.png").read_bytes() != before


def test_an_array_that_does_not_begin_at_0_has_the_same_picture() -> None:
    pytest.importorskip("tensorstore")
    assert main(["convert", "volume.npy", "volume.zarr", "--plain"]) == 0
    stored = {"driver": "zarr3", "kvstore": f"file://{Path.cwd()}/volume.zarr/"}
    shape, moved = (6, 40, 30), (7, -3, 90)
    there = [{"input_dimension": axis, "offset": -by} for axis, by in enumerate(moved)]
    ends = {"input_inclusive_min": moved, "input_shape": shape, "output": there}
    words = argparse.Namespace(series=None, axes=None, t=None, c=None)
    for plain, other in zip(
        view._planes("volume.npy", words),
        view._planes(json.dumps(stored | {"transform": ends}), words),
        strict=True,
    ):
        assert (plain[1] == other[1]).all()


def test_axes_are_those_that_the_user_gives() -> None:
    assert main(["view", "volume.npy", "--output", "z.png"]) == 0
    assert main(["view", "volume.npy", "--axes", "tyx", "--output", "t.png"]) == 0
    assert len(Path("t.png").read_bytes()) < len(Path("z.png").read_bytes()), "of one plane"


@pytest.mark.parametrize("chunks", [(6, 40, 30), (2, 8, 4), (1, 1, 1)])
def test_pixels_are_left_out_by_pieces_as_in_the_whole(
    chunks: tuple[int, ...], monkeypatch
) -> None:
    """A piece has a few chunks, of which more than its pixels are decoded."""
    monkeypatch.setattr(view, "_SIDE", 12)
    monkeypatch.setattr(view, "_PIECE_BYTES", 2 * 4 * math.prod(chunks))
    source, array, boxes = open_source("volume.npy"), np.load("volume.npy"), list[Box]()
    source.chunks, read = (1, 1, *chunks), source.read
    monkeypatch.setattr(source, "read", lambda box: boxes.append(box) or read(box))
    for axis, right in ((2, array[3, ::4, ::3]), (3, array[:, 20, ::3]), (4, array[:, ::4, 15])):
        plane, steps = view._plane(source, [0, 0, 3, 20, 15], axis)
        assert (plane == right).all() and steps[1] in (3, 4)
    wide = [
        box.shape[3] // max(chunks[1], 4) * (box.shape[4] // max(chunks[2], 3)) for box in boxes
    ]
    assert max(wide) <= 2


def test_a_picture_of_red_green_and_blue_is_shown_in_its_colors() -> None:
    tifffile = pytest.importorskip("tifffile")
    pixels = np.arange(40 * 30 * 3, dtype="uint8").reshape(40, 30, 3)
    tifffile.imwrite("scene.tif", pixels, photometric="rgb")
    words = argparse.Namespace(series=None, axes=None, t=None, c=None)
    ((_, shown, _, _),) = view._planes("scene.tif", words)
    assert (shown == pixels / 255).all()
    words.c = 1
    ((_, shown, _, _),) = view._planes("scene.tif", words)
    assert (shown == pixels[..., 1]).all()


def test_labels_are_shown_in_colors() -> None:
    objects = np.arange(6 * 40 * 30, dtype="uint16").reshape(6, 40, 30) // 2
    np.save("objects.npy", objects)
    assert main(["label", "objects.npy", "cells.ome.zarr", "--equal"]) == 0
    words = argparse.Namespace(series=None, axes=None, t=None, c=None)
    (_, plane, _, _), *_ = view._planes("cells.ome.zarr", words)
    assert plane.shape == (40, 30, 3) and (plane[0, 0] == plane[0, 1]).all()
    assert len(np.unique(plane.reshape(-1, 3), axis=0)) == 600


def test_stores_are_served_to_one_page_only() -> None:
    """With headers for it and for ranges; no list of a folder, and nothing outside of a store."""
    store = Path("a.zarr")
    (store / "0").mkdir(parents=True)
    (store / "0" / "chunk").write_bytes(bytes(range(100)))
    (store / "link").symlink_to(Path("volume.npy").resolve())
    server = neuroglancer._StoreServer(neuroglancer._FileHandler, 0)
    here = f"127.0.0.1:{server.port}"
    server.stores, server.origins = [store.resolve()], ("https://viewer",)

    def ask(key: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
        connection = http.client.HTTPConnection(here, timeout=60)
        connection.request(method, key, headers=headers)
        with contextlib.closing(connection):
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        status, body, headers = ask("/0/a.zarr/0/chunk", Origin="https://viewer")
        assert (status, body) == (200, bytes(range(100)))
        assert headers["Access-Control-Allow-Origin"] == "https://viewer"
        for asked, right in (("10-19", range(10, 20)), ("-16", range(84, 100))):
            status, body, _ = ask("/0/a.zarr/0/chunk", Range=f"bytes={asked}")
            assert (status, body) == (206, bytes(right))
        assert ask("/0/a.zarr/0/chunk", Range="bytes=100-")[0] == 416
        assert ask("/0/a.zarr/0/chunk", "HEAD")[:2] == (200, b"")
        assert ask("/0/a.zarr/0/chunk", "OPTIONS")[0] == 204
        for key in ("0", "link", "../volume.npy", "%2e%2e/volume.npy", "0/%00", "/etc/passwd"):
            status, body, headers = ask(f"/0/a.zarr/{key}")
            assert (status, body) == (404, b"") and headers["Access-Control-Allow-Origin"]
        assert ask("/1/a.zarr/0/chunk")[0] == ask("/")[0] == 404
        assert ask("/0/a.zarr/0/chunk", Origin="https://other")[0] == 403
        assert ask("/0/a.zarr/0/chunk", Host="rebound.example")[0] == 403
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("volume.npy", "--serve"), "--serve takes Zarr stores of this machine: folders"),
        ((".", "--serve", "--port", "70000"), "a port is from 0 to 65535"),
        ((".", "--serve", "--viewer", "here"), "--viewer here: give the address of a page"),
        (("volume.npy", "--c", "1"), "--c 1 is out of range"),
        (("none.zarr",), "none.zarr: no such file"),
        (("volume.npy", "volume.npy", "plane.npy"), "one array or two, not 3"),
        (("volume.npy", "--output", "plane.npy"), "is not known to be Penstock's"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], said: str, capsys) -> None:
    assert main(["view", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("view.png").exists()
