"""The frame of an output: its axes, place and channels are those of what was selected of the input;
the bands of a raster are channels of one picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.base import UsageError

from ..later import imported_later
from ..parameters import mainly
from .kit import SMALL, values

tifffile = imported_later("tifffile")
pytestmark = pytest.mark.filterwarnings("ignore")
KNOBS = {**SMALL, "normalize": "global"}


def group_of(out: Path) -> dict[str, Any]:
    file = out / "zarr.json"
    if file.exists():
        return json.loads(file.read_text())["attributes"]["ome"]
    return json.loads((out / ".zattrs").read_text())


@pytest.fixture(scope="module")
def movie(tmp_path_factory) -> tuple[Path, Any]:
    """A hyperstack of ImageJ: 4 times, 3 channels, sizes, names and windows."""
    data = np.arange(4 * 3 * 12 * 14, dtype="u2").reshape(4, 3, 12, 14)
    said = {"axes": "TCYX", "unit": "um", "finterval": 5.0, "Labels": ["a", "b", "d"],
            "Ranges": (0.0, 10.0, 1.0, 11.0, 2.0, 12.0)}  # fmt: skip
    path = tmp_path_factory.mktemp("movie") / "a.tif"
    tifffile.imwrite(path, data, imagej=True, resolution=(4, 2), metadata=said)
    return path, data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "channels", "translation", "scale", "shards"),
    [([0, 1, 2, 3], [0, 1, 2], (0, 0), (5, 1), (8, 8, 8)), ([1, 3], [0, 2], (5, 0), (10, 2), None)],
)
def test_an_output_has_the_frame_of_what_was_selected(
    times: list[int], channels: list[int], translation: Any, scale: Any, shards: Any,
    movie: tuple[Path, Any], tmp_path,
) -> None:  # fmt: skip
    path, data = movie
    out = tmp_path / "out.zarr"
    how = {} if shards is None else {"shards": shards, "chunks": (8, 8, 8)}
    penstock.run_inference(path, out, t=times, c=channels, in_channels=1, **KNOBS, **how)
    source = penstock.open_source(out)
    assert source.axes == "tcyx" and source.units[3:] == ("micrometer",) * 2
    assert source.units[0] == "second"
    assert source.scale == (*scale, 1, 0.5, 0.25)
    assert source.translation == (*translation, 0, 0, 0)
    np.testing.assert_array_equal(values(out)[:, :, 0], data[times][:, channels])
    shown = group_of(out)["omero"]["channels"]
    assert [each["label"] for each in shown] == ["abd"[i] for i in channels]
    assert [each["window"]["start"] for each in shown] == [float(i) for i in channels]
    assert all({"min", "max", "start", "end"} == each["window"].keys() for each in shown)
    again = tmp_path / "again.zarr"  # from the array itself, through the group above it
    penstock.run_inference(out / "0", again, in_channels=1, **KNOBS)
    for what in ("scale", "units", "translation", "omero"):
        assert getattr(penstock.open_source(again), what) == getattr(source, what)


def test_what_a_frame_cannot_say_is_noted(movie: tuple[Path, Any], tmp_path) -> None:
    for model, count in (("identity", 0), (torch.nn.Hardtanh(), 1)):  # to the first it is all one
        plan = penstock.plan_inference(
            movie[0], tmp_path / "out.zarr", t=["0", "1", "3"], **KNOBS | {"model": model}
        )
        notes = "; ".join(plan.facts.notes)
        assert "--t 0,1,3 is not evenly spaced: the output's metadata has" in notes
        assert notes.count("gets each of the 3 as a volume of its own; --in-channels 3") == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "named", "window"),
    mainly([("intensity", True, 0.0), ("scores", True, None), ("merged", False, None)], 1, 2),
)
def test_channels_of_another_making_do_not_take_names(kind, named, window, movie, tmp_path) -> None:
    """Scores have the name of the channel that they were made of, and no window of intensities."""
    merged = kind == "merged"
    net = nn.Conv2d(3, 1, 1) if merged else nn.Conv2d(1, 1, 1)
    head = "intensity" if merged else kind
    how = KNOBS | {"model": net, "head_kind": head}
    penstock.run_inference(movie[0], tmp_path / "out.zarr", **how)
    shown = group_of(tmp_path / "out.zarr")["omero"]["channels"]
    assert [each["label"] for each in shown if "label" in each] == ["a", "b", "d"] * named
    assert (shown[0]["window"]["start"] == window) == (kind == "intensity")
    assert (shown[-1]["window"]["end"] == 12.0) == (kind == "intensity")


@pytest.mark.slow
def test_values_on_a_scale_of_their_own_take_no_window(movie, tmp_path) -> None:
    net = penstock.models.load_model("denoise-tiny").module
    torch.save(net.state_dict(), tmp_path / "best_model.pth")
    head = {"kind": "intensity", "target": "intensity", "loss": "mse", "returns": "values",
            "scaling": {"lower": 0.0, "scale": 1.0}, "dtype": "float32"}  # fmt: skip
    facts = {"scaling": {"lower": 0.0, "scale": 2e3}, "heads": {"out": head}}
    (tmp_path / "training_results.json").write_text(json.dumps({"facts": facts}))
    args = {"workload": "pairs", "model": "denoise-tiny", "channels": None}
    (tmp_path / "args.json").write_text(json.dumps(args))
    how = {name: knob for name, knob in KNOBS.items() if name != "head_kind"}
    penstock.run_inference(
        movie[0], tmp_path / "out.zarr", **how | {"model": str(tmp_path), "t": [0]}
    )
    shown = group_of(tmp_path / "out.zarr")["omero"]["channels"]
    assert all(each["window"]["end"] not in (10.0, 11.0, 12.0) for each in shown)


class Mixed(nn.Module):
    """Without any convolution: a sum over channels, weighted as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 2, bias=False)
        self.mix.weight.data = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    ("patch", "interleave"), mainly([((8, 8), "pixel"), ((1, 8, 8), "band")], 0), ids=["2-D", "3-D"]
)
def test_bands_are_channels_of_a_picture(patch: tuple[int, ...], interleave: str, tmp_path) -> None:
    rasterio = pytest.importorskip("rasterio")
    data = np.arange(3 * 12 * 14, dtype="f4").reshape(3, 12, 14)
    said = {"crs": "EPSG:32631", "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 6e6)}
    with rasterio.open(
        tmp_path / "a.tif", "w", "GTiff", 14, 12, 3, dtype="float32", interleave=interleave, **said
    ) as file:
        file.write(data)
        file.descriptions = ("red", "green", "nir")
    how = SMALL | {"normalize": "none", "patch": patch, "overlap": 0, "head_kind": "intensity"}
    plan = penstock.plan_inference(tmp_path / "a.tif", tmp_path / "out", **how | {"model": Mixed()})
    assert plan.facts.num_volumes == 1 and "the model gets all 3 bands at once" in plan.facts.notes
    lost = "the output does not get the raster's CRS, transform and no-data value"
    assert lost in " ".join(plan.facts.notes)
    out = tmp_path / "out.zarr"
    penstock.run_inference(tmp_path / "a.tif", out, **how | {"model": Mixed()})
    np.testing.assert_array_equal(values(out)[0, 0, 0], data[0] + 2 * data[1] + 4 * data[2])
    np.testing.assert_array_equal(values(out)[0, 1, 0], data[0])
    flat = nn.Conv2d if len(patch) == 2 else nn.Conv3d
    for net, bands in ((flat(1, 1, 1), {}), (flat(2, 1, 1), {})):
        with pytest.raises(UsageError, match=r"has 3 bands and model .* takes .*: choose bands by"):
            penstock.plan_inference(tmp_path / "a.tif", out, **how | {"model": net, **bands})
    alone = {"model": flat(1, 1, 1), "overwrite": True}
    for more, volumes in (({"in_channels": 1}, 3), ({"c": "1"}, 1)):
        plan = penstock.plan_inference(tmp_path / "a.tif", out, **how | alone | more)
        assert plan.facts.num_volumes == volumes


def test_a_unit_that_an_output_does_not_get_and_an_output_that_is_none(tmp_path) -> None:
    rasterio = pytest.importorskip("rasterio")
    said = {"dtype": "uint8", "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 6e6)}
    for code, is_lost in ((2263, True), (32631, False)):  # in feet, and in metres
        place = tmp_path / f"{code}.tif"
        with rasterio.open(place, "w", "GTiff", 14, 12, 1, crs=f"EPSG:{code}", **said) as file:
            file.write(np.ones((1, 12, 14), "uint8"))
        plan = penstock.plan_inference(place, tmp_path / "a.zarr", model="identity", devices="cpu")
        notes = " ".join(plan.facts.notes)
        assert ("sizes of its pixels go there without their unit" in notes) == is_lost
    with pytest.raises(UsageError, match=r"a\.h5: cannot write \.h5; .*, a file \(\*\.ome\.tif"):
        penstock.plan_inference(place, tmp_path / "a.h5", model="identity", devices="cpu")
