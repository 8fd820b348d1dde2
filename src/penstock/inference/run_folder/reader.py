"""Read a run, finished or under way, from its folder: what it wrote and where, with checksums."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...base import (
    RUN_FILE,
    Incomplete,
    InferConfig,
    PenstockError,
    UsageError,
    at_home,
    plural,
    redact,
    system_errors,
    well_formed,
)
from ...data import Box, Grid, ScaledGrid, Written, indices, open_written, run_at
from .block_log import Checks, Key
from .folder import Folder, Notes, folder_at, read_run
from .names import default_run_dir, is_label_run, is_run

_FACTS = frozenset(
    ("domain", "block", "places", "volumes", "dtypes", "outputs", "heads", "factors")
)
"""The facts of a fingerprint that are read here."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of each volume in an output."""

    channels: int
    """Number of channels of the head that it takes."""
    offset: tuple[int, ...]
    """Shift from the source's spatial coordinates to the output's, z y x."""
    places: Sequence[Sequence[int]]
    """The time point and the first channel of each volume, in the output's coordinates."""
    grid: ScaledGrid
    """The grid of its voxels."""

    def box(self, volume: int, block: Box) -> Box:
        """A block of a volume in the output, t c z y x."""
        lead = Box.of(self.places[volume], (1, self.channels))
        return lead + self.grid.box(block).shift(self.offset)

    def corner_of(self, origin: Sequence[int]) -> tuple[int, ...]:
        """The corner ``origin`` of the chunk grid, t c z y x, along z y x in the coordinates of
        its head."""
        return tuple(line - by for line, by in zip(origin[2:], self.offset, strict=True))


@dataclass(frozen=True, slots=True)
class Stored(Placed):
    """An output of the run, open for reading."""

    written: Written


@dataclass(frozen=True)
class RunFolder:
    """What the folder of a run says, and the run's outputs."""

    folder: Folder
    content: Mapping[str, Any]
    """The content of run.json."""
    notes: Mapping[Key, Checks]
    """The checks that the logs note of each block that is written."""
    outputs: Sequence[Stored]
    specs: Sequence[Any]
    """The specs of the outputs, in the order of the run."""
    lacking: Sequence[str]
    """One sentence for each output whose lock names no run."""
    cut: str
    """One sentence if lines of the logs are lost; empty if they are whole."""

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.content["settings"])

    @property
    def fingerprint(self) -> dict[str, Any]:
        return dict(self.content["fingerprint"])

    @cached_property
    def blocks(self) -> Grid:
        """The blocks of each volume, in source coordinates."""
        first, (start, stop) = self.outputs[0], self.fingerprint["domain"]
        anchor = first.corner_of(first.written.source.grid_origin)
        domain = Box(tuple(start[2:]), tuple(stop[2:]))
        return Grid(domain, tuple(self.fingerprint["block"]), anchor)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) * len(self.fingerprint["volumes"])

    def keys(self) -> Iterator[Key]:
        """Every block of the run's plan."""
        for volume in range(len(self.fingerprint["volumes"])):
            for index in indices(self.blocks.cells):
                yield (volume, *index)

    def named(self, key: Key) -> str:
        """A block in words."""
        return f"block {key[1:]} {self.blocks.cell(key[1:])} of volume {key[0]}"


def open_run(specs: Sequence[Any], run_dir: Path | str | None) -> RunFolder:
    """Open the run that wrote an output, and all outputs of the run.

    Args:
        specs: The outputs, in the order of the run; or one of several, if the others lie where the
            run wrote them.
        run_dir: The run folder; that of the first output by default.

    Returns:
        The run.

    Raises:
        UsageError: An output cannot be opened, or the folder is not a run folder.
        PenstockError: An output is not this run's.
    """
    named = [open_written(spec, "OUTPUT") for spec in specs]
    place = run_dir or default_run_dir(named[0])
    if place is None:
        raise UsageError(f"{named[0].name} has no run folder of its own; give --run-dir")
    folder = folder_at(place)
    content = _read_run(folder, given=run_dir is not None)
    with well_formed(f"{folder}/{RUN_FILE} is damaged"):
        specs = _all_specs(specs, named[0], content, folder)
        written = named if len(named) == len(specs) else [open_written(s, "OUTPUT") for s in specs]
        outputs = _stored(written, content["fingerprint"], folder)
        lacking = [text for each in written if (text := _check_made_by(each, content, folder))]
        logs = Notes(folder, content)
        notes = logs.fresh()
        lost = logs.lost(len(notes))
        run = RunFolder(folder, content, notes, outputs, specs, lacking, lost)
        _ = run.num_blocks, run.blocks[0]  # so that all that is read of the file is read by now
    return run


def _read_run(folder: Folder, *, given: bool) -> dict[str, Any]:
    hint = "" if given else "; if it has another place, give --run-dir"
    with system_errors(str(folder)):
        content = read_run(folder)
    if is_label_run(content) and "output" not in content:
        raise Incomplete(f"the objects in {folder} are not counted yet, so no block is written")
    settings, facts = content.get("settings"), content.get("fingerprint")
    if not (isinstance(settings, dict) and isinstance(facts, dict) and facts.keys() >= _FACTS):
        raise UsageError(f"{folder} is not a run folder of penstock infer{hint}")
    return content


def _all_specs(
    named: Sequence[Any], first: Written, content: Mapping[str, Any], folder: Folder
) -> Sequence[Any]:
    """All outputs of the run in their order: those that are named, or where the run wrote them."""
    wrote = [text.rpartition("#")[0] for text in content["fingerprint"]["outputs"]]
    specs: Sequence[Any] = content["settings"].get("out_spec", ())
    if len(named) == len(wrote):
        return named
    here = f"{redact(first.address)}/"  # of an array in a group, the group
    is_theirs = any(f"{place}/".startswith(here) for place in wrote)
    if len(named) == 1 and is_theirs and len(specs) == len(wrote):
        return specs
    raise UsageError(
        f"the run in {folder} wrote {plural(len(wrote), 'output')}, not {len(named)}; name one of "
        "them, or all in the order of --out-spec"
    )


def _stored(
    written: Sequence[Written], fingerprint: Mapping[str, Any], folder: Folder
) -> list[Stored]:
    """The outputs with the place of each volume. Raises `PenstockError` if the run did not write
    one of them."""
    start, stop = (tuple(corner[2:]) for corner in fingerprint["domain"])
    outputs = []
    names = ("places", "dtypes", "factors")
    places_of, dtypes, factors_of = (fingerprint[name] for name in names)
    facts = zip(written, places_of, dtypes[1:], factors_of, strict=True)
    for each, (channels, places), dtype, factors in facts:
        grid = ScaledGrid(tuple(map(Fraction, factors)), start)
        shape = grid.box(Box(start, stop)).shape
        source = each.source
        shift = tuple(np.subtract(source.domain.start[2:], start).tolist())
        stored = Stored(channels, shift, places, grid, each)
        domain = Box(start, stop)
        inside = all(stored.box(volume, domain) in source.domain for volume in range(len(places)))
        if source.domain.shape[2:] != shape or source.dtype.name != dtype or not inside:
            raise PenstockError(
                f"{each.name} is not what the run in {folder} wrote: that was {dtype} of {shape} "
                f"voxels, this is {source.dtype.name} of {source.domain.shape[2:]}"
            )
        outputs.append(stored)
    return outputs


def _check_made_by(written: Written, content: Mapping[str, Any], folder: Folder) -> str | None:
    """Raise `PenstockError` if another run has made the output anew since. Returns a sentence if
    that cannot be known."""
    made_by = run_at(written)
    if made_by is None:
        lost = content.get("locked", False)
        return f"{written.name}: no lock beside it names its run any more" if lost else None
    if made_by != content.get("run"):
        raise PenstockError(
            f"{written.name} was made anew by another run than that in {folder}; name that run's "
            "folder with --run-dir"
        )
    return None


def as_begun(config: InferConfig) -> tuple[InferConfig, Mapping[str, Any]]:
    """The settings, in which what the user leaves open is as in the run that the job goes on with.

    These are patch, overlap and batch, which a machine may choose; and threads, as another number
    may change the last bits.

    Args:
        config: The settings.

    Returns:
        The settings, and the run's run.json, empty if there is none.
    """
    run = _run_of(config) if config.resumes else {}
    settings, update = run.get("settings", {}), dict[str, Any]()
    for name in ("patch", "overlap"):
        if getattr(config, name) in (None, "auto") and settings.get(name):
            update[name] = tuple(settings[name])
    if config.batch == "auto" and settings:
        update["batch"] = settings.get("batch")
    if config.threads is None:
        update["threads"] = run.get("maker", {}).get("threads")
    return config.model_copy(update=update), run


def _run_of(config: InferConfig) -> Mapping[str, Any]:
    try:
        place = config.run_dir or default_run_dir(open_written(config.out_spec[0], "--out-spec"))
        return {} if place is None else read_run(place)
    except (OSError, UsageError):  # what opens the job says so
        return {}


def run_folder_of(named: str) -> Path | str:
    """The folder of a run.

    Args:
        named: The folder itself, or an output as ``--out-spec`` names it.

    Returns:
        The folder: a path, or a URL.

    Raises:
        UsageError: There is no run folder.
    """
    place = at_home(named)
    places: list[Path | str] = [place]
    if re.match(r"(s3|gs)://", named):
        places = [named]
    elif place.name:
        # The second one has the scores of infer --instances, until objects are labelled.
        names = f"{place.name}.penstock", f"{place.name}.scores.penstock"
        places += [place.with_name(name) for name in names]
    for folder in places:
        with contextlib.suppress(UsageError, OSError):
            if is_run(folder_at(folder).read(RUN_FILE) or b""):
                return folder
    with contextlib.suppress(UsageError):
        of_output = default_run_dir(open_written(named, "RUN"))
        if of_output is not None and (of_output / RUN_FILE).is_file():
            return of_output
    raise UsageError(f"{named} is neither the run folder nor an output of penstock infer")
