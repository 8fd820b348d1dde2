"""Series of DICOM slices, as pydicom reads each of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.data import Box, open_source

from ..later import imported_later
from .test_formats import read, refused

pytestmark = pytest.mark.usefixtures("here")

pydicom = imported_later("pydicom")
SLICES = np.random.default_rng(5).integers(-1000, 3000, (5, 37, 41)).astype("int16")


def write_slice(path: str, number: int, syntax: str = "", **says: Any) -> None:
    """A slice that lies 2.5 mm above the one before, with other members where they are given."""
    uid = pydicom.uid
    header = pydicom.Dataset()
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    header.SOPClassUID, header.SOPInstanceUID = uid.CTImageStorage, f"1.2.{number}"
    header.SeriesInstanceUID, header.SeriesDescription = "1.2.3", "chest"
    header.Rows, header.Columns = SLICES.shape[1:]
    header.BitsAllocated = header.BitsStored = 16
    header.HighBit, header.PixelRepresentation, header.SamplesPerPixel = 15, 1, 1
    header.PhotometricInterpretation = "MONOCHROME2"
    header.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    header.ImagePositionPatient = [-7, 8, 100 + 2.5 * number]
    header.PixelSpacing = [0.5, 0.25]
    header.RescaleSlope, header.RescaleIntercept = 2, -1024
    header.PixelData = SLICES[number].tobytes()
    for name, value in says.items():
        setattr(header, name, value)
    if says.get("Rows"):
        header.PixelData = SLICES[number, : says["Rows"]].tobytes()
    if syntax:
        header.compress(syntax)
    header.save_as(path, enforce_file_format=True)


def write_series(folder: str = "chest", **says: Any) -> None:
    Path(folder).mkdir(exist_ok=True)
    for number in range(len(SLICES)):  # their names are in no order
        write_slice(f"{folder}/IM{(number * 3) % 5}", number, **says)


@pytest.mark.parametrize("syntax", ["", "1.2.840.10008.1.2.5"], ids=["plain", "RLE"])
def test_a_series_is_read_as_pydicom_reads_it(syntax: str) -> None:
    write_series(syntax=syntax)
    Path("chest/notes.txt").write_text("mine")
    right = np.stack([pydicom.dcmread(f"chest/IM{n * 3 % 5}").pixel_array for n in range(5)])
    assert (right == SLICES).all()
    source, made = read("chest")
    assert (made[0, 0] == right * 2.0 - 1024).all() and made.dtype == np.float32
    assert "2 * stored + -1024" in source.notes[-1]
    assert source.axes == "zyx" and source.scale == (1, 1, 2.5, 0.5, 0.25)
    assert source.translation == (0, 0, 100, 8, -7) and source.units[2:] == ("millimeter",) * 3
    source, made = read("chest/IM*", raw=True)
    assert (made[0, 0] == right).all() and made.dtype == np.int16
    assert source.cache_bytes == 2**20 and source.chunks == (1, 1, 1, 37, 41)
    Path("chest/IM3").rename("one.dcm")
    assert open_source("one.dcm").domain.shape == (1, 1, 1, 37, 41)


def test_a_block_reads_the_slices_that_it_touches() -> None:
    write_series()
    source = open_source("chest", raw=True)
    Path("chest/IM2").write_bytes(b"gone")  # the last one
    assert (source.read(Box((0,) * 5, (1, 1, 4, 37, 41)))[0, 0] == SLICES[:4]).all()
    with pytest.raises(pydicom.errors.InvalidDicomError):
        source.read(source.domain)


def test_a_slice_that_changes_is_another_input() -> None:
    write_series()
    before = open_source("chest").fingerprint
    write_slice("chest/IM0", 0, PatientID="another")
    assert open_source("chest").fingerprint != before


def test_a_gap_is_named() -> None:
    write_series()
    Path("chest/IM1").unlink()
    refused("chest", "IM3 and IM4 lie 5 mm apart, where others lie 2.5 mm apart")
    write_slice("chest/IM1", 1)
    refused("chest", "IM1 and IM3 lie at one place")
    write_series("twice")
    for number in range(len(SLICES)):
        write_slice(f"twice/again{number}", number)
    refused("twice", "IM0 and again0 lie at one place")


def test_several_slices_at_each_place_are_times() -> None:
    Path("film").mkdir()
    for number in range(4):
        place = [-7, 8, 2.5 * (1 - number % 2)]
        write_slice(f"film/{9 - number}", number, ImagePositionPatient=place, InstanceNumber=number)
    source, made = read("film", raw=True)
    assert source.axes == "tzyx" and source.scale[2:] == (2.5, 0.5, 0.25)
    assert (made[:, 0] == SLICES[[1, 0, 3, 2]].reshape(2, 2, 37, 41)).all()
    assert "2 slices at each place, which are taken for times" in source.notes[0]


def test_slices_that_lie_close_are_not_times() -> None:
    Path("fine").mkdir()
    for number in range(4):
        place = [-7, 8, 0.0004 * number]
        write_slice(f"fine/{number}", number, ImagePositionPatient=place, InstanceNumber=number)
    source, made = read("fine", raw=True)
    assert source.axes == "zyx" and (made[0, 0] == SLICES[:4]).all()
    np.testing.assert_allclose(source.scale[2], 0.0004)


def test_a_mosaic_of_slices_is_refused() -> None:
    write_slice("all.dcm", 0, ImageType=["ORIGINAL", "PRIMARY", "M", "ND", "MOSAIC"])
    refused("all.dcm", "is a mosaic of slices, of Siemens, which is not read")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"PixelSpacing": [0.5, 0.5]}, "IM1 has another spacing than IM0"),
        ({"Rows": 30}, "IM1 has another size or dtype"),
        ({"PixelRepresentation": 0}, "IM1 has another size or dtype"),
        ({"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}, "IM1 has another orientation"),
        ({"ImagePositionPatient": None}, "IM1: is no slice of an image: it lacks ImagePosition"),
        ({"NumberOfFrames": 2}, "IM1: is truncated: 3046 bytes of 6080 are there"),
    ],
)
def test_a_slice_unlike_the_others_is_refused(says: dict[str, Any], words: str) -> None:
    write_series()
    write_slice("chest/IM1", 2, **says)
    refused("chest", words)


def test_what_is_no_slice_is_refused() -> None:
    write_series()
    whole = Path("chest/IM2").read_bytes()
    for length in (150, 300, 900, len(whole) - 1):
        Path("chest/IM2").write_bytes(whole[:length])
        refused("chest", "IM2: ")
    refused("chest", "is truncated: 3045 bytes of 3046 are there")
    write_slice("all.dcm", 0, NumberOfFrames=2**31 - 1)
    refused("all.dcm", "is truncated: it cannot hold 2,147,483,647 frames in")
    Path("foreign.dcm").write_bytes(b"no" * 99)
    refused("foreign.dcm", "foreign.dcm: not a readable DICOM file")
    refused("none.dcm", "no such file")
    write_slice("colour.dcm", 0, PhotometricInterpretation="PALETTE COLOR")
    refused("colour.dcm", "is PALETTE COLOR; pictures of grey values or RGB are read")


def test_a_dose_is_scaled_and_a_table_of_values_is_named() -> None:
    table = pydicom.Dataset()
    table.LUTDescriptor, table.ModalityLUTType, table.LUTData = [2, 0, 16], "US", b"abcd"
    write_slice(
        "dose.dcm", 1, RescaleSlope=None, RescaleIntercept=None, DoseGridScaling="0.5",
        ModalityLUTSequence=[table],
    )  # fmt: skip
    source, made = read("dose.dcm")
    assert (made[0, 0, 0] == SLICES[1] * 0.5).all()
    assert "the input's ModalityLUTSequence is not applied" in " ".join(source.notes)


def test_the_library_that_a_compressed_slice_needs_is_named() -> None:
    write_slice("chest.dcm", 0)
    header = pydicom.dcmread("chest.dcm")
    header.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless
    header.PixelData = pydicom.encaps.encapsulate([b"\0" * 8])
    header.save_as("chest.dcm")
    refused("chest.dcm", "dependencies: gdcm - requires gdcm>=3.0.10; pylibjpeg - requires")


def test_several_series_are_listed() -> None:
    write_series()
    for number in range(2):
        write_slice(f"chest/other{number}", number, SeriesInstanceUID="9", SeriesDescription="leg")
    refused("chest", "holds 2 series (0 chest 5 slices, 1 leg 2 slices); --series N takes one")
    assert open_source("chest", series=1).domain.shape == (1, 1, 2, 37, 41)


def test_what_goes_no_further_is_said() -> None:
    write_series(
        ImageOrientationPatient=[1, 0, 0, 0, -1, 0], PixelPaddingValue=-2000,
        PhotometricInterpretation="MONOCHROME1",
    )  # fmt: skip
    source, made = read("chest", raw=True)
    assert (made[0, 0] == SLICES[::-1]).all() and source.translation == (0,) * 5
    for words in ("turned or flipped", "MONOCHROME1", "PixelPaddingValue -2000 counts"):
        assert words in " ".join(source.notes)


def item(**says: Any) -> Any:
    """A sequence of one item."""
    made = pydicom.Dataset()
    for name, value in says.items():
        setattr(made, name, value)
    return [made]


def write_frames(path: str, places: Sequence[float], **says: Any) -> None:
    """An enhanced file, whose frames lie at places along z."""
    groups = [
        item(PlanePositionSequence=item(ImagePositionPatient=[-7, 8, place]), **each)[0]
        for place, each in zip(places, says.pop("each", [{}] * len(places)), strict=True)
    ]
    shared = item(
        PixelMeasuresSequence=item(PixelSpacing=[0.5, 0.25]),
        PlaneOrientationSequence=item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0]),
    )
    write_slice(
        path, 0, ImagePositionPatient=None, ImageOrientationPatient=None, PixelSpacing=None,
        NumberOfFrames=len(places), SharedFunctionalGroupsSequence=shared,
        PerFrameFunctionalGroupsSequence=groups, PixelData=SLICES[: len(places)].tobytes(), **says,
    )  # fmt: skip


@pytest.mark.parametrize("syntax", ["", "1.2.840.10008.1.2.5"], ids=["plain", "RLE"])
def test_frames_of_a_file_are_slices(syntax: str) -> None:
    write_frames("ct.dcm", [110, 105, 100, 107.5, 102.5], syntax=syntax)
    source, made = read("ct.dcm")
    assert (made[0, 0] == SLICES[[2, 4, 1, 3, 0]] * 2.0 - 1024).all()
    assert source.axes == "zyx" and source.scale == (1, 1, 2.5, 0.5, 0.25)
    assert source.translation == (0, 0, 100, 8, -7) and source.chunks == (1, 1, 1, 37, 41)
    write_frames("ct.dcm", [0, 1, 0, 1])
    source, made = read("ct.dcm", raw=True)
    assert source.axes == "tzyx" and (made[:, 0].reshape(4, 37, 41) == SLICES[:4]).all()
    write_frames("ct.dcm", [0, 1, 2, 5])
    refused("ct.dcm", "frame 2 of ct.dcm and frame 3 of ct.dcm lie 3 mm apart, where others")
    whole = Path("ct.dcm").read_bytes()
    Path("ct.dcm").write_bytes(whole[:-5])
    refused("ct.dcm", "ct.dcm: is truncated: ")


def test_slopes_of_frames_and_of_slices() -> None:
    """Positron emission has one for each slice."""
    each = [
        {"PixelValueTransformationSequence": item(RescaleSlope=1 + n / 4, RescaleIntercept=n)}
        for n in range(4)
    ]
    write_frames("mr.dcm", [0, 1, 2, 3], each=each)
    source, made = read("mr.dcm")
    for n, plane in enumerate(made[0, 0]):
        assert (plane == SLICES[n] * (1 + n / 4) + n).all()
    assert made.dtype == np.float32 and "has a RescaleSlope of its own" in source.notes[-1]
    source, made = read("mr.dcm", raw=True)
    assert (made[0, 0] == SLICES[:4]).all() and source.notes == ()
    write_series("pet")
    write_slice("pet/IM1", 2, RescaleSlope=3)
    assert (read("pet")[1][0, 0, 2] == SLICES[2] * 3.0 - 1024).all()


def test_a_file_without_a_place_is_a_picture_or_a_film() -> None:
    nowhere = {"ImagePositionPatient": None, "ImageOrientationPatient": None}
    write_slice("xray.dcm", 0, **nowhere, PixelSpacing=None, ImagerPixelSpacing=[0.1, 0.2])
    assert read("xray.dcm")[0].scale == (1, 1, 1, 0.1, 0.2)
    colours = np.random.default_rng(1).integers(0, 255, (4, 37, 41, 3), "uint8")
    write_slice(
        "film.dcm", 0, **nowhere, PixelSpacing=None, NumberOfFrames=4, SamplesPerPixel=3,
        PhotometricInterpretation="RGB", PlanarConfiguration=0, BitsAllocated=8, BitsStored=8,
        HighBit=7, PixelRepresentation=0, PixelData=colours.tobytes(),
    )  # fmt: skip
    source, made = read("film.dcm", raw=True)
    assert source.axes == "tcyx" and source.scale is None
    assert (made[:, :, 0] == np.moveaxis(colours, -1, 1)).all()
    Path("two").mkdir()
    for number in range(2):
        write_slice(f"two/{number}.dcm", number, **nowhere)
    refused("two", "it lacks ImageOrientationPatient, ImagePositionPatient")


def test_frames_of_a_dose_lie_by_its_offsets() -> None:
    write_slice(
        "dose.dcm", 0, NumberOfFrames=3, GridFrameOffsetVector=[100, 104, 102],
        PixelData=SLICES[:3].tobytes(),
    )  # fmt: skip
    source, made = read("dose.dcm", raw=True)
    assert (made[0, 0] == SLICES[[0, 2, 1]]).all() and source.scale == (1, 1, 2, 0.5, 0.25)


@pytest.mark.filterwarnings("ignore:.*encod:UserWarning")  # as it is written
def test_what_pydicom_warns_of_is_one_note(capfd) -> None:
    Path("odd").mkdir()
    for number in range(3):
        write_slice(
            f"odd/{number}.dcm", number, SpecificCharacterSet="ISO 9999", SeriesDescription="ä",
            PixelData=SLICES[number].tobytes() + bytes(10),
        )  # fmt: skip
    assert main(["convert", "odd", "a.zarr", "--levels", "none"]) == 0
    out, err = capfd.readouterr()
    assert "pydicom warns of the input: " in out and " more)" in out
    assert "Warning" not in out + err and out.count("pydicom") == 1
