"""What several test files of this folder share."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data import AXES, Box, Objects, Sink, open_sink
from penstock.data.packed import write as dataset
from penstock.data.packed.format import ArrayLayout, Packed

from ..seed_spec import seed_out_spec
from ..traced import traced

SHAPE = (2, 3, 10, 13, 17)

DATA = np.arange(np.prod(SHAPE), dtype="u2").reshape(SHAPE)

ZARR2 = {"chunks": [1, 1, 4, 5, 6], "dtype": "<u2", "compressor": {"id": "zstd", "level": 1}}

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def write(driver: str, path: Path, array: np.ndarray, metadata: dict[str, Any]) -> None:
    """Write an array with TensorStore alone."""
    import tensorstore as ts

    key = "dimensions" if driver == "n5" else "shape"
    spec = {
        "driver": driver,
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {key: array.shape, **metadata},
    }
    ts.open(spec, create=True).result().write(array).result()


def zarr3(chunk: list[int], inner: list[int] | None = None) -> dict[str, Any]:
    codecs: list[Any] = [BYTES, {"name": "gzip", "configuration": {"level": 1}}]
    if inner:
        sharding = {"chunk_shape": inner, "codecs": codecs}
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    return {"data_type": "uint16", "chunk_grid": grid, "codecs": codecs}


def ome_multiscale(axes: str, path: str = "0") -> dict[str, Any]:
    return {
        "axes": [{"name": a, "type": "space", "unit": "micrometer"} for a in axes],
        "datasets": [
            {
                "path": f"{path}{level}",
                "coordinateTransformations": [
                    {"type": "scale", "scale": [1.0, 1.0, 2.0, 0.5 * 2**level, 0.5 * 2**level]}
                ],
            }
            for level in range(2)
        ],
        "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1, 3, 1]}],
    }


# Each builder writes DATA with a library that is not Penstock, and returns what to open.


def build_memory(folder: Path) -> Any:
    return DATA


def build_npy(folder: Path) -> Any:
    np.save(folder / "a.npy", DATA.astype(">u2"))
    return folder / "a.npy"


def build_zarr2(folder: Path) -> Any:
    write("zarr", folder / "a.zarr", DATA, ZARR2)
    return str(folder / "a.zarr")


def build_zarr2_big_endian(folder: Path) -> Any:
    write("zarr", folder / "a.zarr", DATA, {**ZARR2, "dtype": ">u2"})
    return str(folder / "a.zarr")


def build_zarr3(folder: Path) -> Any:
    write("zarr3", folder / "a.zarr", DATA, zarr3([1, 1, 4, 5, 6]))
    return f"file://{folder}/a.zarr"


def build_zarr3_sharded(folder: Path) -> Any:
    write("zarr3", folder / "a.zarr", DATA, zarr3([1, 1, 8, 10, 12], [1, 1, 4, 5, 6]))
    kvstore = {"driver": "file", "path": str(folder)}
    return {"driver": "zarr3", "kvstore": kvstore, "path": "a.zarr"}


def build_n5(folder: Path) -> Any:
    raw = {"blockSize": [6, 5, 4, 1, 1], "dataType": "uint16", "compression": {"type": "gzip"}}
    write("n5", folder / "a.n5", DATA.T, raw)
    return folder / "a.n5"


def build_precomputed(folder: Path) -> Any:
    import tensorstore as ts

    scale = {"size": [17, 13, 10], "chunk_size": [6, 5, 4], "encoding": "raw", "key": "s"}
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{folder}/a",
        "multiscale_metadata": {"data_type": "uint16", "num_channels": 3, "type": "image"},
        "scale_metadata": {**scale, "resolution": [4, 4, 40], "voxel_offset": [0, 0, 0]},
    }
    ts.open(spec, create=True).result().write(DATA[0].T).result()
    return folder / "a"


def _levels(folder: Path, driver: str, metadata: dict[str, Any]) -> Path:
    root = folder / "a.zarr"
    write(driver, root / "s0", DATA, metadata)
    write(driver, root / "s1", DATA[..., ::2, ::2], metadata)
    return root


def build_ome_zarr_04(folder: Path) -> Any:
    root = _levels(folder, "zarr", ZARR2)
    saved(root, ".zgroup", '{"zarr_format": 2}')
    multiscale = {"version": "0.4", **ome_multiscale(AXES, "s")}
    saved(root, ".zattrs", json.dumps({"multiscales": [multiscale]}))
    return root


def build_ome_zarr_05(folder: Path) -> Any:
    root = _levels(folder, "zarr3", zarr3([1, 1, 4, 5, 6]))
    ome = {"version": "0.5", "multiscales": [ome_multiscale(AXES, "s")]}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}
    saved(root, "zarr.json", json.dumps(group))
    return root


def build_cast(folder: Path) -> Any:
    base = {"driver": "zarr", "kvstore": f"file://{build_zarr2(folder)}/"}
    return {"driver": "cast", "dtype": "uint16", "base": base}


def build_tiff(folder: Path, **options: Any) -> Path:
    import tifffile

    ome = {"axes": "TCZYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 1.5, "PhysicalSizeYUnit": "nm"}
    path = folder / "a.ome.tif"
    tifffile.imwrite(path, DATA, metadata=ome, **options)
    return path


def build_tiff_tiled(folder: Path) -> Any:
    return build_tiff(folder, tile=(16, 16), compression="zlib")


def build_tiff_strips(folder: Path) -> Any:
    return build_tiff(folder, rowsperstrip=4, compression="lzw", predictor=True)


def build_tiff_plain(folder: Path) -> Any:
    return build_tiff(folder, byteorder=">")


def ome_tiff_set(folder: Path, names: list[str]) -> None:
    """Planes of `DATA` along z, each in a file of its own."""
    import tifffile

    files = "".join(
        f'<TiffData FirstZ="{z}" IFD="0"><UUID FileName="{name}">urn:uuid:{z}</UUID></TiffData>'
        for z, name in enumerate(names)
    )
    for z, name in enumerate(names):
        ome = (
            f'<?xml version="1.0"?><OME UUID="urn:uuid:{z}"><Image ID="Image:0"><Pixels '
            'ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="17" SizeY="13" '
            f'SizeZ="{len(names)}" SizeC="1" SizeT="1">{files}</Pixels></Image></OME>'
        )
        options = {"description": ome, "metadata": None, "compression": "zlib"}
        tifffile.imwrite(folder / name, DATA[0, 0, z], **options)


def build_tiff_volume(folder: Path) -> Any:
    """Tiles of three dimensions, the slices of a page along z."""
    import tifffile

    path = folder / "a.tif"
    options = {"tile": (4, 16, 16), "volumetric": True, "photometric": "minisblack"}
    tifffile.imwrite(path, DATA, metadata={"axes": "TCZYX"}, **options)
    return path


BUILDERS = [value for name, value in list(globals().items()) if name.startswith("build_")]

BUILDERS.remove(build_tiff)


def count_reads(metric: str = "batch_read") -> int:
    import tensorstore as ts

    metrics = ts.experimental_collect_matching_metrics(f"/tensorstore/kvstore/file/{metric}")
    return sum(value["value"] for metric in metrics for value in metric["values"])


DOMAIN = Box((0,) * 5, SHAPE)


def out_spec(kvstore: dict[str, Any]) -> dict[str, Any]:
    """The seed's own output spec, in the shape of these tests."""
    return seed_out_spec(kvstore, SHAPE, [1, 1, 4, 5, 6])


def written_as(name: str, **options: Any) -> Callable[[Path], tuple[Any, dict[str, Any]]]:
    return lambda folder: (folder / name, options)


SINKS = {
    "memory": lambda folder: (np.zeros(SHAPE, "u2"), {}),
    "ome_zarr_04": written_as("out.zarr", ome_version="0.4", chunks=(4, 5, 6)),
    "ome_zarr_05": written_as("out.zarr", chunks=(1, 1, 4, 5, 6)),
    "ome_zarr_sharded": written_as("out.zarr", chunks=(2, 5, 3), shards=(4, 5, 6)),
    "n5": written_as("out.n5", chunks=(4, 5, 6)),
    "spec": lambda folder: (out_spec({"driver": "file", "path": str(folder / "out.zarr")}), {}),
}


def open_out(spec: Any, domain: Box = DOMAIN, dtype: str = "u2", **options: Any) -> Sink:
    return open_sink(spec, domain=domain, dtype=np.dtype(dtype), **options)


def saved(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def odd_image(folder: Path, **transformation: Any) -> Path:
    """An OME-Zarr image with something odd in its metadata."""
    root = build_ome_zarr_04(folder)
    attributes = json.loads((root / ".zattrs").read_text())
    kind, value = next(iter(transformation.items()))
    added = {"type": kind, kind: [1, 1, 1, 1, value]}
    attributes["multiscales"][0]["coordinateTransformations"].append(added)
    (root / ".zattrs").write_text(json.dumps(attributes))
    return root


PLAIN: dict[str, Any] = {"shards": None, "workers": 2, "overwrite": False, "facts": {}}

SMALL = {
    "inputs": ArrayLayout((4, 6, 5), (4, 6, 2), tuple("abcde")),
    "targets": ArrayLayout((4, 6, 3), (4, 6, 2), tuple("xyz")),
}


def small_sample(index: int) -> dict[str, np.ndarray]:
    """Distinct everywhere, but for a channel that never changes."""
    made = {}
    for offset, (name, layout) in enumerate(SMALL.items()):
        count = int(np.prod(layout.shape))
        values = np.arange(count, dtype=np.float32) + 1000 * index + 500 * offset
        made[name] = values.reshape(layout.shape)
    made["targets"][..., 2] = 7
    return made


def write_small(root: Path, samples: int = 5, **settings: Any) -> Packed:
    return dataset.write_dataset(
        root, SMALL, range(100, 100 + samples), small_sample, **(PLAIN | settings)
    )


def read(packed: Packed, name: str) -> np.ndarray:
    import zarr

    return np.asarray(zarr.open_array(str(packed.arrays[name].path), mode="r")[...])


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that Python and numpy took at most beyond what they had."""
    with traced() as most:
        work()
        return most()


LOW, HIGH = 0, 2


def some_labels(scene: str = "a") -> Objects:
    """Two at the shore, two at sea, all HIGH."""
    return Objects.of(
        scene,
        [[50, 100], [60, 500], [700, 100], [800, 500]],
        is_vessel=[1, 1, 1, 0],
        is_fishing=[1, 0, -1, -1],
        length_m=[20.0, 100.0, 200.0, math.nan],
        confidence=HIGH,
        shore_km=[0.5, 0.6, 7.0, 8.0],
    )


def as_predictions(labels: Objects) -> Objects:
    return Objects.of(
        labels.scene,
        labels.points,
        is_vessel=labels.is_vessel,
        is_fishing=labels.is_fishing,
        length_m=np.nan_to_num(labels.length_m, nan=50.0),
        score=np.linspace(0.9, 0.6, len(labels)),
    )


SIZE, CHIP, OVERLAP = (330, 470), 128, 32

NAMES = ("vh", "vv", "bathymetry", "wind_speed")


def words_of(data: Path, out: Path, *more: str) -> list[str]:
    """As the seed spells them."""
    return ["preprocess", "--data_root", str(data),
            "--train_label_file", str(data / "labels" / "train.csv"),
            "--val_label_file", str(data / "labels" / "validation.csv"),
            "--output_dir", str(out), "--channels", ",".join(NAMES), "--num_workers", "2",
            "--chip-size", str(CHIP), *more]  # fmt: skip
