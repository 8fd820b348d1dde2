"""Read a run, finished or under way, from its folder: what it wrote and where, with checksums."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...base import InferConfig, PenstockError, UsageError, plural, redact
from ...data import Box, Grid, Written, indices, open_written, run_at
from .files import default_run_dir, read_document
from .journal import made_anew
from .local import Folder, folder_at
from .unit_log import Key, Note


@dataclass(frozen=True, slots=True)
class Stored:
    """An output of the run, open for reading, and the place of each volume in it."""

    written: Written
    channels: int
    offset: tuple[int, ...]
    """Shift from the source's spatial coordinates to the output's, z y x."""
    places: Sequence[Sequence[int]]
    """The time point and the first channel of each volume."""

    def box(self, volume: int, unit: Box) -> Box:
        """A unit of a volume in the output, t c z y x."""
        return Box.of(self.places[volume], (1, self.channels)) + unit.shift(self.offset)


@dataclass(frozen=True)
class RunFolder:
    """What the folder of a run says, and the run's outputs."""

    folder: Folder
    content: Mapping[str, Any]
    """The content of run.json."""
    notes: Mapping[Key, Note]
    """The note of the logs on each unit that is written."""
    makers: Sequence[Mapping[str, Any]]
    """The makers that notes give by index. Those of run.json come first, then those of the logs."""
    outputs: Sequence[Stored]
    specs: Sequence[Any]
    """The specs of the outputs, in the order of the run."""
    lacking: Sequence[str]
    """One sentence for each output whose lock names no run."""

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.content["settings"])

    @property
    def fingerprint(self) -> dict[str, Any]:
        return dict(self.content["fingerprint"])

    @cached_property
    def units(self) -> Grid:
        """The units of each volume, in source coordinates."""
        first, (start, stop) = self.outputs[0], self.fingerprint["domain"]
        lines = zip(first.written.source.grid_origin[2:], first.offset, strict=True)
        anchor = tuple(line - offset for line, offset in lines)
        domain = Box(tuple(start[2:]), tuple(stop[2:]))
        return Grid(domain, tuple(self.fingerprint["block"]), anchor)

    @property
    def num_units(self) -> int:
        return len(self.units) * len(self.fingerprint["volumes"])

    def keys(self) -> Iterator[Key]:
        """Every unit of the run's plan."""
        for volume in range(len(self.fingerprint["volumes"])):
            for index in indices(self.units.cells):
                yield (volume, *index)

    def named(self, key: Key) -> str:
        """A unit in words."""
        return f"block {key[1:]} {self.units.cell(key[1:])} of volume {key[0]}"


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
    specs = _all_specs(specs, named[0], content, folder)
    written = named if len(named) == len(specs) else [open_written(s, "OUTPUT") for s in specs]
    outputs = _stored(written, content["fingerprint"], folder)
    lacking = [text for each in written if (text := _check_made_by(each, content, folder))]
    makers = list(content.get("makers", [{}]))
    notes = folder.notes(str(content.get("run")), makers).fresh()
    return RunFolder(folder, content, notes, makers, outputs, specs, lacking)


def _read_run(folder: Folder, *, given: bool) -> dict[str, Any]:
    hint = "" if given else "; if it has another place, give --run-dir"
    try:
        saved = folder.read("run.json")
        content = None if saved is None else json.loads(saved)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{folder}/run.json is damaged") from None
    wanted = {"domain", "block", "places", "volumes", "dtypes", "outputs", "heads"}
    if not (
        isinstance(content, dict)
        and isinstance(content.get("settings"), dict)
        and isinstance(content.get("fingerprint"), dict)
    ):
        raise UsageError(f"{folder} is not a run folder of penstock infer{hint}")
    if lacking := sorted(wanted - content["fingerprint"].keys()):
        raise UsageError(f"{folder}/run.json is of an older version and lacks {lacking[0]}")
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
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    outputs = []
    facts = zip(written, fingerprint["places"], fingerprint["dtypes"][1:], strict=True)
    for each, (channels, places), dtype in facts:
        source = each.source
        shift = tuple(np.subtract(source.domain.start[2:], start).tolist())
        stored = Stored(each, channels, shift, places)
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


def check_not_anew(specs: Sequence[Any], run_dir: Path | str | None) -> None:
    """Refuse to resume a run if another one has made its outputs anew.

    Such outputs may have other chunks, and then opening them raises a less helpful error. Other
    faults are not looked for.

    Raises `UsageError` that names the output.
    """
    for spec in specs:
        try:
            written = open_written(spec, "--out-spec")
            place = run_dir or default_run_dir(written)
            folder = None if place is None else folder_at(place)
            content = {} if folder is None else _read_run(folder, given=True)
            made_by = run_at(written)
        except UsageError:
            continue
        if content and made_by not in (None, content.get("run"), *content.get("replaces", [])):
            raise made_anew(written.name, folder)
        run_dir = place  # that of the first output


def threads_of(config: InferConfig) -> int | None:
    """The number of torch's threads in a forward: what ``--threads`` says, else that of the run
    which is resumed, as another number may change the last bits. None for torch's own choice."""
    if config.threads is not None or not config.resumes:
        return config.threads
    try:
        place = config.run_dir or default_run_dir(open_written(config.out_spec[0], "--out-spec"))
        run = None if place is None else read_document(folder_at(place), "run.json")
    except (OSError, UsageError):  # there is no such run, and what opens the job says so
        return None
    threads: int | None = (run or {}).get("makers", [{}])[-1].get("threads")
    return threads


def forget(run: RunFolder, keys: Collection[Key]) -> int:
    """Take units off the list of what is written, so that a resumed run writes them.

    Args:
        run: The run.
        keys: The units.

    Returns:
        Number of units that were on the list.

    Raises:
        UsageError: Another process writes the run, or the list cannot be written.
    """
    lost = sorted(run.notes.keys() & keys)
    if not lost:
        return 0
    try:
        run.folder.forget(str(run.content.get("run")), lost)
        run.folder.delete("summary.json")  # it says that the run is done
    except BlockingIOError:
        raise UsageError(f"--forget: another process is writing the run in {run.folder}") from None
    except OSError as error:
        raise UsageError(f"--forget: {run.folder}: {error.strerror}") from error
    return len(lost)
