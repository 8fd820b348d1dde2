"""Outputs as the readers of viewers see them: ome-zarr-py, napari and Neuroglancer in a browser.

They need an environment of their own: ome-zarr pins an older botocore than the other tests have.
With ``pip install ome-zarr napari-ome-zarr neuroglancer`` there, pytest takes ``-p no:napari``.
"""

import json
import subprocess
import sys
import threading
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.cli import main
from penstock.data import add_windows, open_sink, open_source

from ..reports.browser import CHROMIUM, Browser
from ..reports.served import environment

pytest.importorskip("tensorstore")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PIXELS = np.random.default_rng(0).integers(100, 4000, (2, 9, 80, 70), "uint16")
SCALE = (2.0, 0.5, 0.25)


@pytest.fixture(scope="module", params=["0.4", "0.5"])
def image(request, tmp_path_factory) -> str:
    """An output of two channels with a label image, both with three levels."""
    folder = tmp_path_factory.mktemp("viewed")
    like: Any = open_source(PIXELS, axes="czyx")
    like.scale, like.units = (1.0, 1.0, *SCALE), (None, None, *("micrometer",) * 3)
    like.omero = ({"label": "dapi", "color": "0000FF"}, {"label": "gfp", "color": "00FF00"})
    sink = open_sink(str(folder / "in.zarr"), domain=like.domain, dtype=PIXELS.dtype, like=like)
    sink.create()
    sink.write(sink.domain, PIXELS[None])
    sink.close()
    assert add_windows(str(folder / "in.zarr"), like.omero)
    out, how = str(folder / "out.ome.zarr"), ["--ome-zarr", request.param, "--levels", "3"]
    assert main(["convert", str(folder / "in.zarr"), out, *how]) == 0
    words = [str(folder / "in.zarr"), f"{out}/labels/cells", "--c", "0", "--head-kind", "labels"]
    assert main(["convert", *words, *how]) == 0
    return out


def check_window(limits: Any, pixels: NDArray[Any]) -> None:
    """The window lies within the values, and holds most of them."""
    low, high = limits
    assert pixels.min() <= low < high <= pixels.max()
    assert ((pixels >= low) & (pixels <= high)).mean() > 0.5


def test_ome_zarr_py(image: str) -> None:
    reader = pytest.importorskip("ome_zarr.reader")
    first, *others = reader.Reader(pytest.importorskip("ome_zarr.io").parse_url(image))()
    assert [axis["name"] for axis in first.metadata["axes"]] == ["c", "z", "y", "x"]
    assert [axis.get("unit") for axis in first.metadata["axes"]][1:] == ["micrometer"] * 3
    moves = first.metadata["coordinateTransformations"]
    assert moves[0][0]["scale"][1:] == list(SCALE) and len(moves) == 3
    assert (np.asarray(first.data[0]) == PIXELS).all()
    assert first.metadata["channel_names"] == ["dapi", "gfp"]
    for channel, limits in enumerate(first.metadata["contrast_limits"]):
        check_window(limits, PIXELS[channel])
    (cells,) = [node for node in others if "cells" in str(node.zarr) and node.data]
    assert (np.asarray(cells.data[0]).squeeze() == PIXELS[0]).all() and len(cells.data) == 3


def test_napari(image: str) -> None:
    read = pytest.importorskip("napari_ome_zarr").napari_get_reader(image)
    (levels, shown, kind), (labels, of_labels, kind_of_labels) = read(image)
    assert (kind, kind_of_labels) == ("image", "labels")
    assert shown["channel_axis"] == 0 and shown["axis_labels"] == ("z", "y", "x")
    assert shown["units"] == ("micrometer",) * 3 and tuple(shown["scale"]) == SCALE
    assert [name.rpartition(" ")[2] for name in shown["name"]] == ["dapi", "gfp"]
    assert len(levels) == len(labels) == 3
    for channel, limits in enumerate(shown["contrast_limits"]):
        check_window(limits, PIXELS[channel])
    assert (np.asarray(labels[0]).squeeze() == PIXELS[0]).all()
    assert tuple(of_labels["scale"])[-3:] == SCALE


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_neuroglancer_in_a_browser(image: str, tmp_path) -> None:
    """Its page reads what `view --serve` serves, by the state of the link, and draws it."""
    viewer = pytest.importorskip("neuroglancer").Viewer()
    page = f"http://127.0.0.1:{urlsplit(viewer.get_viewer_url()).port}/"
    code = "from penstock.cli import entry; import sys; sys.argv[0] = 'penstock'; entry()"
    words = ["view", image, f"{image}/labels/cells", "--serve", "--viewer", page]
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as served:
        link = served.stdout.readline().strip()
        assert link.startswith(f"{page}#!")
        state = json.loads(unquote(link.partition("#!")[2]))
        viewer.set_state(state)
        shots: list[Any] = []
        with Browser(tmp_path, gpu="--use-gl=angle --use-angle=swiftshader") as browser:
            browser.go(f"{page}v/{viewer.token}/")
            wait = threading.Thread(target=lambda: shots.append(viewer.screenshot([400, 300])))
            wait.daemon = True
            wait.start()
            wait.join(300)
        served.kill()
    assert [layer["type"] for layer in state["layers"]] == ["image", "segmentation"]
    x, unit = state["dimensions"]["x"]
    assert unit == "m" and x == pytest.approx(0.25e-6)
    (shot,) = shots
    assert len(np.unique(shot.screenshot.image_pixels[..., :3].reshape(-1, 3), axis=0)) > 100
    assert np.abs(np.array(viewer.state.position)[:3] - (35, 40, 4)).max() <= 1  # its middle
