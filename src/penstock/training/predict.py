"""A trained detector over whole scenes: it finds each object once.

    scene ── rows of windows, one ahead ──▶ batches ──▶ detections in each window's core ──▶ joined

A scene is cut into windows like the chips that the detector was trained on. Two detections of
neighbouring windows near their border are one object. Windows without radar values are skipped. The
settings of the detector are read from the run beside its weights; those of the user come first.

The objects of each finished scene are kept in OUTPUT.parts, and OUTPUT is written at the end. A
run that was stopped goes on with ``--resume`` at the first scene that it did not finish.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..base import (
    ARGS,
    RESULTS,
    PredictConfig,
    UsageError,
    check_outputs,
    read_json,
    replacing,
    torch_threads,
    write_json,
    writing_output,
)
from ..data import (
    CHANNELS,
    Cut,
    Objects,
    Scene,
    channels_of,
    cuts_of,
    model_view,
    planes_of,
    radar_of,
    read_predictions,
    read_row,
    scenes_in,
    write_predictions,
)
from ..models import load_weights, make_detector, read_state
from .ranks import device_of
from .workloads.detector import joined, owned, picture


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a detector and of its windows."""

    channels: tuple[str, ...]
    backbone: str
    chip_size: int
    overlap: int
    threshold: float
    """The least score of a detection."""
    because: str
    """The source of the threshold, in words."""


@dataclass(frozen=True, slots=True)
class PredictionSummary:
    """The objects of all scenes, and what was looked at."""

    scenes: int
    """The number of scenes that were looked at."""
    skipped: int
    """The number of scenes that an earlier run had finished."""
    windows: int
    """The number of windows that the detector saw."""
    empty: int
    """The number of windows without a valid pixel, which were skipped."""
    objects: Objects
    """The objects of all scenes."""
    settings: Settings


def predict_scenes(
    weights: Path,
    config: PredictConfig,
    *,
    begin: Callable[[int], Callable[[int], None]] = lambda total: lambda done: None,
) -> PredictionSummary:
    """Detect objects in every scene and write ``--output``.

    Args:
        weights: The weights of a trained detector, such as ``best_model.pth`` of a run.
        config: The scenes, the output and the settings.
        begin: Called with the number of windows when all was checked; returns a function that is
            called with the number of windows done.

    Returns:
        The objects and the counts.

    Raises:
        UsageError: The weights, the scenes or the output cannot be used.
    """
    _check_output(config, weights)
    if weights.is_file():  # refuse a damaged file before its run is read
        read_state(weights, "WEIGHTS")
    settings = settings_of(weights, config)
    folders = wanted_scenes(config.data_root, config.scenes, settings.channels)
    parts = _Parts.open(config, weights, settings)
    objects_of = parts.read(folders)
    folders = {name: folder for name, folder in folders.items() if name not in objects_of}
    cuts = {name: _cuts(folder, settings) for name, folder in folders.items()}
    device = device_of(config.device)
    net = _load(weights, settings).to(device)

    progress = begin(sum(rows.num * columns.num for rows, columns in cuts.values()))
    passed, seen = 0, 0

    def advance(windows: int, valid: int) -> None:
        nonlocal passed, seen
        passed, seen = passed + windows, seen + valid
        progress(passed)

    parts.begin()
    for name, folder in folders.items():
        with Scene(folder, settings.channels) as scene, torch_threads(config.threads):
            objects_of[name] = _detect(net, scene, cuts[name], settings, config, device, advance)
        parts.write(name, objects_of[name])
    objects = Objects.join([objects_of[name] for name in sorted(objects_of)])
    with writing_output(config.output, replace=config.replace) as draft:
        write_predictions(draft, objects)
    parts.remove()
    skipped = len(objects_of) - len(folders)
    return PredictionSummary(len(folders), skipped, seen, passed - seen, objects, settings)


class _Parts:
    """The finished scenes of a run, one file each, until all are finished."""

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self._folder, self._asked = folder, asked

    @classmethod
    def open(cls, config: PredictConfig, weights: Path, settings: Settings) -> _Parts:
        """The scenes that an earlier run finished, or an empty folder for this run.

        Raises `UsageError` if the earlier run had other settings, or may not be removed.
        """
        folder = config.output.with_name(config.output.name + ".parts")
        asked = {
            "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "scenes": str(config.data_root.resolve()),
            **{k: v for k, v in asdict(settings).items() if k != "because"},
            "channels": list(settings.channels),
            "amp": config.amp,
        }
        parts = cls(folder, asked)
        if not folder.exists():
            return parts
        before = _json(folder / _ASKED)
        if not before:  # a run that was stopped as it began, or another folder
            if any(path.suffix != ".part" for path in folder.iterdir()):
                raise UsageError(f"{folder} is in the way of what is finished, and is none of ours")
        elif config.overwrite:
            parts.remove()
        elif not config.resume:
            raise UsageError(
                f"{folder} holds scenes of a run that was stopped; --resume goes on with it, "
                "--overwrite begins anew"
            )
        elif differ := [name for name in asked if before.get(name) != asked[name]]:
            raise UsageError(
                f"--resume: {folder} was made with {differ[0]} {before.get(differ[0])}, not "
                f"{asked[differ[0]]}; --overwrite begins anew"
            )
        return parts

    def read(self, names: Iterable[str]) -> dict[str, Objects]:
        files = {name: self._folder / f"{name}.csv" for name in names}
        return {name: read_predictions(file) for name, file in files.items() if file.is_file()}

    def begin(self) -> None:
        write_json(self._folder / _ASKED, self._asked)

    def write(self, name: str, objects: Objects) -> None:
        with replacing(self._folder / f"{name}.csv") as draft:
            write_predictions(draft, objects)

    def remove(self) -> None:
        shutil.rmtree(self._folder)


_ASKED = "asked.json"


def settings_of(weights: Path, config: PredictConfig) -> Settings:
    """The user's settings, and for the rest those of the run that trained the weights."""
    if not weights.is_file():
        raise UsageError(f"there are no weights {weights}")
    args, results = (_json(weights.parent / name) for name in (ARGS, RESULTS))
    if args and (of := args.get("workload")) != "detector":
        raise UsageError(f"{weights.parent / ARGS} is of workload {of}, and this takes detectors")
    facts = results.get("facts", {})

    def known(flag: str, said: Any, of_run: Any) -> Any:
        value = of_run if said is None else said
        if value is None:
            raise UsageError(
                f"give {flag}: the run of {weights} is not beside it, or does not tell"
            )
        return value

    of_run = ",".join(facts["channels"]) if "channels" in facts else None
    threshold, because = _threshold(config, args, results)
    return Settings(
        channels_of(known("--channels", config.channels, of_run)),
        known(
            "--backbone", None if config.backbone == "auto" else config.backbone,
            args.get("backbone"),
        ),
        known("--chip-size", config.chip_size, facts.get("chip_size")),
        known("--overlap", config.overlap, facts.get("overlap")),
        threshold,
        because,
    )  # fmt: skip


def _threshold(
    config: PredictConfig, args: Mapping[str, Any], results: Mapping[str, Any]
) -> tuple[float, str]:
    if config.score_threshold is not None:
        return config.score_threshold, "as --score-threshold says"
    best = (results.get("best") or {}).get("scores", {})
    if best.get("val_best_threshold"):
        return best["val_best_threshold"], "the best on the run's validation scenes"
    if "score_threshold" in args:
        return args["score_threshold"], "as the run counted"
    raise UsageError("give --score-threshold: there is no run beside the weights that tells it")


def _json(path: Path) -> dict[str, Any]:
    """The document in a file of a run, empty if there is no file."""
    document = read_json(path) if path.exists() else {}
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not of a run")
    return document


def wanted_scenes(
    root: Path, names: Sequence[str] | None, channels: Sequence[str]
) -> dict[str, Path]:
    """The scenes of a folder, or the named ones. Raises `UsageError` if a scene or a raster of it
    is missing."""
    if not root.is_dir():
        raise UsageError(f"--data-root {root} is not a folder")
    scenes = scenes_in(root)
    if names is None and not scenes:
        raise UsageError(
            f"--data-root {root} holds no scenes: no folder in it has a {CHANNELS['vh'].file}"
        )
    for name in names or ():
        if name not in scenes:
            raise UsageError(f"--scenes {name}: there is no such scene in --data-root {root}")
    wanted = {name: path for name, path in scenes.items() if names is None or name in names}
    for path in wanted.values():
        for channel in channels:
            if not (path / CHANNELS[channel].file).is_file():
                raise UsageError(
                    f"{path / CHANNELS[channel].file} is missing, and the detector sees {channel}"
                )
    return wanted


def _cuts(folder: Path, settings: Settings) -> tuple[Cut, Cut]:
    with Scene(folder, settings.channels) as scene:
        return cuts_of(scene.size, settings.chip_size, settings.overlap)


def _check_output(config: PredictConfig, weights: Path) -> None:
    if config.output.exists() and not config.overwrite:
        raise UsageError(f"--output {config.output} exists; use --overwrite to replace it")
    if not config.output.parent.is_dir():
        raise UsageError(f"--output {config.output}: there is no folder {config.output.parent}")
    check_outputs(("--output", config.output), replace=config.replace, inputs=[weights])


def _load(weights: Path, settings: Settings) -> nn.Module:
    planes = planes_of(settings.channels)
    net: nn.Module = make_detector(planes, settings.backbone)  # type: ignore[arg-type]
    description = f"the detector on {settings.backbone} that sees {', '.join(settings.channels)}"
    load_weights(net, description, weights, "WEIGHTS")
    return net.eval()


@torch.no_grad()
def _detect(
    net: nn.Module,
    scene: Scene,
    cuts: tuple[Cut, Cut],
    settings: Settings,
    config: PredictConfig,
    device: torch.device,
    advance: Callable[[int, int], None],
) -> Objects:
    """The objects of a scene. ``advance`` is called with the windows done and those looked at."""
    rows, columns = cuts
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    parts: list[dict[str, NDArray[Any]]] = []
    for row, (band, counts) in enumerate(_rows_ahead(scene, rows, columns, settings.chip_size)):
        valid, here = np.flatnonzero(counts).tolist(), rows.read(row)
        for first in range(0, len(valid), config.batch_size):
            some = valid[first : first + config.batch_size]
            images = [
                picture(*model_view(scene.channels, band[of], scene.coarse, here, columns.read(of)))
                for of in some
            ]
            with torch.autocast(device.type, dtype=half, enabled=config.amp):
                answers = net([image.to(device) for image in images])
            for column, detections in zip(some, answers, strict=True):
                core = (*rows.own(row), *columns.own(column))
                parts.append(owned(detections, core, (rows.start(row), columns.start(column))))
        advance(columns.num, len(valid))
    objects = joined(scene.name, parts)
    return objects[objects.score >= settings.threshold]


def _rows_ahead(
    scene: Scene, rows: Cut, columns: Cut, side: int
) -> Iterator[tuple[NDArray[np.float16], NDArray[np.int64]]]:
    """The radar of each row of windows, float16 (column, channel, y, x), and the number of valid
    pixels of each window.

    The next row is read ahead into a second buffer. An array is valid until the next is asked for.
    """
    radar = radar_of(scene.channels)
    shape = (columns.num, len(radar), side, side)
    bands = [np.full(shape, np.nan, np.float16) for _ in range(min(2, rows.num))]

    def read(row: int) -> NDArray[np.int64]:
        return read_row(scene, radar, rows.read(row), columns, bands[row % 2])

    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        ahead = reader.submit(read, 0)
        for row in range(rows.num):
            counts = ahead.result()
            if row + 1 < rows.num:
                ahead = reader.submit(read, row + 1)
            yield bands[row % 2], counts
