"""Packed arrays as xarray writes them, against xarray and against the CF conventions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.base import UsageError
from penstock.data import open_source
from penstock.data.stores.cf_packing import packing_of

from ..later import imported_later
from ..parameters import crossed

xarray = imported_later("xarray")
pytestmark = pytest.mark.filterwarnings("ignore")


def packed(path: Path, values: Any, zarr_format: int, **encoding: Any) -> Path:
    """A Zarr array of one variable, by xarray."""
    dataset = xarray.Dataset({"t": (("z", "y", "x"), values)})
    dataset.to_zarr(path, zarr_format=zarr_format, encoding={"t": encoding}, consolidated=False)
    return path / "t"


def values_of(place: Path, **how: Any) -> Any:
    source = open_source(place, **how)
    return source.read(source.domain)[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zarr_format", "encoding"),
    crossed([2, 3], [
        {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768},
        {"dtype": "uint8", "scale_factor": 2.0, "_FillValue": 255},
        {"dtype": "int32", "scale_factor": 1e-4, "_FillValue": -1},
        {"dtype": "int16", "_FillValue": -9999},
        {"dtype": "float32", "_FillValue": 1e20},
        {"dtype": "float32"},
    ]),
)  # fmt: skip
def test_what_xarray_packs_is_read_as_xarray_reads_it(zarr_format, encoding, tmp_path) -> None:
    values = encoding.get("add_offset", 0) + np.arange(60, dtype="float32").reshape(3, 4, 5)
    values[0, 0, 0] = np.nan
    place = packed(tmp_path / "a.zarr", values, zarr_format, **encoding)
    with xarray.open_zarr(tmp_path / "a.zarr", consolidated=False) as opened:
        right = opened["t"].values
    seen = values_of(place)
    assert seen.dtype == (np.float64 if encoding["dtype"] == "int32" else np.float32)
    np.testing.assert_allclose(seen, right, rtol=1e-6)
    assert values_of(place, raw=True).dtype == encoding["dtype"]
    box = open_source(place).domain
    out = np.empty(box.shape, seen.dtype)
    assert open_source(place).read(box, out) is out
    np.testing.assert_array_equal(out[0, 0], seen)


@given(
    stored=st.lists(st.integers(-128, 127), min_size=6, max_size=6),
    unsigned=st.booleans(),
    fill=st.one_of(st.none(), st.integers(-128, 127)),
    missing=st.lists(st.integers(-128, 127), max_size=2),
    ends=st.one_of(st.none(), st.tuples(st.integers(-100, 0), st.integers(0, 100))),
    scale=st.sampled_from([None, 0.5, 3.0]),
)
def test_values_are_those_of_the_conventions(stored, unsigned, fill, missing, ends, scale) -> None:
    attributes: dict[str, Any] = {"missing_value": missing, "_FillValue": fill}
    attributes |= {"scale_factor": scale, "_Unsigned": str(unsigned).lower()}
    if ends is not None:
        low, high = (0, 200) if unsigned else ends
        attributes["valid_range"] = [low, high]
    numbers = np.array(stored, np.int8).reshape(2, 3)
    packing = packing_of(attributes, numbers.dtype, "here")

    def value(number: int) -> float:
        if number == fill or number in missing:
            return np.nan
        number = number % 256 if unsigned else number
        if ends is not None and not low <= number <= high:
            return np.nan
        return number * (scale or 1.0)

    right = np.array([value(number) for number in stored]).reshape(2, 3)
    if packing is None:
        np.testing.assert_array_equal(numbers, right)
        return
    out = np.empty(numbers.shape, packing.dtype)
    packing.decode(numbers, out)
    np.testing.assert_array_equal(out, right.astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "unsigned", "fill", "stands"),
    [
        ("int64", "false", -(2**63) + 2, -(2**63) + 2),  # NetCDF's own, as the next
        ("uint64", "true", 2**64 - 2, 2**64 - 2),
        ("int64", "false", 2**63 - 1, 2**63 - 1),
        ("int64", "false", str(2**63 - 1), 2**63 - 1),  # as GeoTIFF says it
        ("int64", "true", -2, 2**64 - 2),
    ],
)
def test_a_missing_value_of_64_bits_counts_to_its_last_digit(
    dtype: str, unsigned: str, fill: Any, stands: int
) -> None:
    """No float64 has all of its digits."""
    kind = "uint64" if unsigned == "true" else "int64"
    stored = np.array([[stands, stands - 1, 7]], kind).view(dtype)
    packing = packing_of({"_FillValue": fill, "_Unsigned": unsigned}, stored.dtype, "here")
    assert packing is not None
    values = np.empty(stored.shape)
    packing.decode(stored, values)
    assert np.isnan(values).tolist() == [[True, False, False]]


@pytest.mark.parametrize("fill", [-(2**63) + 2, 2**63 - 1])
def test_the_fill_value_of_a_packed_zarr_2_does_too(fill: int, tmp_path: Path) -> None:
    array = {
        "zarr_format": 2, "shape": [1, 3], "chunks": [1, 3], "dtype": "<i8", "fill_value": fill,
        "order": "C", "compressor": None, "filters": None,
    }  # fmt: skip
    (tmp_path / ".zarray").write_text(json.dumps(array))
    (tmp_path / ".zattrs").write_text(json.dumps({"scale_factor": 0.5}))
    (tmp_path / "0.0").write_bytes(np.array([fill, 7, 8], "<i8").tobytes())
    np.testing.assert_array_equal(values_of(tmp_path), [[[np.nan, 3.5, 4]]])


def test_bytes_that_a_file_calls_signed_are() -> None:
    said = {"_Unsigned": "false", "_FillValue": 255, "valid_range": [-3, 100]}
    packing = packing_of(said, np.dtype("uint8"), "here")
    numbers, out = np.array([[0, 100, 101], [255, 253, 252]], np.uint8), np.empty((2, 3), "f4")
    packing.decode(numbers, out)
    np.testing.assert_array_equal(out, [[0, 100, np.nan], [np.nan, -3, np.nan]])


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"scale_factor": "a tenth"}, "its scale_factor is 'a tenth', which is no number"),
        ({"add_offset": [1, 2]}, r"its add_offset is \[1, 2\]; it must have 1 numbers"),
        ({"valid_range": 5}, "its valid_range is 5; it must have 2 numbers"),
        ({"scale_factor": 0}, "its scale_factor is 0 and its add_offset 0, which leave nothing"),
        ({"add_offset": "nan"}, "its scale_factor is 1 and its add_offset nan"),
    ],
)
def test_an_attribute_without_a_meaning_is_refused(attributes: Any, why: str) -> None:
    with pytest.raises(UsageError, match=f"^here: {why}"):
        packing_of(attributes, np.dtype("int16"), "here")


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_loader_refuses_what_it_would_not_decode(zarr_format: int, tmp_path) -> None:
    values = np.linspace(270, 290, 60, dtype="float32").reshape(3, 4, 5)
    encoding = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -1}
    place = packed(tmp_path / "a.zarr", values, zarr_format, **encoding)
    with pytest.raises(UsageError, match=r"numbers are packed \(.*scale_factor 0.01, add_offset"):
        penstock.Loader(place, batch_size=1)
    if zarr_format == 2:  # an array without a fill value is packed no less
        metadata = json.loads((place / ".zarray").read_text())
        (place / ".zarray").write_text(json.dumps(metadata | {"fill_value": None}))
        with pytest.raises(UsageError, match="numbers are packed"):
            penstock.Loader(place, batch_size=1)
    with penstock.Loader(place, batch_size=3, raw=True) as loader:
        assert next(iter(loader))["data"][0, 0, 0] == -1000
    plain = packed(tmp_path / "plain.zarr", values, zarr_format)
    with penstock.Loader(plain, batch_size=3) as loader:
        np.testing.assert_array_equal(next(iter(loader))["data"], values)
