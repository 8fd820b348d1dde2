"""The knobs of the verbs that make, load, cut, prove and score data, and detect objects in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .knobs import (
    Bytes,
    Fraction,
    Knobs,
    Names,
    Natural,
    Overwriting,
    Place,
    Positive,
    Seconds,
    flag,
    many,
)
from .run_labels import Labels
from .sharing import OnWorkers

PRESET_SAMPLES = 64
Even = Annotated[Positive, Field(multiple_of=2)]


class GenerateConfig(Knobs):
    """The knobs of ``penstock generate``."""

    samples: Positive | None = flag(
        None, help=f"samples (default: {PRESET_SAMPLES} of a preset, all of a file)"
    )
    grid: tuple[Even, Even] = flag(
        (192, 384), help="cells of latitude and longitude of a preset, both even"
    )
    seed: Natural = flag(0, help="seed of a preset, a volume or scenes")
    shards: Annotated[tuple[Positive, ...], BeforeValidator(many)] | None = flag(
        None, help="samples in a shard, in Zarr 3 instead of 2; of a volume, a shard's z y x"
    )
    workers: Positive | None = flag(
        None,
        help="threads that make samples, or pieces of a volume; each holds one, or a shard of them "
        "(default: one for each core, 8 at most)",
    )
    overwrite: bool = flag(
        False, help="replace OUT where it holds such data; anything else is kept"
    )

    inputs: Names | None = flag(
        None,
        help="variables of the file that are inputs (default: all with latitude and longitude)",
    )
    targets: Names | None = flag(
        None,
        help="variables of the file that are targets (default: the inputs that change in time)",
    )
    offsets: Annotated[tuple[int, ...], BeforeValidator(many), Field(min_length=1)] | None = flag(
        None,
        help="time steps that inputs are taken from, counted from the sample's (default: -1 0; 0 "
        "where the file is short)",
    )
    target_offset: int = flag(
        1, help="time step that targets are taken from, counted from the sample's"
    )

    shape: tuple[Positive, Positive, Positive] = flag((128, 512, 512), help="z y x of a volume")
    chunks: tuple[Positive, Positive, Positive] = flag(
        (64, 128, 128), help="z y x of a volume's chunks"
    )
    clean: bool = flag(False, help="a volume without noise, the target of `train pairs`")

    scenes: Annotated[int, Field(ge=2)] = flag(4, help="scenes of xview3, of both splits")
    validation: Positive | None = flag(
        None, help="scenes that are for validation (default: a quarter)"
    )
    size: tuple[Positive, Positive] = flag(
        (2048, 2048), help="rows and columns of a scene; real ones have about 22000 29000"
    )
    objects: Positive = flag(40, help="labelled objects in a scene, where the sea has room")
    tiff: Literal["strips", "deflate", "tiled"] = flag(
        "strips",
        help="layout of the 10 m rasters: plain strips, deflated strips, or deflated tiles",
    )

    @model_validator(mode="after")
    def _both_splits(self) -> GenerateConfig:
        if self.validation is not None and self.validation >= self.scenes:
            raise ValueError(
                f"--validation {self.validation} leaves none of --scenes {self.scenes} to train on"
            )
        return self


class LoaderConfig(Knobs):
    """The knobs of a `penstock.Loader`."""

    batch_size: Positive = flag(help="items in a batch of one rank")
    shuffle: Literal["none", "sample", "block", "global"] = flag(
        "none",
        help="none: in order; sample: whole samples shuffled; block: items shuffled within windows "
        "of chunks; global: all items shuffled",
    )
    window: Positive = flag(16, help="chunks in a window of the block shuffle")
    seed: Natural = flag(0, help="seed of the order")
    drop_last: bool = flag(False, help="leave out the items that do not fill a last global batch")
    rank: Natural = flag(0, help="which of the processes this is")
    world_size: Positive = flag(1, help="processes that share an epoch")
    uneven: Literal["repeat", "short"] = flag(
        "repeat",
        help="where the items are no multiple of the processes: repeat some, which a batch's mask "
        "says, so that all have equally many (training), or give each item once (evaluation)",
    )

    workers: Positive | None = flag(
        None, help="threads that decode (default: one for each CPU that this process may use)"
    )
    fetch: Natural = flag(
        0, help="requests of engine tensorstore at once, which hide latency; 0: as many as it likes"
    )
    queue: Natural = flag(2, help="batches that are ready ahead of the one in use")
    max_memory: Bytes | None = flag(
        None, help="most memory for batches, scratch and cache, such as 8GiB (default: no limit)"
    )
    cache: Bytes = flag(0, help="decoded chunks that engine tensorstore keeps, such as 2GiB")
    engine: Literal["auto", "native", "tensorstore"] = flag(
        "auto",
        help="native: local Zarr of regular chunks; tensorstore: anything (local files are "
        "mapped: do not shorten them while they are read); auto: the quicker one for the chunks",
    )
    missing: Literal["error", "fill"] = flag(
        "error", help="what an absent chunk is: an error, or the store's fill value"
    )
    raw: bool = flag(
        False,
        help="read numbers as they are stored where a scale_factor, _FillValue or the like says "
        "that they stand for others, which is refused else",
    )
    pin: bool = flag(
        False, help="keep batches in page-locked memory, from which a CUDA device copies faster"
    )


class PreprocessConfig(OnWorkers, Labels):
    """The knobs of ``penstock preprocess``."""

    data_root: Path = flag(help="folder with train/ and validation/, a folder for each scene")
    train_label_file: Path = flag(help="label CSV of the training scenes")
    val_label_file: Path = flag(help="label CSV of the validation scenes")
    output_dir: Path = flag(help="folder for train/ and val/")
    channels: str = flag(
        "vh,vv,bathymetry",
        help="comma-separated: vh, vv, bathymetry, wind_speed, wind_direction, wind_quality, mask",
    )
    num_workers: Positive = flag(
        4, help="scenes that are cut at once; with --cluster each worker cuts one"
    )
    overwrite_preproc: bool = flag(False, help="cut again what an earlier run cut")
    chip_size: Positive = flag(800, help="pixels of a chip's side", unit="pixels")
    dtype: Literal["float16", "float32"] = flag(
        "float16", help="dtype of chips; the rasters of xView3 are float16", group="chips"
    )
    overlap: Natural = flag(64, help="pixels that neighbours share", unit="pixels", group="chips")
    partial: bool = flag(
        False,
        help="cut the scenes that have both a folder and labels, and pass over the others",
        group="chips",
    )


class PredictConfig(OnWorkers, Labels):
    """The knobs of ``penstock predict``."""

    data_root: Path = flag(help="folder whose folders are scenes, such as DATA/validation")
    scenes: Names | None = flag(None, help="only these scenes (default: all in --data-root)")
    output: Path = flag(
        Path("predictions.csv"),
        help="CSV to write: a submission, with the scores as a further column",
    )
    overwrite: bool = flag(
        False, help="replace --output, and the parts that a stopped run finished"
    )
    resume: bool = flag(False, help="go on with a run that was stopped")

    # the detector; by default with the settings of the run that trained it
    channels: str | None = flag(
        None,
        help="comma-separated, as it was trained with (default: the run's)",
        group="the detector",
    )
    backbone: Literal["auto", "mobilenet", "resnet50"] = flag(
        "auto", help="backbone of its feature pyramid; auto: the run's", group="the detector"
    )
    score_threshold: Annotated[float, Field(gt=0, le=1)] | None = flag(
        None,
        help="least score of a detection (default: the run's best on its validation scenes)",
    )
    chip_size: Positive | None = flag(
        None,
        help="pixels of a window's side (default: the run's chips)",
        unit="pixels",
        group="the detector",
    )
    overlap: Natural | None = flag(
        None,
        help="pixels that neighbouring windows share (default: as the run's chips)",
        unit="pixels",
        group="the detector",
    )
    dtype: Literal["float16", "float32"] | None = flag(
        None,
        help="dtype of its chips, to which values are rounded (default: the run's)",
        group="the detector",
    )

    batch_size: Positive = flag(8, help="windows of a batch")
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", help="where to run the detector")
    amp: bool = flag(
        False, help="mixed precision: fp16 on CUDA, bf16 elsewhere", group="arithmetic"
    )
    threads: Positive | None = flag(
        None, help="threads of torch on the CPU (default: torch's own)", group="arithmetic"
    )


class XView3Rules(Knobs):
    """The rules of the xView3 score. The challenge's leaderboard used ``drop_low_detect`` and
    ``costly_dist``."""

    distance_tolerance: Annotated[float, Field(gt=0)] = flag(
        200.0, help="most metres between a detection and its label", unit="metres"
    )
    shore_tolerance: Annotated[float, Field(ge=0)] = flag(
        2.0,
        help="most kilometres from the shore that count as near it; 0: no score of the shore",
        unit="kilometres",
    )
    drop_low_detect: bool = flag(
        False, help="leave out predictions that match labels of LOW confidence"
    )
    costly_dist: bool = flag(
        False,
        help="pairs beyond the tolerance never replace pairs within it; without --strict-official "
        "this is always so",
    )
    score_all: bool = flag(False, help="labels of LOW confidence count like the others")
    strict_official: bool = flag(
        False, help="compute the same numbers as the official script, including where it is wrong"
    )


class ScoreConfig(XView3Rules, Overwriting):
    """The knobs of ``penstock score xview3``."""

    inference_file: Path = flag(help="CSV of predictions, in the format of a submission")
    label_file: Path = flag(help="CSV of labels, in the format of xView3")
    shore_root: Path | None = flag(None, help="folder of SCENE_shoreline.npy")
    scene_id: Names | None = flag(None, help="score these scenes only (default: all)")
    output: Path | None = flag(None, help="JSON file for the scores")


class VerifyConfig(Overwriting):
    """The knobs of ``penstock verify``."""

    run_dir: Place | None = flag(
        None, help="run folder of the output, or its URL (default: the one that infer would take)"
    )
    readers: Positive = flag(4, help="threads that read")
    retry_for: Seconds = flag(
        900.0,
        help="how long a store may fail without a success, by faults that may pass "
        "(default: 15min)",
    )
    model: str | None = flag(
        None,
        help="the model of the run, named again as for infer: one that only the run folder names "
        "is not loaded, as it may run code (default: the run's, if it is one of Penstock's own)",
    )
    trust_model: bool = flag(
        False, help="load the model that the run folder names, and files that may run any code"
    )
    recompute: Annotated[Fraction, Field(le=1)] | None = flag(
        None, help="share of the blocks, such as 1%, to compute anew from the input and compare"
    )
    seed: Natural = flag(0, help="seed that picks the blocks of --recompute")
    devices: Annotated[tuple[str, ...], BeforeValidator(many)] | None = flag(
        None, help="devices to compute on, as for infer (default: those of the run)"
    )
    forget: bool = flag(
        False,
        help="take missing and damaged blocks off the run's list, so that infer --resume computes "
        "them again, as for a run of objects in Python; else see penstock repair",
    )
