"""HDF5, NetCDF 4, NWB, Imaris, NIfTI and rasters, against the libraries that write them."""

import gzip
import json
import shutil
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base.errors import UsageError, where_in_users_code
from penstock.data import Box, is_transient, open_source
from penstock.data.stores import raster

from ..later import imported_later

pytestmark = pytest.mark.usefixtures("here")

h5py = imported_later("h5py")
nibabel = imported_later("nibabel")
tifffile = imported_later("tifffile")
ZYX = np.random.default_rng(0).integers(0, 60000, (5, 37, 41), "uint16")
Array = NDArray[Any]


def read(path: str, **knobs: Any) -> tuple[Any, Array]:
    """The source, and all its voxels, read by boxes of odd sides through its cache."""
    source = open_source(path, **knobs).with_cache(2**20)
    whole = np.empty(source.domain.shape, source.dtype)
    t, c, z, y, x = source.domain.shape
    for low in range(0, y, 17):
        box = Box((0, 0, 0, low, 0), (t, c, z, min(low + 17, y), x))
        whole[box.slices] = source.read(box)
    return source, whole


def refused(path: str, *words: str, **knobs: Any) -> None:
    with pytest.raises(UsageError) as error:
        open_source(path, **knobs)
    for word in words:
        assert word in str(error.value), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dtype", "chunks"), [("float16", None), ("uint16", (2, 16, 16))])
def test_hdf5(dtype: str, chunks: Any) -> None:
    values = ZYX.astype(dtype)
    with h5py.File("a.h5", "w") as file:
        packed = {"chunks": chunks, "compression": chunks and 4}
        data = file.create_dataset("raw/volume", data=values, **packed)
        data.attrs["element_size_um"] = (2.0, 0.5, 0.25)
        for dimension, name in zip(data.dims, "zyx" if chunks else "", strict=False):
            dimension.label = name
        file["table"] = np.arange(4)
    for path in ("a.h5", "a.h5::raw/volume", "a.h5::/raw/volume"):
        source, made = read(path)
        assert (made[0, 0] == values).all() and source.scale == (1, 1, 2.0, 0.5, 0.25)
        assert source.units[2] == "micrometer" and source.axes == "zyx"
    assert open_source("a.h5").chunks == (1, 1, *(chunks or (5, 37, 41)))
    refused("a.h5::raw/other", "has no array raw/other", "raw/volume (5 x 37 x 41)")
    refused("a.h5", "level 1 does not exist; it has level 0 only", level=1)


def test_hdf5_that_holds_several_arrays_or_none() -> None:
    with h5py.File("a.h5", "w") as file:
        file["a"], file["b/c"] = ZYX, ZYX[0]
    refused("a.h5", "a (5 x 37 x 41), b/c (37 x 41)", "--in-spec a.h5::a")
    h5py.File("b.h5", "w").close()
    refused("b.h5", "no array of numbers of two axes")
    Path("c.h5").write_bytes(b"\x89HDF" + bytes(99))
    refused("c.h5", "not a readable HDF5 file")
    refused("d.h5", "no such file")


def test_axes_that_hdf5_says() -> None:
    with h5py.File("a.h5", "w") as file:
        tags = json.dumps({"axes": [{"key": "x"}, {"key": "z"}, {"key": "y"}]})
        file.create_dataset("tags", data=ZYX).attrs["axistags"] = tags
        labelled = file.create_dataset("labelled", data=ZYX)
        for dim, name in zip(labelled.dims, ("time", "lat", "lon"), strict=True):
            dim.label = name
    assert (read("a.h5::tags")[1][0, 0] == ZYX.transpose(1, 2, 0)).all()
    source, made = read("a.h5::labelled")
    assert source.axes == "tyx" and (made[:, 0, 0] == ZYX).all()
    assert "time, lat, lon are taken for t, y, x" in source.notes[0]
    assert open_source("a.h5::labelled", axes="zyx").axes == "zyx"


@pytest.mark.parametrize("ending", ["jpg", "tif"])
def test_a_turn_that_is_not_applied_is_said(ending: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for turn in (1, 6):
        exif = pillow.Exif()
        exif[274] = turn
        pillow.fromarray(np.zeros((4, 5), "uint8")).save(f"{turn}.{ending}", exif=exif)
        said = "tag Orientation" in " ".join(open_source(f"{turn}.{ending}").notes)
        assert said == (turn == 6)


def test_bigdataviewer_keeps_numbers_without_a_sign_as_such_with_one() -> None:
    with h5py.File("a.h5", "w") as file:
        file["t00000/s00/0/cells"] = ZYX.view("int16")
    assert (read("a.h5")[1][0, 0] == ZYX).all()
    assert (read("a.h5", raw=True)[1][0, 0] == ZYX.view("int16")).all()


@pytest.mark.parametrize("form", ["NETCDF4", "NETCDF3_CLASSIC", "NETCDF3_64BIT"])
def test_netcdf_is_read_as_xarray_reads_it(form: Any) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    values = np.random.default_rng(1).normal(280, 9, (3, 20, 30)).astype("float32")
    values[1, 2, 3] = np.nan
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    xarray.Dataset({"t2m": (("time", "latitude", "longitude"), values)}).to_netcdf(
        "a.nc", encoding={"t2m": packed}, format=form
    )
    source, made = read("a.nc")
    with xarray.open_dataset("a.nc") as right:
        np.testing.assert_allclose(made[:, 0, 0], right["t2m"].values, rtol=1e-6)
    assert source.axes == "tyx" and "0.01 * stored + 280" in source.notes[-1]
    assert read("a.nc", raw=True)[0].dtype == np.int16


@pytest.mark.parametrize("form", ["NETCDF4", "NETCDF3_64BIT", 2, 3])
def test_coordinates_that_lie_evenly_say_the_size_of_a_voxel(form: Any) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    axes = {
        "time": ("time", [0.0, 1.0, 2.0], {"units": "days since 2000-01-01"}),
        "depth": ("depth", [0.0, 1.0, 4.0, 9.0], {"units": "m"}),
        "y": ("y", np.float32(5e6) - np.arange(5, dtype="f4") * 250, {"units": "m"}),
        "x": ("x", np.arange(6) * 0.1 + 7, {"units": "km"}),
    }
    values = np.zeros((3, 4, 5, 6), "f4")
    dataset = xarray.Dataset({"salt": (tuple(axes), values)}, axes)
    if isinstance(form, int):
        dataset.to_zarr("a.zarr", zarr_format=form, consolidated=False)
        source = open_source("a.zarr::salt")
    else:
        dataset.to_netcdf("a.nc", format=form)
        source = open_source("a.nc")
    np.testing.assert_allclose(source.scale, (1, 1, 1, 250, 0.1))
    assert source.units == (None, None, None, "meter", "kilometer")
    np.testing.assert_allclose(source.translation, (0, 0, 0, 0, 7))
    assert "runs backwards along y" in " ".join(source.notes)


@pytest.mark.parametrize("form", ["NETCDF4", "NETCDF3_CLASSIC"])
def test_what_netcdf_never_wrote_is_missing(form: Any) -> None:
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset("a.nc", "w", format=form) as file:
        for name, side in zip("zyx", ZYX.shape, strict=True):
            file.createDimension(name, side)
        file.createVariable("u", "f4", ("z", "y", "x"))[:2] = ZYX[:2]
    with netcdf.Dataset("a.nc") as file:
        right = file["u"][:].filled(np.nan)
    source, made = read("a.nc")
    assert np.array_equal(made[0, 0], right, equal_nan=True) and np.isnan(right[2:]).all()
    assert not any("coordinates" in note for note in source.notes)


def test_coordinates_that_are_not_taken_are_named() -> None:
    xarray = pytest.importorskip("xarray")
    places = {"z": ("z", np.arange(5.0) ** 2, {"units": "um"}), "x": np.arange(41) * 0.5}
    array = xarray.DataArray(ZYX, dims=("z", "y", "x"), coords=places, name="v")
    array.to_netcdf("a.nc", engine="netcdf4")
    array.to_dataset().to_zarr("a.zarr", consolidated=False)
    for path in ("a.nc", "a.zarr/v"):
        lost = (
            "the input's coordinates along z, x are not evenly spaced lengths: they go no further"
        )
        assert open_source(path).notes == (lost,)


def test_hdf5_says_what_of_it_is_not_read() -> None:
    with h5py.File("a.h5", "w") as file:
        file["complex"] = ZYX.astype("c8")
        file["table"] = np.zeros((3, 4), [("a", "i4")])
        file["there"] = h5py.ExternalLink("b.h5", "/d")
    refused("a.h5", "what is not read: complex (of complex64), table (of records), there (a link")
    layout = h5py.VirtualLayout(ZYX.shape, "u2")
    layout[:] = h5py.VirtualSource("gone.h5", "d", shape=ZYX.shape)
    with h5py.File("v.h5", "w") as file:
        file.create_virtual_dataset("v", layout, fillvalue=7)
    refused("v.h5", "numbers of it are in gone.h5, which is not there")
    Path("five.nc").write_bytes(b"CDF\5" + bytes(99))
    refused("five.nc", "is of the kind CDF-5, which is not read; nccopy -k netCDF-4")


def test_a_file_of_a_kind_that_is_not_read() -> None:
    Path("a.gif").write_bytes(b"GIF89a")
    refused("a.gif", "a.gif: its ending is of no kind that is read: Zarr, N5, TIFF files, DICOM")


def test_classic_netcdf_of_several_variables_is_refused_without_a_warning() -> None:
    netcdf_file = pytest.importorskip("scipy.io").netcdf_file
    with netcdf_file("a.nc", "w") as file:
        for axis, size in zip("zyx", ZYX.shape, strict=True):
            file.createDimension(axis, size)
        for name in "uv":
            file.createVariable(name, "i2", tuple("zyx"))[:] = 1
    refused(
        "a.nc", "it holds u (5 x 37 x 41), v (5 x 37 x 41); name one", "a.nc::u"
    )  # a warning is an error
    assert (read("a.nc::v")[1] == 1).all()


def test_nwb_has_x_before_y() -> None:
    with h5py.File("a.nwb", "w") as file:
        series = file.create_group("acquisition/TwoPhotonSeries")
        series.attrs["neurodata_type"] = "TwoPhotonSeries"
        series["data"] = ZYX
    source, made = read("a.nwb")
    assert source.axes == "tyx" and (made[:, 0, 0] == ZYX.transpose(0, 2, 1)).all()


@pytest.mark.parametrize(("mode", "turned"), [("PIXEL", "yxc"), ("LINE", "ycx"), ("PLANE", "cyx")])
def test_an_image_of_hdf5_has_its_colours_where_it_says(mode: str, turned: str) -> None:
    rgb = np.arange(3 * 5 * 7, dtype="uint8").reshape(3, 5, 7)
    with h5py.File("a.h5", "w") as file:
        stored = rgb.transpose(["cyx".index(axis) for axis in turned])
        attributes = file.create_dataset("image", data=stored).attrs
        attributes["CLASS"] = np.bytes_("IMAGE")
        attributes["INTERLACE_MODE"] = np.bytes_(f"INTERLACE_{mode}")
    source, made = read("a.h5")
    assert source.axes == "cyx" and (made[0, :, 0] == rgb).all()


def letters(text: object) -> Array:
    """A text as Imaris keeps it."""
    return np.array(list(str(text)), "S1")


def test_imaris_pads_its_chunks_and_says_the_size() -> None:
    right = np.random.default_rng(2).integers(0, 99, (2, 2, 5, 37, 41), "uint8")
    with h5py.File("a.ims", "w") as file:
        image = file.create_group("DataSetInfo/Image")
        ends = {"ExtMin0": 10, "ExtMax0": 10 + 41 * 0.5, "ExtMin1": 0, "ExtMax1": 37, "ExtMin2": 0,
                "ExtMax2": 10, "X": 41, "Y": 37, "Z": 5, "Unit": "um"}  # fmt: skip
        for key, value in ends.items():
            image.attrs[key] = letters(value)
        for c, name in enumerate(("DAPI", "GFP")):
            about = file.create_group(f"DataSetInfo/Channel {c}").attrs
            about["Name"], about["Color"] = letters(name), letters(f"1.000 0.502 {c}.000")
        for t, c in np.ndindex(2, 2):
            group = file.create_group(f"DataSet/ResolutionLevel 0/TimePoint {t}/Channel {c}")
            padded = np.zeros((8, 64, 64), "uint8")
            padded[:5, :37, :41] = right[t, c]
            group.create_dataset("Data", data=padded, chunks=(8, 32, 32), compression=2)
            for axis, side in zip("ZYX", right.shape[2:], strict=True):
                group.attrs[f"ImageSize{axis}"] = letters(side)
    source, made = read("a.ims")
    assert (made == right).all() and source.domain.shape == right.shape
    assert source.scale == (1, 1, 2, 1, 0.5) and source.translation == (0, 0, 1, 0.5, 10.25)
    shown = [(channel["label"], channel["color"]) for channel in source.omero]
    assert shown == [("DAPI", "FF8000"), ("GFP", "FF80FF")]
    shutil.copy("a.ims", "b.ims")
    with h5py.File("b.ims", "r+") as file:  # as in the smallest file that Imaris opens
        del file["DataSetInfo/Channel 0"], file["DataSetInfo/Channel 1"]
        for t, c in np.ndindex(2, 2):
            group = file[f"DataSet/ResolutionLevel 0/TimePoint {t}/Channel {c}"]
            del group["Data"]
            group["Data"] = right[t, c]
        file["DataSetInfo/Image"].attrs["ExtMax2"] = letters(0)  # so it says no depth
    source, made = read("b.ims")
    assert (made == right).all() and source.scale == (1, 1, 1, 1, 0.5) and not source.omero
    assert source.units == (None, None, None, "micrometer", "micrometer")
    refused("a.ims", "level 1 does not exist; it has level 0 only", level=1)


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
@pytest.mark.parametrize("slope", [None, 0.5, np.nan, 0])
def test_nifti_is_read_as_nibabel_reads_it(suffix: str, slope: float | None) -> None:
    affine = np.diag([0.5, 1.0, 3.0, 1.0])
    affine[:3, 3] = 7, -8, 9
    stored = ZYX.transpose(2, 1, 0).astype("int16")
    image = nibabel.Nifti1Image(stored, affine)
    image.header.set_xyzt_units("mm", "sec")
    nibabel.save(image, f"a.{suffix}")
    if slope is not None:
        _patched(Path(f"a.{suffix}"), 112, np.float32([slope, -3]))
    right = nibabel.load(f"a.{suffix}").get_fdata()
    source, made = read(f"a.{suffix}")
    assert (made[0, 0].transpose(2, 1, 0) == right).all()
    assert source.scale == (1, 1, 3, 1, 0.5) and source.translation == (0, 0, 9, -8, 7)
    assert source.units[2:] == ("millimeter",) * 3
    assert (read(f"a.{suffix}", raw=True)[1][0, 0].transpose(2, 1, 0) == stored).all()


def test_a_nifti_that_does_not_say_how_far_times_are_apart_gets_no_second() -> None:
    image = nibabel.Nifti1Image(np.zeros((4, 3, 2, 2), "int16"), np.eye(4))
    image.header.set_xyzt_units("mm", "sec")
    image.header["pixdim"][4] = 0
    nibabel.save(image, "a.nii")
    source = read("a.nii")[0]
    assert source.axes == "tzyx" and source.scale == (1,) * 5
    assert source.units == (None, None, *("millimeter",) * 3)


def _patched(path: Path, at: int, numbers: Array) -> None:
    """Write numbers into a header."""
    whole = path.read_bytes()
    packed = path.suffix == ".gz"
    whole = gzip.decompress(whole) if packed else whole
    whole = whole[:at] + numbers.tobytes() + whole[at + numbers.nbytes :]
    path.write_bytes(gzip.compress(whole) if packed else whole)


@pytest.mark.filterwarnings("ignore:unclosed file")  # nibabel, of a header of MGH
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("MGHImage", "v.mgz"), ("MGHImage", "v.mgh"), ("Nifti1Pair", "v.img"),
        ("Spm99AnalyzeImage", "v.hdr"), ("AnalyzeImage", "v.img"),
    ],
)  # fmt: skip
def test_relatives_of_nifti(kind: str, name: str) -> None:
    array = np.arange(5 * 37 * 41, dtype="i4").reshape(41, 37, 5)
    affine = np.diag([0.25, 0.5, 2, 1])
    affine[:3, 3] = -7, 8, 100
    image = getattr(nibabel, kind)(array, affine)
    image.to_filename(name)
    written = nibabel.load(name)
    source, made = read(name)
    assert (made[0, 0] == np.asanyarray(written.dataobj).T).all() and made.dtype == np.int32
    assert source.scale == (1, 1, 2, 0.5, 0.25) and source.units[2:] == ("millimeter",) * 3
    if source.affine is None:
        assert source.translation == (0, 0, *written.affine[2::-1, 3])
    else:  # of Analyze, which has x the other way
        assert source.affine == written.affine.tolist()
    for file in ("v.img", "v.hdr", name):
        if Path(file).exists():
            before = open_source(name).fingerprint
            Path(file).touch()
            assert open_source(name).fingerprint != before
    Path(name).with_suffix(".mgz").write_bytes(b"no")
    refused("v.mgz", "not a readable MGH file")


def test_hdf5_that_leads_out_of_its_folder_is_refused() -> None:
    """Numbers in other files, and a view of the array of another file, may be anything's."""
    Path("secret").write_bytes(bytes(range(64)))
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("a", (4, 4, 4), "u1", external=[(str(Path.cwd() / "secret"), 0, 64)])
    layout = h5py.VirtualLayout((4, 4, 4), "u1")
    layout[:] = h5py.VirtualSource("../x/b.h5", "b", (4, 4, 4))
    with h5py.File("b.h5", "w") as file:
        file.create_virtual_dataset("a", layout)
    refused("a.h5", "secret', which is not below it")
    refused("b.h5", "names '../x/b.h5', which is not below it")


@pytest.mark.slow
def test_a_virtual_array_is_read_and_the_process_ends_well() -> None:
    """HDF5 crashed when a process ended in which its properties were open."""
    with h5py.File("a.h5", "w") as file:
        file["a"] = np.arange(64, dtype="u1").reshape(4, 4, 4)
    layout = h5py.VirtualLayout((4, 4, 4), "u1")
    layout[:] = h5py.VirtualSource("a.h5", "a", (4, 4, 4))
    with h5py.File("b.h5", "w") as file:
        file.create_virtual_dataset("b", layout)
    subprocess.run([sys.executable, "-m", "penstock", "convert", "b.h5", "c.zarr"], check=True)
    assert (read("c.zarr")[1][0, 0].ravel() == np.arange(64)).all()


def test_nifti_that_contradicts_itself_is_told() -> None:
    image = nibabel.Nifti1Image(ZYX.T, np.diag([0.25, 0.5, 2, 1]))
    for size in (0.25, 3):
        image.header["pixdim"][1] = size
        nibabel.save(image, "a.nii")
        said = "affine and pixdim say different sizes" in " ".join(open_source("a.nii").notes)
        assert said == (size == 3)


def test_nifti_without_a_unit_is_in_millimeters() -> None:
    """That is what other tools take."""
    nibabel.save(nibabel.Nifti1Image(ZYX.astype("int16"), np.diag([1, 1, 2, 1])), "a.nii")
    source, _ = read("a.nii")
    assert source.units[2:] == ("millimeter",) * 3 and "taken as millimeters" in source.notes[0]


def test_the_code_of_a_library_that_reads_files_is_not_the_user_s() -> None:
    with pytest.raises(FileNotFoundError) as error:
        nibabel.load("none.nii")
    assert "test_formats.py" in where_in_users_code(error.value)


def test_nifti_that_holds_no_volume_is_refused() -> None:
    axes = nibabel.cifti2.ScalarAxis(["a"]), nibabel.cifti2.ScalarAxis(["b", "c"])
    nibabel.Cifti2Image(np.zeros((1, 2), "f4"), axes).to_filename("a.dscalar.nii")
    refused("a.dscalar.nii", "is a Cifti2Image without places in space")


def test_nifti_that_is_damaged() -> None:
    nibabel.save(nibabel.Nifti1Image(ZYX.astype("int16"), np.eye(4)), "a.nii")
    nibabel.save(nibabel.Nifti1Image(ZYX.astype("int16"), np.eye(4)), "b.nii.gz")
    whole = Path("a.nii").read_bytes()
    Path("short.nii").write_bytes(whole[:5000])
    Path("short.nii.gz").write_bytes(Path("b.nii.gz").read_bytes()[:4000])
    Path("none.nii").write_bytes(b"no" * 400)
    _patched(Path("a.nii"), 80, np.float32([np.nan]))
    refused("short.nii", "is shorter than its header says")
    refused("short.nii.gz", "not a readable NIfTI file: Compressed file ended")
    refused("none.nii", "not a readable NIfTI file")
    Path("huge.nii").write_bytes(whole)
    _patched(Path("huge.nii"), 42, np.int16([32767] * 3))
    Path("huge.nii.gz").write_bytes(gzip.compress(Path("huge.nii").read_bytes()))
    refused("huge.nii.gz", "that its header says: it has")
    refused("a.nii", "that is not finite")
    _patched(Path("b.nii.gz"), 112, np.float32([2, np.nan]))
    refused("b.nii.gz", "not a readable NIfTI file", "invalid intercept nan")


@pytest.fixture
def rasters() -> Array:
    """Two rasters of three bands side by side, in one VRT, each with no-data and a scale."""
    rasterio = pytest.importorskip("rasterio")
    values = np.random.default_rng(4).integers(1, 9000, (3, 60, 80), "uint16")
    values[:, :5] = 0
    for number in range(2):
        with rasterio.open(
            f"{number}.tif", "w", driver="GTiff", width=40, height=60, count=3, dtype="uint16",
            tiled=True, blockxsize=16, blockysize=16, crs="EPSG:32633", nodata=0,
            transform=rasterio.Affine(10, 0, 5e5 + 400 * number, 0, -10, 6e6),
        ) as file:  # fmt: skip
            file.write(values[:, :, 40 * number : 40 * number + 40])
            file.scales = (0.5,) * 3
            file.descriptions = ("B2", "B3", "B4")
    parts = "".join(
        f'<SimpleSource><SourceFilename relativeToVRT="1">{n}.tif</SourceFilename><SourceBand>{{0}}'
        f'</SourceBand><SrcRect xOff="0" yOff="0" xSize="40" ySize="60"/><DstRect xOff="{40 * n}" '
        'yOff="0" xSize="40" ySize="60"/></SimpleSource>'
        for n in range(2)
    )
    bands = "".join(
        f'<VRTRasterBand dataType="UInt16" band="{b}"><Description>B{b + 1}</Description>'
        f"<NoDataValue>0</NoDataValue><Scale>0.5</Scale>{parts.format(b)}</VRTRasterBand>"
        for b in (1, 2, 3)
    )
    Path("all.vrt").write_text(
        '<VRTDataset rasterXSize="80" rasterYSize="60"><SRS>EPSG:32633</SRS>'
        f"<GeoTransform>500000, 10, 0, 6000000, 0, -10</GeoTransform>{bands}</VRTDataset>"
    )
    return values


def test_a_mosaic(rasters: Array) -> None:
    source, made = read("all.vrt")
    right = np.where(rasters == 0, np.nan, rasters * 0.5).astype("float32")
    np.testing.assert_array_equal(made[0, :, 0], right)
    assert source.axes == "cyx" and source.scale == (1, 1, 1, 10, 10) and source.bands
    assert source.units[3] == "meter" and source.omero[2]["label"] == "B4"
    assert source.georeferenced
    assert (read("all.vrt", raw=True)[1][0, :, 0] == rasters).all()
    Path("1.tif").write_bytes(b"none")
    with pytest.raises((OSError, ValueError, RuntimeError)):
        read("all.vrt")
    refused("none.vrt", "no such file")


def test_files_of_one_raster_are_all_read_alike(rasters: Array) -> None:
    import rasterio

    source, made = read("1.tif", raw=True)
    assert source.scale == (1, 1, 1, 10, 10) and source.units[3:] == ("meter", "meter")
    with rasterio.open("1.tif") as file:
        place = {"crs": file.crs, "transform": file.transform}
    lossless = {"REVERSIBLE": "YES", "QUALITY": 100}
    for suffix, driver, bands in ((".jp2", "JP2OpenJPEG", 3), (".png", "PNG", 1)):
        placed = {} if suffix == ".png" else place | lossless
        profile = {"driver": driver, "width": 40, "height": 60, "count": bands, "dtype": "uint16"}
        with warnings.catch_warnings():  # of what is written
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(f"a{suffix}", "w", **profile, **placed) as file:
                file.write(rasters[:bands, :, 40:])
        other, same = read(f"a{suffix}")
        assert (same == made[:, :bands]).all()
        assert other.bands and other.scale == (None if suffix == ".png" else source.scale)


def test_pixels_of_a_raster_with_west_at_the_right_have_their_size(rasters: Array) -> None:
    from rasterio import Affine, shutil
    from rasterio import open as raster

    profile = {"driver": "GTiff", "width": 80, "height": 60, "count": 3, "dtype": "uint16"}
    place = Affine(-10, 0, 5e5, 0, -20, 6e6)
    with raster("west.tif", "w", crs="EPSG:32633", transform=place, **profile) as file:
        file.write(rasters)
    shutil.copy("west.tif", "west.vrt", driver="VRT")
    for name in ("west.tif", "west.vrt"):
        source = open_source(name)
        assert source.scale == (1, 1, 1, 20, 10) and source.units[3:] == ("meter", "meter")


@pytest.mark.slow
def test_a_raster_behind_http(rasters: Array) -> None:
    from tests.slow_server import Loopback

    with Loopback(Path.cwd(), delay_s=0) as server:
        source, made = read(f"{server.url}/1.tif", raw=True)
        assert (made[0, :, 0] == rasters[:, :, 40:]).all() and source.chunks == (1, 1, 1, 16, 16)
        refused(f"{server.url}/none.tif", "not a readable raster")
        tifffile.imwrite("pages.tif", ZYX)
        refused(f"{server.url}/pages.tif", f"has {len(ZYX)} images, and GDAL reads one")
        tifffile.imwrite("page.ome.tif", ZYX[0], metadata={"axes": "YX", "PhysicalSizeX": 0.5})
        assert raster.TEXT_STAYS in open_source(f"{server.url}/page.ome.tif").notes
        assert "s1gnature" not in open_source(f"{server.url}/1.tif?sig=s1gnature").name


@pytest.mark.slow
def test_a_raster_in_a_bucket_of_another_server(rasters, s3_endpoint, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    file, head = Path("1.tif").read_bytes(), {"Content-Type": "image/tiff"}
    url = f"{s3_endpoint}/test-bucket/1.tif"
    urllib.request.urlopen(urllib.request.Request(url, file, head, method="PUT")).close()
    # GDAL holds the interpreter while it waits, and the server is a thread of this one.
    lines = (
        "from penstock.data import open_source; source = open_source('s3://test-bucket/1.tif', "
        "raw=True); print(source.read(source.domain).sum(dtype=int))"
    )
    out = subprocess.run([sys.executable, "-c", lines], capture_output=True, timeout=60, text=True)
    assert int(out.stdout) == rasters[:, :, 40:].sum(dtype=int), out.stderr


@pytest.mark.slow
def test_a_raster_that_fails_names_the_reason_and_is_tried_again_if_a_server_is_away(
    rasters: Array,
) -> None:
    from tests.slow_server import Loopback

    Path("0.tif").unlink()
    source = open_source("all.vrt", raw=True)
    with pytest.raises(OSError, match=r"0\.tif: No such file") as lost:
        source.read(source.domain)
    assert not is_transient(lost.value)
    tifffile.imwrite("large.tif", np.tile(rasters[0], (20, 20)))
    with Loopback(Path.cwd(), delay_s=0) as server:
        source = open_source(f"{server.url}/large.tif")
    with pytest.raises(ConnectionError) as away:
        source.read(source.domain)
    assert is_transient(away.value)


@pytest.mark.parametrize(
    ("ending", "driver", "how"),
    [
        ("png", "PNG", {}),
        (
            "jp2",
            "JP2OpenJPEG",
            {"BLOCKXSIZE": 32, "BLOCKYSIZE": 32, "REVERSIBLE": "YES", "QUALITY": 100},
        ),
    ],
)
def test_a_picture_that_is_cut_off_is_an_error(ending: str, driver: str, how: Any) -> None:
    """GDAL, left to itself, reads a PNG of 8 bits as 0 everywhere, and of JPEG 2000 of several
    tiles what was in memory."""
    from rasterio import open as raster
    from rasterio.errors import NotGeoreferencedWarning

    place, shape = Path(f"a.{ending}"), (160, 160)
    values = np.random.default_rng(0).integers(1, 256, shape, dtype="uint8")
    size = {"width": shape[1], "height": shape[0], "count": 1, "dtype": "uint8"}
    with warnings.catch_warnings():  # of what is written
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with raster(place, "w", driver=driver, **size, **how) as file:
            file.write(values, 1)
    assert (read(place)[1] == values).all()
    place.write_bytes(place.read_bytes()[:-4000])
    source = open_source(place)
    with pytest.raises(OSError, match=r"Read Error|segment too long|Stream too short"):
        source.read(source.domain)


def test_a_source_says_how_much_it_keeps() -> None:
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("chunked", data=ZYX, chunks=(2, 16, 16))
        file["plain"] = ZYX
    nibabel.save(nibabel.Nifti1Image(ZYX.astype("int16"), np.eye(4)), "a.nii")
    Path("mapped").mkdir()
    Path("packed").mkdir()
    tifffile.imwrite("mapped/0.tif", ZYX[0])
    tifffile.imwrite("packed/0.tif", ZYX[0], compression="zlib")
    kept = {"a.h5::chunked": 2**20, "packed": 2**20, "a.h5::plain": 0, "a.nii": 0, "mapped": 0}
    for path, most in kept.items():
        assert open_source(path).with_cache(2**20).cache_bytes == most, path
