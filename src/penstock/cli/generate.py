"""``penstock generate``: data to measure with."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import (
    PRESET_SAMPLES,
    GenerateConfig,
    UsageError,
    add_flags,
    as_settings,
    check_belongs,
    check_local,
    format_bytes,
    from_flags,
    plural,
    significant,
    usable_cores,
)
from ..data import (
    PRESETS,
    Packed,
    Specimen,
    World,
    clear_data_set,
    open_netcdf,
    write_data_set,
    write_dataset,
    write_volume,
)
from .progress import counted_progress

MOST_WORKERS = 8
VOLUME, XVIEW3 = "volume", "xview3"

_PACKED = {"samples", "shards", "workers", "overwrite"}
KNOBS = {
    "a preset": _PACKED | {"grid", "seed"},
    "--from": _PACKED | {"inputs", "targets", "offsets", "target_offset"},
    "a volume": {"seed", "shape", "chunks", "clean", "shards", "workers", "overwrite"},
    "xview3": {"seed", "scenes", "validation", "size", "objects", "tiff", "overwrite"},
}
"""The knobs that each kind takes. Any other knob is refused."""


EXAMPLES = """
penstock generate volume noisy.ome.zarr --shape 64 160 160   # synthetic microscopy, as OME-Zarr
penstock generate ufs-p1 data/ufs --samples 64               # synthetic weather, packed
penstock generate xview3 scenes --scenes 4                   # synthetic radar scenes, as xView3
penstock generate --from FILE.nc data/mine                   # a NetCDF, packed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock generate (PRESET | volume | xview3 | --from FILE.nc) OUT [flags]"
    parser.add_argument(
        "preset",
        nargs="?",
        metavar="PRESET",
        help="ufs-p1, ufs-p2, volume, or xview3",
    )
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE.nc", help="NetCDF file to pack"
    )
    add_flags(parser, GenerateConfig)


def run(args: argparse.Namespace) -> int:
    preset, out = _what(args)
    config = from_flags(GenerateConfig, args)
    check_local(out, "OUT")
    kind = "--from" if args.source else {VOLUME: "a volume", XVIEW3: XVIEW3}.get(preset, "a preset")
    check_belongs(config.model_fields_set, KNOBS, kind)
    if kind == XVIEW3:
        return _xview3(out, config)
    if kind == "a volume":
        return _volume(out, config)
    packed = _pack_file(args.source, out, config) if args.source else _pack(preset, out, config)
    print("\n".join(lines(packed)))
    return 0


def _what(args: argparse.Namespace) -> tuple[str, Path]:
    presets = (*PRESETS, VOLUME, XVIEW3)
    # argparse assigns a single word to the last positional argument, OUT.
    words = [str(word) for word in (args.preset, args.out) if word is not None]
    if args.source:
        if len(words) != 1:
            raise UsageError(
                f"--from {args.source} takes OUT and nothing else, and got "
                f"{' '.join(words) or 'nothing; put OUT before --inputs and --targets'}"
            )
        return "", Path(words[0])
    if len(words) != 2:
        raise UsageError(
            f"give what to make ({', '.join(presets)}, or --from FILE.nc) and OUT; "
            f"got {' '.join(words) or 'neither'}"
        )
    if words[0] not in presets:
        raise UsageError(f"there is no preset {words[0]!r}; there are {', '.join(presets)}")
    return words[0], Path(words[1])


def _pack(name: str, out: Path, config: GenerateConfig) -> Packed:
    preset, samples = PRESETS[name], config.samples or PRESET_SAMPLES
    world = World(config.grid, config.seed)
    facts = {"preset": name, "grid": config.grid, "seed": config.seed}
    return _write(
        out,
        preset.layouts(config.grid),
        range(samples),
        lambda index: world.sample(preset, index),
        facts,
        config,
    )


def _pack_file(source: Path, out: Path, config: GenerateConfig) -> Packed:
    stacked = open_netcdf(
        source,
        inputs=config.inputs,
        targets=config.targets,
        offsets=config.offsets,
        target_offset=config.target_offset,
        samples=config.samples,
    )
    with contextlib.closing(stacked):
        if stacked.left_out:
            names = ", ".join(stacked.left_out)
            print(f"{source}: left out, because they have no latitude or longitude: {names}")
        if stacked.groups:
            print(f"{source}: left out, because groups are not read: {', '.join(stacked.groups)}")
        if stacked.over_gaps:
            many = plural(stacked.over_gaps, "sample")
            print(
                f"{source}: left out, because a gap lies between their steps: {many}, whose steps "
                f"are not about {stacked.step:g} apart, as most are"
            )
        facts = {
            "preset": None,
            "seed": None,
            "step": stacked.step,
            "source": str(source),
            "cast": "float32",
            "offsets": stacked.offsets,
            "target_offset": config.target_offset,
            "covered_degrees": stacked.covered(),
        }
        return _write(out, stacked.layouts, stacked.ids, stacked.sample, facts, config)


def _write(
    out: Path,
    layouts: Any,
    ids: Sequence[int],
    make: Callable[[int], Any],
    facts: Mapping[str, Any],
    config: GenerateConfig,
) -> Packed:
    if config.shards and len(config.shards) != 1:
        raise UsageError(f"--shards {config.shards}: give one number, the samples in a shard")
    with counted_progress(len(ids)) as progress:
        return write_dataset(
            out,
            layouts,
            ids,
            make,
            shards=config.shards[0] if config.shards else None,
            workers=_workers(config),
            overwrite=config.overwrite,
            facts={**facts, "settings": as_settings(config)},
            progress=progress,
        )


def _volume(out: Path, config: GenerateConfig) -> int:
    specimen = Specimen(config.seed)
    with counted_progress(math.prod(config.shape), "voxel") as progress:
        write_volume(
            out,
            config.shape,
            specimen.without_noise if config.clean else specimen.image,
            chunks=config.chunks,
            shards=config.shards,
            workers=_workers(config),
            overwrite=config.overwrite,
            progress=progress,
        )
    print(f"{out}: {' x '.join(map(str, config.shape))} voxels (z, y, x) of uint16")
    return 0


def _workers(config: GenerateConfig) -> int:
    return config.workers or min(usable_cores(), MOST_WORKERS)


def _xview3(out: Path, config: GenerateConfig) -> int:
    clear_data_set(out, config.overwrite)
    validation = config.validation or max(1, config.scenes // 4)
    with counted_progress(config.scenes, "scene") as progress:
        counts = write_data_set(
            out,
            config.size,
            scenes=config.scenes,
            validation=validation,
            objects=config.objects,
            tiff=config.tiff,
            seed=config.seed,
            progress=progress,
        )
    print(
        f"{out}: {plural(config.scenes, 'scene')} of {config.size[0]} x {config.size[1]} pixels "
        "of 10 m"
    )
    for split, number in (("train", config.scenes - validation), ("validation", validation)):
        print(
            f"{split}: {plural(number, 'scene')}, {plural(counts[split], 'label')} in "
            f"{out / 'labels' / split}.csv"
        )
    return 0


def lines(packed: Packed) -> list[str]:
    """Lines that describe the data set."""
    samples = packed.num_samples
    dtypes = ", ".join(dict.fromkeys(str(array.dtype) for array in packed.arrays.values()))
    made = [f"{packed.root}: {plural(samples, 'sample')}, {dtypes}"]
    for array in packed.arrays.values():
        chunks = " x ".join(map(str, array.chunks))
        made.append(
            f"{array.name:<8} {' x '.join(map(str, array.shape))} ({', '.join(array.axes)}), "
            f"chunks {chunks}, {format_bytes(array.sample_bytes)} a sample"
        )
    if (source := packed.document.get("source")) is not None:
        made.append(f"Values of {source} are decoded by the CF conventions and cast to float32.")
    if lacking := packed.document.get("not_finite"):
        (channel, count), *others = lacking.items()
        more = f" and some of {plural(len(others), 'other channel')}" if others else ""
        made.append(
            f"Values that are not finite: {count:,} of {channel}{more}; statistics leave them out."
        )
    decoded, stored = packed.document["decoded_bytes"], packed.document["stored_bytes"]
    made.append(
        f"Compression ratio {significant(decoded / stored)}: {format_bytes(decoded)} in "
        f"{format_bytes(stored)}"
    )
    return made
