"""Runs a trained detector over whole scenes, and reports each object once.

    scene ── rows of windows, one ahead ──▶ batches ──▶ detections in each window's core ──▶ joined

A scene is cut into windows like the chips that the detector was trained on. Two detections of
neighbouring windows near their border are one object. Windows without radar values are skipped. The
settings of the detector are read from the run beside its weights; flags override them.

The objects of each finished scene are kept in OUTPUT.parts, and OUTPUT is written at the end. A
run that was stopped goes on with ``--resume`` at the first scene that it did not finish.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..base import (
    ARGS,
    RESULTS,
    PredictConfig,
    TrainConfig,
    UsageError,
    check_outputs,
    plural,
    read_json,
    replacing,
    torch_threads,
    write_json,
    writing_output,
)
from ..cluster import Workers
from ..data import (
    CHANNELS,
    ChipRecord,
    Objects,
    Scene,
    channels_of,
    read_predictions,
    scenes_in,
    write_predictions,
)
from ..models import read_state, read_training_record
from .detecting import Settings, detect, detect_on_cluster, load_detector
from .ranks import device_of


@dataclass(frozen=True, slots=True)
class PredictionSummary:
    """The objects of all scenes, and counts of scenes and windows."""

    scenes: int
    """The number of scenes that the detector ran on."""
    skipped: int
    """The number of scenes that an earlier run had finished."""
    windows: int
    """The number of windows that the detector ran on."""
    empty: int
    """The number of windows without a valid pixel, which were skipped."""
    objects: Objects
    """The objects of all scenes."""
    settings: Settings
    notes: list[str]
    """Things to know of the scenes, in words."""


def predict_scenes(
    weights: Path,
    config: PredictConfig,
    *,
    workers: Workers | None = None,
    begin: Callable[[int], Callable[[int], None]] = lambda total: lambda done: None,
) -> PredictionSummary:
    """Detect objects in every scene and write ``--output``.

    Args:
        weights: The weights of a trained detector, such as ``best_model.pth`` of a run.
        config: The scenes, the output and the settings.
        workers: Workers that take a scene each; None for this process.
        begin: Called with the number of windows after all checks; returns a function that is
            called with the number of windows done.

    Returns:
        The objects and the counts.

    Raises:
        UsageError: The weights, the scenes or the output cannot be used.
        Incomplete: Scenes failed on a cluster.
    """
    _check_output(config, weights)
    if weights.is_file():  # refuse a damaged file before its run is read
        read_state(weights, "WEIGHTS")
    settings = settings_of(weights, config)
    folders = wanted_scenes(config.data_root, config.scenes, settings.record.channels)
    parts = _FinishedScenes(config, weights, settings)
    objects_of = parts.read(folders)
    folders = {name: folder for name, folder in folders.items() if name not in objects_of}
    total, notes = _look_ahead(folders, settings.record)
    device = None if workers else device_of(config.device)
    net = load_detector(weights, settings).to(device) if device else None
    progress = begin(total)
    passed = seen = 0

    def advance(windows: int) -> None:
        nonlocal passed
        passed += windows
        progress(passed)

    def answers() -> Iterator[tuple[str, tuple[Objects, int, int]]]:
        if workers is not None:
            yield from detect_on_cluster(workers, folders, weights, settings, config, advance)
        for name, folder in folders.items() if net is not None else ():
            with Scene(folder, settings.record.channels) as scene, torch_threads(config.threads):
                assert net is not None
                yield name, detect(net, scene, settings, config, advance)

    for name, (objects, _, valid) in answers():
        seen += valid
        objects_of[name] = objects
        parts.write(name, objects)
    objects = Objects.join([objects_of[name] for name in sorted(objects_of)])
    with writing_output(config.output, replace=config.overwrite) as draft:
        write_predictions(draft, objects)
    parts.remove()
    skipped = len(objects_of) - len(folders)
    return PredictionSummary(len(folders), skipped, seen, passed - seen, objects, settings, notes)


def _look_ahead(folders: Mapping[str, Path], record: ChipRecord) -> tuple[int, list[str]]:
    """The windows of all scenes, and what a user should know of the scenes."""
    total, noted = 0, Counter[str]()
    for folder in folders.values():
        with Scene(folder, record.channels) as scene:
            total += math.prod(cut.num for cut in record.cuts(scene.size))
            noted.update(scene.notes)
    return total, [
        f"{num} of {plural(len(folders), 'scene')}: {note}" for note, num in noted.items()
    ]


class _FinishedScenes:
    """The finished scenes of a run, one file each, until all are finished."""

    def __init__(self, config: PredictConfig, weights: Path, settings: Settings) -> None:
        """Take up the scenes that an earlier run finished, or begin without any.

        Raises `UsageError` if the earlier run had other settings, or may not be removed.
        """
        self._folder = folder = config.output.with_name(config.output.name + ".parts")
        self._asked = asked = {
            "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "scenes": str(config.data_root.resolve()),
            **{k: v for k, v in asdict(settings).items() if k not in ("because", "record")},
            **settings.record.as_document(),
            "amp": config.amp,
        }
        if not folder.exists():
            return
        before = read_json(folder / _ASKED) if (folder / _ASKED).is_file() else {}
        if not isinstance(before, dict):
            raise UsageError(f"{folder / _ASKED} is not of a run")
        if not before:  # a run that was stopped as it began, or another folder
            if any(path.suffix != ".part" for path in folder.iterdir()):
                raise UsageError(
                    f"{folder} is where finished scenes are kept, and Penstock did not write it"
                )
        elif config.overwrite:
            self.remove()
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

    def read(self, names: Iterable[str]) -> dict[str, Objects]:
        files = {name: self._folder / f"{name}.csv" for name in names}
        return {name: read_predictions(file) for name, file in files.items() if file.is_file()}

    def write(self, name: str, objects: Objects) -> None:
        if not (self._folder / _ASKED).exists():
            write_json(self._folder / _ASKED, self._asked)
        with replacing(self._folder / f"{name}.csv") as draft:
            write_predictions(draft, objects)

    def remove(self) -> None:
        shutil.rmtree(self._folder)


_ASKED = "asked.json"


def settings_of(weights: Path, config: PredictConfig) -> Settings:
    """The settings of a detector: those of the run that trained the weights, and the user's flags.
    Raises `UsageError` if a setting is in neither, or a flag contradicts the run."""
    if not weights.is_file():
        raise UsageError(f"there are no weights {weights}")
    trained = read_training_record(weights)
    args, results = trained.args, trained.results
    if args and trained.workload != "detector":
        raise UsageError(
            f"{trained.place / ARGS} is of workload {trained.workload}, and this takes detectors"
        )
    of_run = trained.facts.get("chips")
    record = None if of_run is None else ChipRecord.read(of_run, str(trained.place / RESULTS))
    backbone = args.get("backbone") if config.backbone == "auto" else config.backbone
    if backbone is None:
        raise _unknown("--backbone", weights)
    threshold, because = _threshold(config, args, results)
    max_dets = args.get("max_dets", TrainConfig.model_fields["max_dets"].default)
    return Settings(_record(record, config, weights), backbone, threshold, because, max_dets)


def _record(of_run: ChipRecord | None, config: PredictConfig, weights: Path) -> ChipRecord:
    """How to cut: as the chips that the detector was trained on. Without its run, as flags say.

    Raises `UsageError` if the flags contradict the run, or say too little.
    """
    said: dict[str, Any] = {
        "channels": config.channels and channels_of(config.channels),
        "chip_size": config.chip_size, "overlap": config.overlap, "dtype": config.dtype,
    }  # fmt: skip
    if of_run is None:
        if lacking := [name for name, value in said.items() if value is None]:
            raise _unknown(f"--{lacking[0].replace('_', '-')}", weights)
        return ChipRecord.of(**said)
    asked = replace(of_run, **{name: value for name, value in said.items() if value is not None})
    if differing := of_run.differing(asked):
        raise UsageError(
            f"--{differing.replace('_', '-')}: {weights} was trained on chips of "
            f"{of_run.told(differing)}, not {asked.told(differing)}; leave the flag out"
        )
    return asked


def _unknown(flag: str, weights: Path) -> UsageError:
    return UsageError(f"give {flag}: the run of {weights} is not beside it, or does not tell")


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


def _check_output(config: PredictConfig, weights: Path) -> None:
    if config.output.exists() and not config.overwrite:
        raise UsageError(f"--output {config.output} exists; use --overwrite to replace it")
    if not config.output.parent.is_dir():
        raise UsageError(f"--output {config.output}: there is no folder {config.output.parent}")
    check_outputs(("--output", config.output), replace=config.overwrite, inputs=[weights])
