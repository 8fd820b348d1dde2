"""Small files of microscopes that no library writes: LIF and ND2, byte by byte.

The layouts are those that liffile and nd2 read: LIF is a header of XML and blocks of memory, ND2 a
row of chunks with a map of them at the end.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DIMENSIONS = {"x": 1, "y": 2, "z": 3, "t": 4}
_MAGIC = 0x0ABECEDA
_NAME_BYTES = 4072


def write_lif(
    path: str, images: Mapping[str, tuple[str, NDArray[Any]]], size: float = 2e-7
) -> None:
    """Images by name, each with its axes in stored order; the last is ``s`` for colours, stored as
    blue, green and red."""
    elements, blocks = [], []
    for number, (name, (axes, array)) in enumerate(images.items()):
        stored = array[..., ::-1] if axes[-1] == "s" else array
        strides = dict(zip(axes, np.ascontiguousarray(stored).strides, strict=True))
        sides = dict(zip(axes, array.shape, strict=True))
        dimensions = "".join(
            f'<DimensionDescription DimID="{_DIMENSIONS[axis]}" NumberOfElements="{sides[axis]}" '
            f'Origin="{size * 10}" Length="{size * (sides[axis] - 1)}" '
            f'Unit="{"s" if axis == "t" else "m"}" '
            f'BytesInc="{strides[axis]}" BitInc="0"/>'
            for axis in axes if axis in _DIMENSIONS
        )  # fmt: skip
        samples = "s" if axes[-1] == "s" else "c"
        bits = array.itemsize * 8
        channels = "".join(
            f'<ChannelDescription DataType="{int(array.dtype.kind == "f")}" '
            f'ChannelTag="{3 - c if samples == "s" else 0}" Resolution="{bits}" Min="0" Max="1" '
            f'NameOfMeasuredQuantity="" Unit="" LUTName="Lut {c}" IsLUTInverted="0" '
            f'BytesInc="{c * strides.get(samples, 0)}" BitInc="0"/>'
            for c in range(sides.get(samples, 1))
        )
        elements.append(
            f'<Element Name="{name}"><Data><Image><ImageDescription><Channels>{channels}'
            f"</Channels><Dimensions>{dimensions}</Dimensions></ImageDescription></Image></Data>"
            f'<Memory Size="{array.nbytes}" MemoryBlockID="MemBlock_{number}"/></Element>'
        )
        blocks.append((f"MemBlock_{number}", np.ascontiguousarray(stored).tobytes()))
    xml = (
        '<LMSDataContainerHeader Version="2"><Element Name="project"><Children>'
        f"{''.join(elements)}</Children></Element></LMSDataContainerHeader>"
    )
    with Path(path).open("wb") as file:
        text = xml.encode("utf-16-le")
        file.write(struct.pack("<IIBI", 0x70, len(text) + 5, 0x2A, len(xml)) + text)
        for name, data in blocks:
            file.write(struct.pack("<IIBQBI", 0x70, 14, 0x2A, len(data), 0x2A, len(name)))
            file.write(name.encode("utf-16-le") + data)


def write_lsm(path: str, array: NDArray[Any], channels: Mapping[str, Sequence[int]]) -> None:
    """Planes of shape (t, z, c, y, x), each with a thumbnail, and the colours of channels by name.
    Not two: then old microscopes kept their bits in another place."""
    import tifffile

    said = np.zeros(1, tifffile.TIFF.CZ_LSMINFO)
    sizes = zip(("Time", "Z", "Channels", "Y", "X"), array.shape, strict=True)
    for key, value in {
        "MagicNumber": 67127628, "StructureSize": said.nbytes, "ScanType": 6,
        "VoxelSizeX": 1e-7, "VoxelSizeY": 2e-7, "VoxelSizeZ": 1e-6, "TimeIntervall": 2.5,
        **{f"Dimension{axis}": side for axis, side in sizes},
    }.items():  # fmt: skip
        said[key] = value
    with tifffile.TiffWriter(path, byteorder="<") as file:
        for number, planes in enumerate(array.reshape(-1, *array.shape[2:])):
            tags = [] if number else [(34412, 1, said.nbytes, said.tobytes(), True)]
            how = {"photometric": "minisblack", "planarconfig": "separate", "metadata": None}
            file.write(planes, extratags=tags, **how)
            file.write(planes[0, ::4, ::4], subfiletype=1, metadata=None)
    colours = b"".join(bytes([*each, 0]) for each in channels.values())
    names = b"".join(struct.pack("<I", len(n) + 1) + n.encode() + b"\0" for n in channels)
    length, count, after = 24 + len(colours) + len(names), len(channels), 24 + len(colours)
    block = struct.pack("<6I", length, count, count, 24, after, 0)
    whole, without = Path(path).read_bytes(), said.tobytes()
    said["OffsetChannelColors"] = len(whole)
    Path(path).write_bytes(whole.replace(without, said.tobytes()) + block + colours + names)


def write_stk(path: str, array: NDArray[Any]) -> None:
    """Planes of shape (z, y, x) one after another, of which the only page names the first."""
    import tifffile

    planes, rows, columns = array.shape
    # A number of ours, and its place in the file where it is a text or a fraction.
    says = [(4, 0), (5, 8), (6, 16)]
    values = struct.pack("<4I I3s", 645, 1000, 1, 2, 3, b"um\0")
    of_planes = struct.pack("<6I", 3, 2, 0, 0, 0, 0) * planes
    tags = [
        (33628, 5, len(says), bytes(8 * len(says)), True),
        (33629, 5, 3 * planes, of_planes, True),
    ]
    flat = array.reshape(planes * rows, columns)
    tifffile.imwrite(path, flat, byteorder="<", extratags=tags, metadata=None)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0].tags
        entries = {code: page[code].offset for code in (257, 278, 279, 33628, 33629)}
        place = page[33628].valueoffset
    end = Path(path).stat().st_size
    with Path(path).open("r+b") as raw:
        for code, at, value in (
            (257, 8, rows), (278, 8, rows), (279, 8, rows * columns * array.itemsize),
            (33628, 2, 4 + (len(says) << 16)), (33629, 2, 5 + (planes << 16)),
        ):  # fmt: skip
            raw.seek(entries[code] + at)
            raw.write(struct.pack("<I", value))
        raw.seek(place)
        raw.write(b"".join(struct.pack("<2I", number, end + at) for number, at in says))
        raw.seek(end)
        raw.write(values)


def write_nd2(
    path: str, array: NDArray[Any], loops: Sequence[tuple[str, int]] = (), *,
    names: Sequence[str] = ("",), samples: int = 1, packed: bool = False,
    absent: Sequence[int] = (),
) -> None:  # fmt: skip
    """Frames of shape (frame, c, y, x), in loops of t, p and z.

    Args:
        path: The file.
        array: The frames.
        loops: The axis and the length of each loop, the outermost first.
        names: Those of the channels.
        samples: Components of a channel, 3 of a colour picture.
        packed: True for frames that are compressed.
        absent: Numbers of frames that are left out.
    """
    _, components, height, width = array.shape
    chunks = {
        "ImageAttributesLV!": _level("SLxImageAttributes", {
            "uiWidth": width, "uiWidthBytes": width * components * array.itemsize,
            "uiHeight": height, "uiComp": components, "uiBpcInMemory": array.itemsize * 8,
            "uiBpcSignificant": array.itemsize * 8,
            "uiSequenceCount": len(array) - len(absent),
            "eCompression": 0 if packed else 2, "dCompressionParam": 0.0,
        }),
        "ImageMetadataSeqLV|0!": _level("SLxPictureMetadata", {
            "bCalibrated": True, "dCalibration": 0.25,
            "sPicturePlanes": {
                "uiCount": len(names),
                "sPlaneNew": {
                    f"a{n}": {
                        "uiCompCount": samples, "sDescription": name, "uiColor": 255,
                        "pFluorescentProbe": {"m_EmissionSpectrum": {"uiCount": 0}},
                    }
                    for n, name in enumerate(names)
                },
            },
        }),
        **({"ImageMetadataLV!": _level("SLxExperiment", _experiment(loops))} if loops else {}),
    }  # fmt: skip
    with Path(path).open("wb") as file:
        signature = b"ND2 FILE SIGNATURE CHUNK NAME01!"
        file.write(struct.pack("<IIQ32s64s", _MAGIC, 32, 64, signature, b"Ver3.0"))
        places = {
            name: (_chunk(file, name, data), len(data)) for name, data in chunks.items()
        }  # fmt: skip
        for number, frame in enumerate(array):
            if number in absent:
                continue
            pixels = np.ascontiguousarray(np.moveaxis(frame, 0, -1)).tobytes()
            data = bytes(8) + (zlib.compress(pixels) if packed else pixels)
            name = f"ImageDataSeq|{number}!"
            places[name] = _chunk(file, name, data), len(data)
        listed = b"".join(n.encode() + struct.pack("<QQ", *p) for n, p in places.items())
        signature = b"ND2 CHUNK MAP SIGNATURE 0000001!"
        at = file.tell()
        listed += signature + struct.pack("<Q", at)
        file.write(struct.pack("<IIQ", _MAGIC, 32, len(listed)))
        file.write(b"ND2 FILEMAP SIGNATURE NAME 0001!" + listed)


def _chunk(file: Any, name: str, data: bytes) -> int:
    """Write a chunk, and say where it begins. Pixels begin 4096 bytes later, after 8 of a time."""
    at: int = file.tell()
    file.write(struct.pack("<IIQ", _MAGIC, _NAME_BYTES, len(data)))
    file.write(name.encode().ljust(_NAME_BYTES, b"\0") + data)
    return at


def _experiment(loops: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The outermost loop, and within it the others."""
    (axis, count), *inner = loops
    kind, parameters = {
        "t": (1, {"uiCount": count, "dStart": 0.0, "dPeriod": 500.0, "dDuration": 0.0}),
        "p": (2, {"Points": {
            f"i{n:010}": {"dPosX": 5.0 * n, "dPosY": 0.0, "pPosName": f"well {n}"}
            for n in range(count)
        }}),
        "z": (4, {"uiCount": count, "dZStep": 1.5}),
    }[axis]  # fmt: skip
    said: dict[str, Any] = {"eType": kind, "uLoopPars": parameters}
    if inner:
        said["ppNextLevelEx"] = {"": _experiment(inner)}
    return said


def _level(name: str, members: Mapping[str, Any]) -> bytes:
    """A dictionary as ND2 has it: members, and a list of where each begins."""
    head = _named(11, name)
    items = [_member(key, value) for key, value in members.items()]
    body, start = b"".join(items), len(head) + 12
    places = [start + sum(map(len, items[:n])) for n in range(len(items))]
    length = start + len(body)
    return (
        head
        + struct.pack("<IQ", len(items), length)
        + body
        + struct.pack(f"<{len(places)}Q", *places)
    )


def _named(kind: int, name: str) -> bytes:
    return struct.pack("BB", kind, len(name) + 1) + (name + "\0").encode("utf-16-le")


def _member(name: str, value: Any) -> bytes:
    if isinstance(value, Mapping):
        return _level(name, value)
    if isinstance(value, bool):
        return _named(1, name) + struct.pack("B", value)
    if isinstance(value, int):
        return _named(3, name) + struct.pack("<I", value)
    if isinstance(value, float):
        return _named(6, name) + struct.pack("<d", value)
    return _named(8, name) + (value + "\0").encode("utf-16-le")
