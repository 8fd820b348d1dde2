"""NetCDF files as samples: against xarray, whatever their axes are called."""

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.data import open_dataset, open_netcdf

from ..places import SHARED
from .kit import read

ERA = SHARED / "era-interim-uvz.nc"


@pytest.fixture(scope="module")
def weather(tmp_path_factory) -> Path:
    """Six steps of a variable with levels and one without, and one that never changes."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    grid = {"y": np.arange(4), "x": np.arange(6)}
    t = np.arange(6 * 2 * 4 * 6, dtype=np.float64).reshape(6, 2, 4, 6) / 7
    s = -np.arange(6 * 4 * 6, dtype=np.float32).reshape(6, 4, 6)
    land = np.arange(24).reshape(4, 6) % 2 == 1
    data = xarray.Dataset(
        {
            "t": (("time", "level", "y", "x"), t),
            "s": (("time", "y", "x"), s),
            "land": (("y", "x"), land),
            "profile": (("level",), [1.0, 2.0]),
        },
        coords={"time": np.arange(6), "level": [850.0, 500.0], **grid},
    )
    path = tmp_path_factory.mktemp("weather") / "weather.nc"
    packing = {"dtype": "int16", "scale_factor": 0.1, "add_offset": 10.0, "_FillValue": -1}
    data.to_netcdf(path, engine="netcdf4", encoding={"t": packing})
    return path


def test_a_netcdf_is_stacked_by_variable_step_and_level(weather: Path, tmp_path) -> None:
    import xarray

    assert main(["generate", "--from", str(weather), str(tmp_path / "data")]) == 0
    packed = open_dataset(tmp_path / "data")
    assert packed.ids.tolist() == [1, 2, 3, 4]
    assert packed.arrays["inputs"].channels == (
        *("t_850_t-1", "t_500_t-1", "t_850_t+0", "t_500_t+0", "s_t-1", "s_t+0", "land"),
    )
    assert packed.arrays["targets"].channels == ("t_850_t+1", "t_500_t+1", "s_t+1")
    inputs, targets = read(packed, "inputs"), read(packed, "targets")
    with xarray.open_dataset(weather, engine="netcdf4") as data:
        t, s, land = (data[name].values.astype(np.float32) for name in ("t", "s", "land"))
    for row, now in enumerate((1, 2, 3, 4)):
        steps = [t[now - 1, 0], t[now - 1, 1], t[now, 0], t[now, 1], s[now - 1], s[now], land]
        np.testing.assert_array_equal(inputs[row], np.stack(steps, axis=-1))
        ahead = [t[now + 1, 0], t[now + 1, 1], s[now + 1]]
        np.testing.assert_array_equal(targets[row], np.stack(ahead, axis=-1))


def test_variables_steps_and_samples_can_be_chosen(weather: Path, tmp_path) -> None:
    words = ["generate", "--from", str(weather), str(tmp_path / "data"), "--inputs", "s"]
    words += ["--targets", "t", "--offsets", "-2", "0", "--target-offset", "3", "--samples", "1"]
    assert main(words) == 0
    packed = open_dataset(tmp_path / "data")
    assert packed.ids.tolist() == [2]
    assert packed.arrays["inputs"].channels == ("s_t-2", "s_t+0")
    assert packed.arrays["targets"].channels == ("t_850_t+3", "t_500_t+3")
    assert read(packed, "inputs")[0, 0, 0].tolist() == [0, -48]
    assert packed.document["offsets"] == [-2, 0]
    assert packed.document["cast"] == "float32"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--inputs q", "--inputs q: .* no such variable of numbers; it has t, s, land, profile"),
        ("--inputs t profile", "profile has axes level; it must have y, x"),
        ("--inputs land", "no variable has an axis of samples"),
        ("--offsets -4 0 --target-offset 2", "time has 6 steps, too few for --offsets -4 0 and"),
        ("--samples 5", "--samples 5: .* gives 4"),
    ],
)
def test_what_a_file_does_not_have_is_refused(flags, sentence, weather, tmp_path, capsys) -> None:
    words = ["generate", "--from", str(weather), str(tmp_path / "data"), *flags.split()]
    assert main(words) == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert not (tmp_path / "data").exists()


def netcdf(path: Path, variables: dict[str, Any], coords: dict[str, Any], **how: Any) -> Path:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    xarray.Dataset(variables, coords).to_netcdf(path, engine="netcdf4", **how)
    return path


MONTHS = {"units": "months since 1850-01-01", "calendar": "standard", "bounds": "time_bnds"}
"""Which nobody can decode."""


def test_corners_of_cells_are_no_weather_and_months_no_hindrance(tmp_path, capsys) -> None:
    """An ocean on a curvilinear grid, as CMIP6 has it."""
    tos = np.arange(5 * 4 * 6, dtype="f4").reshape(5, 4, 6)
    corners = {"bounds": "vertices_latitude"}
    path = netcdf(
        tmp_path / "tos.nc",
        {
            "vertices_latitude": (("j", "i", "vertices"), np.ones((4, 6, 4))),
            "time_bnds": (("time", "bnds"), np.ones((5, 2))),
            "period": (("time", "j", "i"), tos + 1000, {"units": "seconds"}),
            "transport": (("time", "basin", "j"), np.ones((5, 2, 4))),
            "tos": (("time", "j", "i"), tos),
        },
        {"time": ("time", np.arange(5.0), MONTHS),
         "latitude": (("j", "i"), np.ones((4, 6)), corners)},
    )  # fmt: skip
    assert main(["generate", "--from", str(path), str(tmp_path / "data")]) == 0
    assert f"{path}: left out, because they have no latitude or longitude: transport" in (
        capsys.readouterr().out
    )
    packed = open_dataset(tmp_path / "data")
    assert packed.arrays["targets"].channels == ("period_t+1", "tos_t+1")
    assert packed.ids.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(read(packed, "targets")[..., 1], tos[2:])


@pytest.mark.parametrize(
    ("axes", "dims", "about", "unlimited"),
    [
        ("time level lat lon", "time lat lon", {}, []),
        ("time level lon lat", "time lat lon", {}, []),
        ("level lon lat time", "time lat lon", {}, []),
        ("time lat lon level", "time lat lon", {}, []),
        ("b level a t", "t b a", {"t": {"axis": "T"}, "a": {"axis": "X"}, "b": {"axis": "Y"}}, []),
        ("t level b a", "t b a", {"t": {"units": "days since 2000-01-01"}}, []),
        ("t level a b", "t b a", {"t": {"axis": "T"}, "a": {"units": "degrees_east"}}, []),
        ("level t x y", "t y x", {"t": {"standard_name": "time"}, "y": {"axis": "Y"}}, []),
        ("level step y x", "step y x", {}, ["step"]),
    ],
)
def test_the_axes_are_found_by_what_is_said_of_them(axes, dims, about, unlimited, tmp_path) -> None:
    """Before the variable comes another, whose first axis is another and which never changes."""
    dim, latitude, longitude = dims.split()
    length = {dim: 5, "level": 2, latitude: 4, longitude: 6}
    shape = [length[axis] for axis in axes.split()]
    wind = np.arange(math.prod(shape), dtype="f4").reshape(shape)
    soil = np.arange(3 * 4 * 6, dtype="f4").reshape(3, 4, 6)
    path = netcdf(
        tmp_path / "w.nc",
        {"soil": (("layer", latitude, longitude), soil), "wind": (axes.split(), wind)},
        {axis: (axis, np.arange(length[axis]), attributes) for axis, attributes in about.items()},
        unlimited_dims=unlimited,
    )
    stacked = open_netcdf(
        path, inputs=None, targets=None, offsets=(0,), target_offset=0, samples=None
    )
    samples = [stacked.sample(index) for index in range(len(stacked.ids))]
    stacked.close()
    wanted = wind.transpose([axes.split().index(a) for a in (*dims.split(), "level")])
    np.testing.assert_array_equal([sample["targets"] for sample in samples], wanted)
    inputs = np.stack([sample["inputs"] for sample in samples])
    np.testing.assert_array_equal(inputs[..., 3:], wanted)
    np.testing.assert_array_equal(inputs[4, ..., :3], soil.transpose(1, 2, 0))


def series(
    path: Path, hours: list[Any], values: Any, units: str = "hours since 2020-01-01"
) -> Path:
    """A file of one variable over two by two places."""
    stacked = np.broadcast_to(np.asarray(values, np.float32)[:, None, None], (len(hours), 2, 2))
    coords = {
        "time": ("time", np.asarray(hours), {"units": units}),
        "lat": [0.0, 1],
        "lon": [0.0, 1],
    }
    return netcdf(path, {"t": (("time", "lat", "lon"), stacked.copy())}, coords)


def test_no_sample_crosses_a_gap(tmp_path, capsys) -> None:
    hours = [0, 6, 12, 18, 30, 36, 42]
    path = series(tmp_path / "gap.nc", hours, hours)
    assert main(["generate", "--from", str(path), str(tmp_path / "data")]) == 0
    assert "because a gap lies between their steps: 2 samples" in capsys.readouterr().out
    packed = open_dataset(tmp_path / "data")
    assert packed.document["step"] == 6 and packed.ids.tolist() == [1, 2, 5]
    before_and_now, ahead = (read(packed, name)[:, 0, 0] for name in ("inputs", "targets"))
    assert np.diff(np.hstack([before_and_now, ahead])).tolist() == [[6, 6]] * 3
    days = np.cumsum([0, 31, 28, 31, 30, 31]).tolist()  # months of all lengths are neighbours
    path = series(tmp_path / "months.nc", days, days, "days since 2021-01-01")
    assert main(["generate", "--from", str(path), str(tmp_path / "months")]) == 0
    assert len(open_dataset(tmp_path / "months").ids) == 4


@pytest.mark.parametrize(
    ("coords", "step", "ids"),
    [
        # Steps that grow to three hours in the midst of a forecast.
        ({"time": ("t", [0, 1, 2, 3, 6, 9, 12], {"units": "hours since 2000-01-01"})}, 3, [4, 5]),
        ({"valid_time": ("t", [0, 1, 2, 3, 9, 10, 11])}, 1, [1, 2, 5]),
        ({"Times": ("t", [f"2000-01-01_{hour:02d}:00:00" for hour in (0, 3, 6, 12, 15, 18)])},
         10_800, [1, 4]),
        ({"t": ("t", [20000130, 20000131, 20000201, 20000202, 20000210])}, 1, [1, 2]),
        ({"t": ("t", [199911, 199912, 200001, 200002, 200004])}, 1, [1, 2]),
    ],
    ids=["two steps", "no coordinate", "WRF", "dates as numbers", "months as numbers"],
)  # fmt: skip
def test_steps_are_told_however_a_file_says_its_times(coords, step, ids, tmp_path) -> None:
    values = np.zeros((len(next(iter(coords.values()))[1]), 2, 2), np.float32)
    path = netcdf(tmp_path / "a.nc", {"u": (("t", "lat", "lon"), values)}, coords)
    stacked = open_netcdf(
        path, inputs=None, targets=None, offsets=(-1, 0), target_offset=1, samples=None
    )
    stacked.close()
    assert (stacked.step, list(stacked.ids)) == (step, ids)


def test_groups_are_named_as_they_are_not_read(tmp_path, capsys) -> None:
    path = series(tmp_path / "a.nc", [0, 6, 12, 18], range(4))
    with pytest.importorskip("netCDF4").Dataset(path, "a") as file:
        file.createGroup("later")
    assert main(["generate", "--from", str(path), str(tmp_path / "data")]) == 0
    assert "left out, because groups are not read: later" in capsys.readouterr().out


def test_values_outside_the_valid_range_are_missing(tmp_path: Path) -> None:
    stored = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    about = {"scale_factor": 0.5, "add_offset": 1.0, "valid_range": np.array([2, 9], np.int16)}
    path = netcdf(tmp_path / "a.nc", {"u": (("time", "lat", "lon"), stored, about)}, {})
    with contextlib.closing(
        open_netcdf(path, inputs=None, targets=None, offsets=(0,), target_offset=0, samples=None)
    ) as opened:
        values = np.stack([opened.sample(index)["inputs"][..., 0] for index in range(3)])
    within = (stored >= 2) & (stored <= 9)
    np.testing.assert_array_equal(values, np.where(within, 0.5 * stored + 1, np.nan))


@pytest.mark.parametrize(
    ("hours", "units", "why"),
    [
        ([0, 12, 6, 18], "hours since 2020-01-01", "time does not increase from step 1 to 2 (12"),
        ([0, 6, 6, 12], "hours since 2020-01-01", "time does not increase from step 1 to 2 (6 to"),
        ([20200130, 20200131, 20200201], "day as %Y%m%d.%f", "is not their difference"),
        (["soon", "later", "last"], "", "time holds 'soon', which is no date"),
    ],
)
def test_steps_in_disorder_are_refused(hours, units, why, tmp_path, capsys) -> None:
    path = series(tmp_path / "a.nc", hours, range(len(hours)), units)
    assert main(["generate", "--from", str(path), str(tmp_path / "data")]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_what_is_not_finite_is_no_part_of_statistics_and_is_counted(tmp_path, capsys) -> None:
    values = [0.0, 6, np.nan, 18, 24]
    path = series(tmp_path / "nan.nc", [0, 6, 12, 18, 24], values)
    words = ["generate", "--from", str(path), "--offsets", "0", "--target-offset", "0"]
    assert main([*words, str(tmp_path / "data")]) == 0
    assert "4 of inputs t" in capsys.readouterr().out
    assert set(open_dataset(tmp_path / "data").document["not_finite"].values()) == {4}
    saved = np.load(tmp_path / "data" / "statistics.npz")
    assert saved["inputs.mean"] == pytest.approx(np.nanmean(values))
    assert saved["inputs.std"] == pytest.approx(np.nanstd(values))

    path = series(tmp_path / "none.nc", [0, 6, 12], [np.nan] * 3)
    assert main([*words[:2], str(path), str(tmp_path / "none")]) == 2
    assert "has no finite value in any sample" in capsys.readouterr().err


def test_what_is_no_netcdf_is_refused(tmp_path, capsys) -> None:
    pytest.importorskip("netCDF4")
    (tmp_path / "text.nc").write_text("not a NetCDF at all")
    assert main(["generate", "--from", str(tmp_path / "text.nc"), str(tmp_path / "data")]) == 2
    assert "text.nc is not a NetCDF file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not ERA.exists(), reason=f"{ERA} is absent")
@pytest.mark.filterwarnings("ignore:variable .* has non-conforming")
def test_real_reanalysis_is_packed_to_the_bit(tmp_path, capsys) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    words = ["generate", "--from", str(ERA), str(tmp_path / "data")]
    assert main(words) == 0  # the file has two steps: one sample, from the first to the second
    packed = open_dataset(tmp_path / "data")
    assert "cast to float32" in capsys.readouterr().out
    assert packed.ids.tolist() == [0]
    assert packed.arrays["inputs"].channels[:4] == ("z_200_t+0", "z_500_t+0", "z_850_t+0",
                                                    "u_200_t+0")  # fmt: skip
    with xarray.open_dataset(ERA, engine="netcdf4") as data:
        for name, month in (("inputs", 0), ("targets", 1)):
            levels = [data[v].values[month, level] for v in "zuv" for level in range(3)]
            expected = np.stack(levels, axis=-1).astype(np.float32)
            np.testing.assert_array_equal(read(packed, name)[0], expected)
    assert packed.arrays["inputs"].chunks == (1, 241, 480, 3)
