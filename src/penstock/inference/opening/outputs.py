"""The outputs of a job: a sink for each head, and the place of each volume in it.

Its other files may replace nothing and lie inside no array.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...base import InferConfig, UsageError, check_folder, check_outputs, plural
from ...data import (
    SAME,
    Box,
    ScaledGrid,
    Sink,
    Source,
    held_dtype,
    levels_below,
    on_grid,
    open_sink,
    refuse_overlap,
)
from ...models import model_files
from ..run_folder.folder import check_outside
from ..run_folder.names import RUN_FILES
from ..run_folder.reader import Placed
from ..tiling.geometry import PatchShape, per_axis
from .heads import HeadFacts, HeadPlan, default_dtype, packing_of_scores, rounded
from .selection import as_selected

_MOST_LEVEL_BYTES = 2**27
"""Most bytes of a level of which not all blocks have come. A layer of its chunks takes about this
much in a volume of 1500 voxels along y and x."""
_WITH_LEVELS = ("cog", "ome")
"""The kinds of files that have levels."""


@dataclass(frozen=True, slots=True)
class Output(Placed):
    """A sink, and the place of each volume in it."""

    sink: Sink

    @property
    def corner(self) -> tuple[int, ...]:
        """A corner of the sink's spatial chunk grid, in coordinates of its head."""
        return self.corner_of(self.sink.grid_origin)

    @property
    def anchor(self) -> tuple[int, ...]:
        """The same corner in source coordinates."""
        return self.grid.back().box(Box(self.corner, self.corner)).start

    @property
    def write_grid(self) -> tuple[int, ...]:
        """The least voxels of the source that are whole chunks and whole voxels of the sink."""
        # So many voxels of the sink are n / f of the source, which need not be a whole number.
        pairs = zip(self.sink.write_grid[2:], self.grid.factors, strict=True)
        return tuple(math.lcm(n, f.numerator) // f.numerator * f.denominator for n, f in pairs)


def open_outputs(
    config: InferConfig,
    source: Source,
    selected: tuple[Sequence[int], Sequence[int]],
    at_once: int,
    heads: Sequence[HeadFacts],
    mask: Source | None = None,
) -> list[Output]:
    """Open an output for each head of the model. Creates nothing.

    ``selected`` are the times and channels of the source, ``at_once`` is the number of channels
    that the model takes. Raises `UsageError` for a sink that cannot take its head, or that overlaps
    the source, the ``mask`` or another sink, and for sinks whose chunks do not line up.
    """
    times, channels = selected
    outputs: list[Output] = []
    dtypes = _dtypes(config, source.dtype, heads)
    for spec, head, dtype in zip(config.out_spec, heads, dtypes, strict=True):
        grid = ScaledGrid(head.factors, source.domain.start[2:])
        frame = of_head(source, grid)
        as_input = head.recipe is None or head.recipe.scaling is None
        shape = (len(times), len(channels) // at_once * head.written, *frame.domain.shape[2:])
        sink = open_sink(
            spec,
            domain=Box.of((0,) * 5, shape),
            dtype=dtype,
            like=as_selected(
                frame,
                times,
                channels,
                named=head.written == at_once and (at_once == 1 or head.kind == "intensity"),
                windows=head.kind == "intensity" and config.denormalize and as_input,
                packing=packing_of_scores(head.kind, dtype),
            ),
            chunks=_chunks(config),
            shards=config.shards and per_axis(config.shards, plane=False, thin=1),
            overwrite=config.overwrite,
            resume=config.resumes,
            ome_version="plain" if config.plain else config.ome_zarr,
            at=(0, 0, *source.domain.start[2:]),
            files=True,
            rule=None if config.levels == "none" else head.rule,
        )
        refuse_overlap("--out-spec", sink, {"the input": source, "the mask of --mask": mask})
        _check_axes(sink, frame.domain, head.written)
        _check_levels(sink, config.levels)
        outputs.append(_output(sink, source.domain, grid, head.written, selected, at_once))
    for one, other in itertools.combinations(outputs, 2):
        _check_pair(one, other)
    return outputs


def _output(
    sink: Sink,
    domain: Box,
    grid: ScaledGrid,
    written: int,
    selected: tuple[Sequence[int], Sequence[int]],
    at_once: int,
) -> Output:
    """A sink with the places of what is ``selected`` of a source with this domain."""
    times, channels = selected
    firsts = channels if at_once == 1 else range(len(channels) // at_once)
    places = itertools.product(
        _places(sink, domain, 0, times, 1, whole=True),
        _places(sink, domain, 1, firsts, written, whole=at_once == 1),
    )
    offset = zip(domain.start[2:], sink.domain.start[2:], strict=True)
    shift = tuple(there - here for here, there in offset)
    output = Output(written, shift, tuple(places), grid, sink)
    if grid.box(Box(output.anchor, output.anchor)).start != output.corner:
        raise UsageError(f"--out-spec {sink.name}: its chunks begin within voxels of the input")
    return output


def sizes_of_heads(
    outputs: Sequence[Output],
    heads: Sequence[HeadPlan],
    seen: Box,
    written: Box,
    shape: PatchShape,
    sampled: bool,
) -> dict[str, Any]:
    """The facts for a plan on the values that heads have for a voxel of ``seen``, what the network
    sees, and outputs for ``written``, what blocks cut. ``sampled`` says that some is no sample."""
    stride = [p - o for p, o in zip(shape.patch, shape.overlap, strict=True)]
    shares = [head.grid.density(seen, stride) for head in heads]
    channels = [math.ceil(h.channels * share) for h, share in zip(heads, shares, strict=True)]
    written_bytes = [
        math.ceil(h.written * share) * h.dtype.itemsize
        for h, share in zip(heads, shares, strict=True)
    ]
    each = list(zip(heads, channels, strict=True))
    sized = ((len(o.places) * o.box(0, written).size, o.sink.dtype.itemsize) for o in outputs)
    return {
        "out_channels": sum(channels),
        "out_bytes": sum(written_bytes),
        "brick_voxel_bytes": tuple(count * head.kept.itemsize for head, count in each),
        "block_voxel_bytes": (
            *(count * max(head.kept.itemsize, head.dtype.itemsize) for head, count in each),
            int(sampled),
        ),
        "summed": any(head.summed for head in heads),
        "output_bytes": sum(count * itemsize for count, itemsize in sized),
    }


def level_bytes(config: InferConfig, sinks: Sequence[Sink]) -> int:
    """Bytes for the first level below outputs, of whose blocks some are in flight."""
    if config.levels == "none":
        return 0
    images = [sink for sink in sinks if getattr(sink, "documents", None)]
    below = [levels_below(sink.domain.shape, count=config.levels) for sink in images]
    return sum(
        min(_MOST_LEVEL_BYTES, math.prod(levels[0].shape) * sink.dtype.itemsize)
        for sink, levels in zip(images, below, strict=True)
        if levels
    )


def of_head(source: Source, grid: ScaledGrid) -> Source:
    """The source as it would be on the grid of a head."""
    if grid.factors == SAME:
        return source
    steps = [1 / float(factor) for factor in grid.factors]
    return on_grid(source, grid.box(source.domain[2:]), steps)


def dtype_notes(
    config: InferConfig, source: np.dtype[Any], heads: Sequence[HeadFacts], sinks: Sequence[Sink]
) -> Iterator[str]:
    """Sentences on outputs of another dtype than their values: scores of which only whole numbers
    stay, and those of a format that has only a wider one. ``source`` is the dtype of the input."""
    yield from filter(None, map(rounded, heads, sinks))
    if config.out_dtype is not None:  # the user wants it
        return
    for head, dtype, sink in zip(heads, _dtypes(config, source, heads), sinks, strict=True):
        wanted = default_dtype(head, source)
        if wanted != dtype == sink.dtype:
            yield f"{sink.name} holds {wanted} as {dtype}, as its format has no {wanted}"


def _dtypes(
    config: InferConfig, source: np.dtype[Any], heads: Sequence[HeadFacts]
) -> list[np.dtype[Any]]:
    """The dtype of each output, if it is new."""
    if (said := config.out_dtype) is None:
        made = [default_dtype(head, source) for head in heads]
        return [held_dtype(str(s), each) for s, each in zip(config.out_spec, made, strict=True)]
    if len(said) not in (1, len(heads)):
        raise UsageError(
            f"--out-dtype names {plural(len(said), 'dtype')} but there are "
            f"{plural(len(heads), 'output')}"
        )
    return [_dtype(name) for name in ([*said] * len(heads) if len(said) == 1 else said)]


def _check_levels(sink: Sink, levels: int | Literal["none"] | None) -> None:
    """Raise `UsageError` if levels are asked for where none can be."""
    has_levels = getattr(sink, "documents", None) or getattr(sink, "kind", "") in _WITH_LEVELS
    if levels not in (None, "none", 1) and not has_levels:
        raise UsageError(
            f"--levels {levels}: {sink.name} is an array alone; OME-Zarr, GeoTIFF and OME-TIFF "
            "have levels"
        )


def _check_axes(sink: Sink, domain: Box, channels: int) -> None:
    """Refuse a sink whose spatial shape differs from the source's, and one that keeps in one chunk
    what is written in several pieces."""
    have = sink.domain.shape
    for axis, name in enumerate("zyx", start=2):
        if have[axis] != domain.shape[axis]:
            raise UsageError(
                f"--out-spec {sink.name} has {have[axis]} along {name} but this job "
                f"writes {domain.shape[axis]}"
            )
    for axis, name, once in ((0, "t", 1), (1, "c", channels)):
        grid = sink.write_grid[axis]
        # What is written at once need not fill chunks if it is all that there is.
        if once % grid and once < have[axis]:
            raise UsageError(
                f"--out-spec {sink.name} keeps {grid} along {name} in one chunk but {once} "
                "is written at a time; give it chunks of 1 there"
            )


def _places(
    sink: Sink, domain: Box, axis: int, selected: Sequence[int], size: int, *, whole: bool
) -> list[int]:
    """The first index in a sink of each selected time or channel, which takes ``size`` indices.

    Along t and c a sink may hold only what is selected, in that order. If ``whole``, it may also
    hold all that the source has, at the same indices.
    """
    start, extent = sink.domain.start[axis], sink.domain.shape[axis]
    if extent == len(selected) * size:
        return [start + i * size for i in range(len(selected))]
    if whole and extent == domain.shape[axis] * size:
        return [start + (i - domain.start[axis]) * size for i in selected]
    raise UsageError(
        f"--out-spec {sink.name} has {extent} along {'tc'[axis]} but this job "
        f"writes {len(selected) * size}"
    )


def _check_pair(one: Output, other: Output) -> None:
    refuse_overlap("--out-spec", one.sink, {f"the output {other.sink.name}": other.sink})
    for axis, grid in enumerate(other.write_grid):
        if (one.anchor[axis] - other.anchor[axis]) % grid:
            raise UsageError(
                f"--out-spec {one.sink.name} and {other.sink.name}: their chunks begin at "
                f"different places along {'zyx'[axis]}"
            )


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        raise UsageError(f"--out-dtype {name!r} is not a dtype; try uint16 or float32") from None


def _chunks(config: InferConfig) -> tuple[int, ...] | None:
    """The chunks of a new output: those of --chunks, or sides that divide --block evenly.

    None if no side of a sensible size does; then the store chooses.
    """
    if config.chunks is not None:
        return per_axis(config.chunks, plane=False, thin=1)
    if config.block is None or config.shards is not None:
        return None
    sides = tuple(chunk_side(n) for n in per_axis(config.block, plane=False, thin=1))
    return sides if all(sides) else None


def chunk_side(block: int) -> int:
    """The side of a chunk, nearest 128, that divides a block's side evenly.

    0 if none between a quarter of 128 and 4 times 128 does: tiny chunks make too many files, and
    huge ones take too much memory.
    """
    divisors = (n for n in range(1, min(block, 4 * 128) + 1) if block % n == 0)
    side = min(divisors, key=lambda n: max(n / 128, 128 / n))
    return side if side >= min(block, 128 // 4) else 0


def check_own_files(
    config: InferConfig, run_dir: Path | str | None, source: Source, sinks: Sequence[Sink]
) -> None:
    """Refuse a run folder, a trace or metrics that would lie inside the input or an output, or
    replace a file of the run.

    ``run_dir`` is the run folder of the job, said or chosen; None for a job that has none.
    """
    if isinstance(config.run_dir, Path):
        check_folder(config.run_dir, "--run-dir")
    named = [("--trace", config.trace), ("--metrics-json", config.metrics_json)]
    if run_dir is None and config.metrics_json is not None:
        named.append(("the rows of --metrics-json", config.metrics_json.with_suffix(".jsonl")))
    check_outside([("--run-dir", run_dir), *named], source, sinks)
    kept = {run_dir.resolve() / name for name in RUN_FILES} if isinstance(run_dir, Path) else set()
    for flag, path in named:
        if path is not None and path.resolve() in kept:
            raise UsageError(f"{flag} {path} is a file of the run folder; give another name")
    given = [config.in_spec, config.weights, *config.out_spec, *model_files(config.model_type)]
    read = [Path(each) for each in given if isinstance(each, str | Path)]
    check_outputs(*named, replace=config.overwrite, inputs=read)
