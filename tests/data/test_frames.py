"""The frame of an input: its axes by name, sizes, units, positions and channels, and the choices
in a group or a file, against what xarray, tifffile and rasterio make of the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.base import UsageError
from penstock.data import open_source
from penstock.data.stores.frames import name_axes
from penstock.data.stores.ome_levels import described

from ..later import imported_later
from ..laws import COSTLY
from .kit import DATA, build_ome_zarr_04, build_ome_zarr_05, ome_tiff_set, saved, write

xarray = imported_later("xarray")
tifffile = imported_later("tifffile")
pytestmark = pytest.mark.filterwarnings("ignore")

NAMED = {
    "t": ["time", "Time", "t"],
    "c": ["band", "channel"],
    "z": ["level", "depth", "plev"],
    "y": ["lat", "latitude", "northing", "Y"],
    "x": ["lon", "longitude", "easting"],
}
LETTERS = {name: letter for letter, names in NAMED.items() for name in names}


def five(values: Any, axes: str) -> Any:
    """Values along ``axes`` as a source gives them: t c z y x."""
    order = [axes.index(axis) for axis in "tczyx" if axis in axes]
    index = tuple(slice(None) if axis in axes else None for axis in "tczyx")
    return np.transpose(values, order)[index]


def values_of(source: Any) -> Any:
    return source.read(source.domain)


@st.composite
def dimensions(draw: st.DrawFn) -> list[str]:
    axes = draw(st.permutations(["y", "x", *draw(st.sets(st.sampled_from("tcz")))]))
    names = [draw(st.sampled_from(NAMED[axis])) for axis in axes]
    if draw(st.integers(0, 4)) == 0:
        names[draw(st.integers(0, len(names) - 1))] = draw(st.sampled_from(["member", "q", "lat"]))
    return names


@COSTLY
@given(names=dimensions(), zarr_format=st.sampled_from([2, 3]))
def test_dimensions_that_xarray_names_are_those_axes_or_refused(
    names: list[str], zarr_format: int, tmp_path_factory
) -> None:
    shape = tuple(range(2, 2 + len(names)))
    values = np.arange(np.prod(shape), dtype="int32").reshape(shape)
    place = tmp_path_factory.mktemp("named") / "a.zarr"
    try:
        array = xarray.DataArray(values, dims=names, name="v")
        array.to_dataset().to_zarr(place, zarr_format=zarr_format, consolidated=False)
    except ValueError:
        return  # a name twice, which xarray does not write
    axes = "".join(LETTERS.get(name, "?") for name in names)
    if "?" in axes or len(set(axes)) < len(axes):
        with pytest.raises(UsageError, match=r"axes \[.*; --axes, such as --axes tyx, says what"):
            open_source(place / "v")
        axes = "tczyx"[-len(names) :]
        source = open_source(place / "v", axes=axes)
        assert source.notes == ()
    else:
        source = open_source(place / "v")
        taken = f"{', '.join(names)} are taken for {', '.join(axes)}; --axes says otherwise"
        plain = [name.lower() for name in names] == list(axes)
        assert [note.endswith(taken) for note in source.notes] == [True] * (not plain)
        assert source.bands == ("band" in names)
    np.testing.assert_array_equal(values_of(source), five(values, axes))


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_names_that_say_nothing_leave_it_to_the_rank(zarr_format: int, tmp_path) -> None:
    array = xarray.DataArray(np.zeros((2, 3, 4), "f4"), name="v")  # dim_0, dim_1, dim_2
    array.to_dataset().to_zarr(tmp_path / "a.zarr", zarr_format=zarr_format)
    source = open_source(tmp_path / "a.zarr" / "v")
    assert source.axes == "zyx" and source.notes == ()


def test_a_view_has_the_names_of_its_own_dimensions(tmp_path) -> None:
    values = np.arange(24, dtype="u2").reshape(2, 3, 4)
    array = xarray.DataArray(values, dims=("time", "lat", "lon"), name="v")
    array.to_dataset().to_zarr(tmp_path / "a.zarr", zarr_format=2)
    base = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a.zarr/v/"}
    outputs = [{"input_dimension": 2}, {"input_dimension": 0}, {"input_dimension": 1}]
    transform = {"input_inclusive_min": [0] * 3, "input_exclusive_max": [3, 4, 2],
                 "output": outputs}  # fmt: skip
    for spec in (base, {**base, "transform": transform},
                 {"driver": "cast", "dtype": "float32", "base": base}):  # fmt: skip
        source = open_source(spec)
        assert source.axes == "tyx"
        np.testing.assert_array_equal(values_of(source), five(values, "tyx"))


def test_axes_that_the_user_gives(tmp_path) -> None:
    values = np.arange(24, dtype="u2").reshape(2, 3, 4)
    np.save(tmp_path / "a.npy", values)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack")
    write("zarr", tmp_path / "a.zarr", values, {"chunks": [1, 3, 4], "dtype": "<u2"})
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/a.zarr/"}
    for place in (values, *(tmp_path / name for name in ("a.npy", "a.tif", "a.zarr")), spec):
        by_rank, source = open_source(place), open_source(place, axes="tyx")
        assert (by_rank.axes, source.axes) == ("zyx", "tyx")
        np.testing.assert_array_equal(values_of(source), five(values, "tyx"))
        assert source.fingerprint != by_rank.fingerprint
        for wrong, why in (("yx", "3 dimensions but axes"), ("qyx", "each must be one of"),
                           ("tcz", "lack y or x")):  # fmt: skip
            with pytest.raises(UsageError, match=f"with --axes {wrong}: .*{why}"):
                open_source(place, axes=wrong)


NAMES = st.text(st.sampled_from("tczyxTCZYXialone_ -1é\0"), max_size=6)
"""Any text would have Hypothesis list all of Unicode first, for 1 s."""


@given(st.lists(NAMES | st.sampled_from(["time", "lat", "lon", "depth"]), max_size=6))
def test_any_names_are_five_letters_or_one_sentence(names: list[str]) -> None:
    try:
        axes = name_axes(names, len(names), "here")
    except UsageError as error:
        assert str(error).startswith("here: ")
        return
    assert {"y", "x"} <= set(axes) <= set("tczyx") and len(set(axes)) == len(names)


@pytest.mark.parametrize("build", [build_ome_zarr_04, build_ome_zarr_05])
def test_an_array_of_an_image_knows_its_frame(build: Callable[[Path], Any], tmp_path) -> None:
    place = build(tmp_path)
    for level in (0, 1):
        whole, direct = open_source(place, level=level), open_source(place / f"s{level}")
        assert whole.scale is not None and any(whole.units)
        for what in ("axes", "scale", "units", "translation", "ome_version", "fingerprint"):
            assert getattr(direct, what) == getattr(whole, what), what
    driver = "zarr" if build is build_ome_zarr_04 else "zarr3"
    spec = {"driver": driver, "kvstore": f"file://{place}/", "path": "s1"}
    assert open_source(spec).scale == open_source(place, level=1).scale


MOVES = st.one_of(
    st.tuples(st.just("scale"), st.lists(st.sampled_from([0.5, 2.0, 3.0]), min_size=3, max_size=3)),
    st.tuples(st.just("translation"), st.lists(st.integers(-9, 9), min_size=3, max_size=3)),
    st.tuples(st.sampled_from(["rotation", "affine"]), st.just([1.0])),
)


@given(moves=st.lists(MOVES, max_size=4), names=st.permutations("zyx"))
def test_transformations_apply_in_order_or_are_refused(moves: Any, names: list[str]) -> None:
    steps = [{"type": kind, kind: numbers} for kind, numbers in moves]
    dataset = {"path": "0", "coordinateTransformations": steps}
    image = {"axes": [{"name": name} for name in names], "datasets": [dataset]}
    strange = {kind for kind, _ in moves} - {"scale", "translation"}
    if strange:
        with pytest.raises(UsageError, match=r"a transformation of type (rotation|affine); only"):
            described({"multiscales": [image]}, 0, "here")
        return
    level = described({"multiscales": [image]}, 0, "here")

    def world(index: int) -> Any:
        place = np.full(3, float(index))
        for kind, numbers in moves:
            place = place * numbers if kind == "scale" else place + numbers
        return place

    np.testing.assert_allclose(level.translation, world(0))
    np.testing.assert_allclose(level.scale or (1, 1, 1), world(1) - world(0))


def ome_group(folder: Path, attributes: dict[str, Any], version: int) -> Path:
    group = folder / "g.zarr"
    group.mkdir()
    if version == 4:
        saved(group, ".zgroup", '{"zarr_format": 2}')
        saved(group, ".zattrs", json.dumps(attributes))
    else:
        document = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": attributes}}
        saved(group, "zarr.json", json.dumps(document))
    return group


IMAGE = {"axes": [{"name": a} for a in "zyx"], "datasets": [{"path": "0"}]}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"plate": {"wells": [{"path": "A/1"}, {"path": "B/2"}]}},
            r"is a plate of wells \(A/1, B/2\); name one, such as .*g\.zarr/A/1$",
        ),
        (
            {"well": {"images": [{"path": "0"}, {"path": "1"}]}},
            r"is a well of fields \(0, 1\); name .*g\.zarr/0$",
        ),
        ({"labels": ["cells", "nuclei"]}, r"label images \(cells, nuclei\); .*g\.zarr/cells$"),
        ({"bioformats2raw.layout": 3}, "is a group of images, and none is listed in it"),
        (
            {"bioformats2raw.layout": 3, "plate": {"wells": [{"path": "A/1"}, {"path": "A/2"}]}},
            r"is a plate of wells \(A/1, A/2\)",
        ),
        ({"plate": {"wells": [{"path": "../A"}]}}, r"names '\.\./A', which is not below it$"),
        ({"well": {"images": [{"path": "/etc"}]}}, "names '/etc', which is not below it$"),
        ({"labels": ["a", "%2e%2e/b"]}, "names '%2e%2e/b', which is not below it$"),
        ({"labels": []}, "is a group of label images, and none is listed in it"),
        ({"plate": {"wells": 3}}, "its metadata is malformed"),
        (
            {"multiscales": [{**IMAGE, "name": "raw"}, IMAGE]},
            r"holds 2 images \(0 raw, 1\); --series N takes one$",
        ),
        ({"multiscales": [{**IMAGE, "datasets": [{"path": "a?b"}]}]}, "which is not below it$"),
    ],
    ids="plate well labels bf2raw hcs plate-out well-out labels-out none odd two query".split(),
)
def test_a_group_of_several_is_listed(attributes, message, version, tmp_path) -> None:
    group = ome_group(tmp_path, attributes, version)
    for read in (open_source, lambda place: penstock.Loader(place, batch_size=1)):
        with pytest.raises(UsageError, match=message):
            read(group)


KEYS = (
    *("multiscales", "datasets", "path", "axes", "name", "type", "coordinateTransformations"),
    *("scale", "translation", "omero", "channels", "window", "plate", "wells", "well", "images"),
    *("labels", "bioformats2raw.layout", "metadata", "a/.zarray", "shape", "version", "unit"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["0", "../a", "z", "", "time"])
    | st.just(float("nan")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)  # fmt: skip


@COSTLY
@given(
    attributes=st.dictionaries(st.sampled_from(KEYS), JSON),
    held=st.sampled_from([".zattrs", ".zmetadata", "zarr.json"]),
)
def test_any_json_about_a_group_is_an_image_or_one_sentence(
    attributes: dict[str, Any], held: str, tmp_path_factory
) -> None:
    group = tmp_path_factory.mktemp("any")
    write("zarr", group / "0", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
    saved(group, ".zgroup", '{"zarr_format": 2}')
    v3 = {"node_type": "group", "attributes": {"ome": attributes}}
    saved(group, held, json.dumps(v3 if held == "zarr.json" else attributes))
    for place in (group, group / "0"):
        for read in (open_source, lambda place: penstock.Loader(place, batch_size=1)):
            try:
                read(place)
            except UsageError as error:
                assert "\n" not in str(error) and str(place) in str(error)


@pytest.mark.parametrize("listed", [True, False])
def test_images_of_bioformats2raw_are_listed(listed: bool, tmp_path) -> None:
    group = ome_group(tmp_path, {"bioformats2raw.layout": 3}, 4)
    for name in ("0", "1", "OME"):
        (group / name).mkdir()
        saved(group / name, ".zattrs", '{"series": ["0", "1"]}' if listed else "{ }")
    with pytest.raises(UsageError, match=r"a group of images \(0, 1\); name one, .*g\.zarr/0$"):
        open_source(group)


def test_an_image_that_the_file_does_not_hold_lends_no_size(tmp_path) -> None:
    ome = (
        '<?xml version="1.0"?><OME><Image ID="Image:1"><Pixels ID="Pixels:1" SizeX="9" SizeY="9" '
        'DimensionOrder="XYZCT" Type="uint16" SizeZ="1" SizeC="1" SizeT="1" PhysicalSizeX="7"/>'
        '</Image><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" '
        'SizeX="17" SizeY="13" SizeZ="1" SizeC="1" SizeT="1"><TiffData/></Pixels></Image></OME>'
    )
    tifffile.imwrite(tmp_path / "a.ome.tif", DATA[0, 0, 0], description=ome, metadata=None)
    source = open_source(tmp_path / "a.ome.tif")
    assert source.scale is None
    assert source.notes[0].startswith("the input's OME metadata is no XML, or not of its images")


def test_series_takes_an_image_of_a_group(tmp_path) -> None:
    second = {**IMAGE, "datasets": [{"path": "1"}]}
    group = ome_group(tmp_path, {"multiscales": [IMAGE, second]}, 4)
    for number in (0, 1):
        values = DATA[0, 0] + number
        write("zarr", group / str(number), values, {"chunks": [4, 5, 6], "dtype": "<u2"})
        source = open_source(group, series=number)
        np.testing.assert_array_equal(values_of(source)[0, 0], values)
    with pytest.raises(UsageError, match="--series 2 does not exist; it has 2"):
        open_source(group, series=2)
    with pytest.raises(UsageError, match="series 0 is asked, but only"):
        open_source(DATA, series=0)
    with pytest.raises(UsageError, match="--series 1 does not exist; it is one array"):
        open_source(group / "0", series=1)


@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_arrays_of_xarray_are_listed(zarr_format: int, consolidated: bool, tmp_path) -> None:
    of = {name: (("time", "lat", "lon"), np.zeros((2, 3, 4))) for name in ("rain", "temp")}
    dataset = xarray.Dataset(of, coords={"time": [0, 1]})
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=zarr_format, consolidated=consolidated)
    said = r"a group of arrays \(rain \(2 x 3 x 4\), temp \(2 x 3 x 4\)\); name .*a\.zarr/rain$"
    for read in (open_source, lambda place: penstock.Loader(place, batch_size=1)):
        with pytest.raises(UsageError, match=said):
            read(tmp_path / "a.zarr")
    with pytest.raises(UsageError, match=r"its _ARRAY_DIMENSIONS is 3, which is no list of names"):
        write("zarr", tmp_path / "b.zarr", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
        saved(tmp_path / "b.zarr", ".zattrs", '{"_ARRAY_DIMENSIONS": 3}')
        open_source(tmp_path / "b.zarr")


def image_of(folder: Path, axes: Any = "zyx", steps: Any = (), **more: Any) -> Path:
    """An OME-Zarr image of three axes, with these transformations."""
    dataset = {"path": "0", "coordinateTransformations": list(steps)}
    named = [{"name": axis} if isinstance(axis, str) else axis for axis in axes]
    group = ome_group(folder, {"multiscales": [{"axes": named, "datasets": [dataset]}], **more}, 4)
    write("zarr", group / "0", DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
    return group


ODD = [
    ({"axes": [{"name": "lambda", "type": "channel"}, "y", "x"]}, {"axes": "cyx", "notes": ()}),
    ({"steps": [{"type": "scale", "scale": [1, 2]}]}, "has a scale of 2 numbers for 3 axes"),
    ({"steps": [{"type": "scale", "path": "s"}]}, "of type scale in a file; only"),
    ({"axes": [{"name": "z", "unit": "um"}, "y", {"name": "x", "unit": "pixel"}]},
     {"units": (None, None, "micrometer", None, None)}),
    ({"axes": "cyx", "omero": {"channels": [{"label": "a"}]}}, {"omero": ()}),
    ({"omero": {"channels": [{"label": 3, "color": "red", "window": {"start": 1}}]}},
     {"omero": ({},)}),
    ({"omero": {"channels": [{"color": "00ff00", "window": {"start": 1, "end": 2, "min": "x"}}]}},
     {"omero": ({"color": "00FF00"},)}),
    ({"multiscales": []}, "holds no images"),
    ({"multiscales": [{"coordinateSystems": [], "datasets": [{}]}]}, "has coordinate systems, as"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "outcome"), ODD, ids=lambda value: str(value)[:40])
def test_odd_metadata_of_an_image(how: dict[str, Any], outcome: Any, tmp_path) -> None:
    group = image_of(tmp_path, **how)
    if isinstance(outcome, str):
        with pytest.raises(UsageError, match=outcome):
            open_source(group)
        alone = open_source(group / "0")  # can be read, and says what is not known of it
        np.testing.assert_array_equal(values_of(alone)[0, 0], DATA[0, 0])
        assert alone.notes or how == {"multiscales": []}
        return
    source = open_source(group)
    for name, value in outcome.items():
        assert getattr(source, name) == value
    if how.get("axes") == "cyx":
        assert "omero metadata has 1 channel and the array has 10" in source.notes[0]


@pytest.mark.parametrize("file", [".zattrs", ".zarray"])
def test_dimensions_as_the_library_of_netcdf_names_them(file: str, tmp_path) -> None:
    place = tmp_path / "a.zarr"
    write("zarr", place, DATA[0, 0], {"chunks": [4, 5, 6], "dtype": "<u2"})
    names = ["/time", "/lat", "/group/lon"]
    said: dict[str, Any] = {"_nczarr_array": {"dimension_references": names}}
    if file == ".zarray":
        said = {**json.loads((place / file).read_text()), "_NCZARR_ARRAY": {"dimrefs": names}}
    saved(place, file, json.dumps(said))
    source = open_source(place)
    assert source.axes == "tyx"
    np.testing.assert_array_equal(values_of(source), five(DATA[0, 0], "tyx"))


def test_what_documents_of_stores_name_lies_below_them(tmp_path) -> None:
    info = {"driver": "neuroglancer_precomputed", "kvstore": f"file://{tmp_path}/a",
            "multiscale_metadata": {"data_type": "uint8", "num_channels": 1, "type": "image"},
            "scale_metadata": {"size": [4] * 3, "chunk_size": [4] * 3, "encoding": "raw",
                               "key": "s", "resolution": [1] * 3}}  # fmt: skip
    import tensorstore as ts

    ts.open(info, create=True).result()
    text = (tmp_path / "a" / "info").read_text()
    (tmp_path / "a" / "info").write_text(text.replace('"s"', '"../secret"'))
    with pytest.raises(UsageError, match=r"names '\.\./secret', which is not below it$"):
        open_source(tmp_path / "a")
    (tmp_path / "in").mkdir()
    ome_tiff_set(tmp_path / "in", ["../secret.ome.tif", "a.ome.tif"])
    with pytest.raises(UsageError, match=r"names '\.\./secret\.ome\.tif', which is not below it$"):
        open_source(tmp_path / "in" / "a.ome.tif")
    entry = {"path": "../secret", "axes": ["sample", "x"]}
    document = {"format": "penstock-packed", "version": 1, "arrays": {"a": entry}}
    saved(tmp_path, "dataset.json", json.dumps(document))
    with pytest.raises(UsageError, match=r"names '\.\./secret', which is not below it$"):
        penstock.Loader(tmp_path, batch_size=1)


SIZES = st.sampled_from([0.25, 0.5, 2.0, 4.0])


@COSTLY
@given(
    x=SIZES, y=SIZES, z=SIZES, t=st.none() | SIZES,
    micro=st.sampled_from(["um", "micron", "\\u00B5m"]),
    lead=st.sampled_from(["", "Z", "ZC", "TC", "TZC"]),
)  # fmt: skip
def test_sizes_of_imagej(x, y, z, t, micro, lead, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("imagej") / "a.tif"
    axes, shape = f"{lead}YX", (*range(2, 2 + len(lead)), 6, 7)
    values = np.arange(np.prod(shape), dtype="u2").reshape(shape)
    said: dict[str, Any] = {"axes": axes, "unit": micro, "spacing": z}
    said |= {} if t is None else {"finterval": t}
    tifffile.imwrite(path, values, imagej=True, resolution=(1 / x, 1 / y), metadata=said)
    source = open_source(path)
    unit = "micrometer"
    assert source.scale == (t or 1.0, 1.0, z, y, x)
    assert source.units == (t and "second", None, unit, unit, unit)
    np.testing.assert_array_equal(values_of(source), five(values, axes.lower()))


def test_channels_and_positions_of_imagej(tmp_path) -> None:
    tables = [np.zeros((3, 256), "u1") for _ in range(2)]
    tables[0][0], tables[1][1] = np.arange(256), np.arange(256)
    said = {"axes": "CYX", "unit": "nm", "LUTs": tables, "Ranges": (1.0, 9.0, 2.0, 8.0),
            "Labels": ["DAPI", "GFP"], "xorigin": 3.0, "yunit": "um"}  # fmt: skip
    values = np.zeros((2, 6, 7), "u2")
    tifffile.imwrite(tmp_path / "a.tif", values, imagej=True, resolution=(2, 4), metadata=said)
    source = open_source(tmp_path / "a.tif")
    assert source.scale == (1, 1, 1, 0.25, 0.5) and source.translation == (0, 0, 0, 0, -1.5)
    assert source.units[3:] == ("micrometer", "nanometer")
    assert source.omero == (
        {"label": "DAPI", "color": "FF0000", "window": {"start": 1.0, "end": 9.0}},
        {"label": "GFP", "color": "00FF00", "window": {"start": 2.0, "end": 8.0}},
    )
    tifffile.imwrite(tmp_path / "b.tif", values[0], imagej=True, resolution=(2, 4))
    assert open_source(tmp_path / "b.tif").scale is None  # no unit: they are pixels


def ome_series(path: Path) -> tuple[Any, Any]:
    first, second = np.arange(3 * 6 * 8, dtype="u2").reshape(3, 6, 8), DATA[0, 0, :, :6, :8]
    channel = {"Name": ["DAPI", "GFP", "RFP"], "Color": [255, 16711935, -1]}
    with tifffile.TiffWriter(path) as file:
        for values, said in (
            (first, {"axes": "CYX", "Name": "one", "Channel": channel, "PhysicalSizeX": 0.5}),
            (second, {"axes": "ZYX", "Name": "two", "PhysicalSizeZ": 3, "PhysicalSizeX": 2,
                      "PhysicalSizeXUnit": "pixel"}),
        ):  # fmt: skip
            file.write(values, metadata=said, photometric="minisblack")
    return first, second


def test_series_of_an_ome_tiff(tmp_path) -> None:
    first, second = ome_series(tmp_path / "a.ome.tif")
    said = r"2 series \(0 one 3 x 6 x 8, 1 two 10 x 6 x 8\); --series N takes one$"
    with pytest.raises(UsageError, match=said):
        open_source(tmp_path / "a.ome.tif")
    one, two = (open_source(tmp_path / "a.ome.tif", series=number) for number in (0, 1))
    assert one.fingerprint != two.fingerprint
    np.testing.assert_array_equal(values_of(one), five(first, "cyx"))
    np.testing.assert_array_equal(values_of(two), five(second, "zyx"))
    assert one.scale == (1, 1, 1, 1, 0.5) and one.units[4] == "micrometer"
    assert two.scale == (1, 1, 3, 1, 2) and two.units[2:] == ("micrometer", None, None)
    assert one.omero == ({"label": "DAPI", "color": "000000"},
                         {"label": "GFP", "color": "00FF00"},
                         {"label": "RFP", "color": "FFFFFF"})  # fmt: skip
    with pytest.raises(UsageError, match="--series 2 does not exist; it has 2"):
        open_source(tmp_path / "a.ome.tif", series=2)


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ({"photometric": "miniswhite"}, "is MINISWHITE, and its numbers are read as stored"),
        ({"resolution": (300, 300), "resolutionunit": 2}, "by inch or centimetre is not taken"),
        ({}, None),
    ],
)
def test_what_a_tiff_says_in_vain_is_noted(how: dict[str, Any], note: str | None, tmp_path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", DATA[0, 0, 0], **how)
    notes = open_source(tmp_path / "a.tif").notes
    assert [note in each for each in notes if note] == [True] * (note is not None)


def test_a_stack_of_unknown_meaning_is_z_with_a_note(tmp_path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", DATA[0, 0], photometric="minisblack")
    (note,) = open_source(tmp_path / "a.tif").notes
    assert "does not say what its pages are, and they are taken for z; --axes, such as" in note
    assert open_source(tmp_path / "a.tif", axes="tyx").notes == ()


@COSTLY
@given(
    dtype=st.sampled_from(["uint8", "int16", "uint16", "float32"]),
    nodata=st.sampled_from([None, 0, 7, "nan"]),
    scale=st.sampled_from([1.0, 0.5]), offset=st.sampled_from([0.0, 3.0]),
    interleave=st.sampled_from(["pixel", "band"]), count=st.integers(1, 4),
)  # fmt: skip
def test_a_geotiff_is_what_rasterio_reads(
    dtype: str, nodata: Any, scale: float, offset: float, interleave: str, count: int,
    tmp_path_factory,
) -> None:  # fmt: skip
    rasterio = pytest.importorskip("rasterio")
    path = tmp_path_factory.mktemp("raster") / "a.tif"
    values = (np.arange(count * 6 * 8) % 100).astype(dtype).reshape(count, 6, 8)
    nodata = None if nodata == "nan" and dtype != "float32" else nodata
    said = {"crs": "EPSG:32631", "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 6e6),
            "nodata": nodata and float(nodata), "interleave": interleave}  # fmt: skip
    with rasterio.open(path, "w", "GTiff", 8, 6, count, dtype=dtype, **said) as file:
        file.write(values)
        file.scales, file.offsets = (scale,) * count, (offset,) * count
        file.descriptions = [f"B{i}" for i in range(count)]
    with rasterio.open(path) as file:
        stored = file.read(masked=True)
        right = (stored.astype("float64") * file.scales[0] + file.offsets[0]).filled(np.nan)
    source = open_source(path)
    assert source.bands == (count > 1) and source.axes == ("cyx" if count > 1 else "yx")
    np.testing.assert_allclose(values_of(source)[0, :, 0], right, rtol=1e-6)
    np.testing.assert_array_equal(values_of(open_source(path, raw=True))[0, :, 0], values)
    assert [each["label"] for each in source.omero] == [f"B{i}" for i in range(count)]
    assert source.georeferenced
    packed = np.isnan(right).any() or (scale, offset) != (1.0, 0.0)
    assert source.dtype == ("float32" if packed else dtype)


def test_bands_of_different_scales_and_masks_are_named(tmp_path) -> None:
    rasterio = pytest.importorskip("rasterio")
    with rasterio.open(tmp_path / "a.tif", "w", "GTiff", 8, 6, 2, dtype="uint8") as file:
        file.write(np.ones((2, 6, 8), "u1"))
        file.scales = (0.5, 2.0)
    with pytest.raises(UsageError, match="bands have different values of scale; --raw reads what"):
        open_source(tmp_path / "a.tif")
    assert open_source(tmp_path / "a.tif", raw=True).dtype == "uint8"
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(tmp_path / "b.tif", "w", "GTiff", 8, 6, 1, dtype="uint8") as file,
    ):
        file.write(np.ones((1, 6, 8), "u1"))
        file.write_mask(np.eye(6, 8, dtype=bool))
    assert any("has a mask, which is" in note for note in open_source(tmp_path / "b.tif").notes)
