"""What a user may set: YAML, flags and Python arguments in one validated, frozen model.

Each knob has one default, and it stands here. A validator may refuse what the user said; it
never edits it: what is fitted to the data is fitted in `plan`, and shown there.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from .errors import UsageError
from .units import parse_bytes

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


def _many(value: object) -> object:
    """One value where several may stand is a tuple of one."""
    return value if isinstance(value, list | tuple) else (value,)


PerAxis = Annotated[tuple[Natural, ...], BeforeValidator(_many), Field(min_length=1, max_length=3)]
"""One number for every spatial axis, or one for each of z y x (y x in two dimensions)."""
Shape = Annotated[tuple[Positive, ...], BeforeValidator(_many), Field(min_length=1, max_length=3)]
Selection = Annotated[tuple[str | int, ...], BeforeValidator(_many)]
"""``all``, indices, or ranges such as ``0:5`` (half-open)."""
Names = Annotated[tuple[str, ...], BeforeValidator(_many), Field(min_length=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]


def _switch(value: object) -> object:
    """A flag given without a value is on; ``off on`` measures both."""
    return (True,) if value in ((), []) else _many(value)


Switches = Annotated[tuple[bool, ...], BeforeValidator(_switch)]
"""``--amp`` is on, ``--amp off on`` is an axis of a sweep."""


def _tile(value: object) -> str:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", str(value)):
        raise ValueError(f"{str(value)!r} is no tile such as 256 or 32x256x256")
    return str(value)


Tile = Annotated[str, BeforeValidator(_tile)]
"""``256`` is a square or a cube, as the model has axes; ``32x256x256`` is z y x."""


def flag(default: Any = ..., *, help: str, alias: str | None = None, const: Any = None) -> Any:
    """A knob. ``alias`` is a further flag that sets the knob to ``const``."""
    extra = {"alias": alias, "const": const} if alias else None
    return Field(default, description=help, json_schema_extra=extra)


class Knobs(BaseModel):
    """Base of every set of knobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class InferConfig(Knobs):
    """Everything that ``penstock infer`` and ``penstock.infer`` may be told."""

    # what
    in_spec: Any = flag(help="input: TensorStore JSON (inline or a file), a path or a URL")
    out_spec: Annotated[tuple[Any, ...], BeforeValidator(_many), Field(min_length=1)] = flag(
        help="output, the same forms; one for each head of the model"
    )
    model_type: Any = flag(
        help="a model by name, package.module:function, file.py:function, .pt2 or TorchScript"
    )
    weights: Path | None = flag(None, help="state dict: safetensors, or a torch file of tensors")
    in_channels: Positive | None = flag(
        None, help="channels that the model takes at once (default: what its first layer takes)"
    )
    level: Natural = flag(0, help="resolution level of an OME-Zarr input")
    t: Selection = flag(("all",), help="time points: all, 0, 0:5 or several")
    c: Selection = flag(("all",), help="channels: all, 0, 0:2 or several")

    # geometry
    patch: Shape = flag((64,), help="what the model sees: one number, z y x, or y x for a 2-D net")
    overlap: PerAxis = flag((10,), help="voxels that neighbouring patches share")
    block: Shape | None = flag(
        None, help="shape of a write unit, whole chunks of the output (default: fitted)"
    )
    batch: Positive | None = flag(
        None, help="patches gathered for one forward (default: 16 on a GPU, 1 on a CPU)"
    )
    seam_mode: Literal["trim", "blend"] = flag(
        "trim", help="trim: each voxel from one patch; blend: a weighted mean of all that see it"
    )
    trim_voxels: Natural | None = flag(
        None, help="voxels cut from each face of a patch, at most overlap // 2 (default: that)"
    )
    halo: PerAxis | None = flag(
        None, help="voxels around a block that count in its own percentiles (default: trim)"
    )
    min_blend_weight: Annotated[float, Field(gt=0, le=1)] = flag(
        0.05, help="least weight of a voxel before weights are made to add up to one"
    )

    # values
    normalize: Literal["percentile", "global", "fixed", "none"] = flag(
        "percentile",
        help="percentile: of each block; global: exact, of the whole volume; "
        "fixed: --norm-lower and --norm-upper are intensities; none",
    )
    norm_lower: float = flag(0.5, help="lower percentile, or lower intensity when fixed")
    norm_upper: float = flag(99.9, help="upper percentile, or upper intensity when fixed")
    norm_level: Natural | None = flag(
        None, help="take global percentiles from this level of an OME-Zarr pyramid"
    )
    clip_norm: tuple[float, float] | tuple[()] | None = flag(
        None, help="clip normalised values to LO HI; without numbers to 0 1 (default: no clipping)"
    )
    denormalize: bool = flag(
        True,
        help="undo the normalisation on the way out",
        alias="--no-output-denormalize",
        const=False,
    )
    out_dtype: str | None = flag(None, help="dtype of a new output (default: the input's)")

    # devices
    devices: Annotated[tuple[str, ...], BeforeValidator(_many)] = flag(
        ("auto",), help="auto, cpu, mps, cuda:0 cuda:1 ..."
    )
    amp: Literal["auto", "fp16", "bf16", "off"] = flag(
        "auto",
        help="autocast: fp16 on CUDA and off elsewhere by default",
        alias="--no-amp",
        const="off",
    )
    tf32: bool = flag(False, help="let CUDA use TF32 in float32 arithmetic")
    compile: bool = flag(False, help="torch.compile the model")
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = flag("default", help="mode of torch.compile")
    cudnn_benchmark: bool = flag(False, help="let cuDNN time its algorithms first")
    threads: Positive | None = flag(None, help="threads of torch on the CPU (default: its own)")

    # flow
    prep_workers: Positive = flag(4, help="threads that read, over all devices")
    writer_workers: Positive = flag(4, help="threads that write")
    max_inflight_batches: Positive | None = flag(
        None, help="most batches between reading and writing (default: by memory alone)"
    )
    max_memory: Bytes | None = flag(
        None, help="most host memory, such as 16GiB (default: 80 % of what is free)"
    )

    # output and records
    chunks: Shape | None = flag(None, help="chunks of a new output, z y x")
    shards: Shape | None = flag(None, help="shards of a new output, z y x (zarr v3)")
    overwrite: bool = flag(False, help="replace an output that exists")
    resume: bool = flag(False, help="write only the blocks that an earlier run did not")
    run_dir: Path | None = flag(
        None, help="folder of the run's records (default: OUTPUT.penstock beside the output)"
    )
    metrics_json: Path | None = flag(None, help="write queue and system metrics to this file")
    metrics_interval: Annotated[float, Field(gt=0)] = flag(
        1.0, help="seconds between rows of metrics"
    )
    trace: Path | None = flag(None, help="write a trace that Perfetto and chrome://tracing open")

    @model_validator(mode="after")
    def _ranges(self) -> InferConfig:
        lower, upper = self.norm_lower, self.norm_upper
        if not lower < upper:
            raise ValueError(f"--norm-lower {lower} must be less than --norm-upper {upper}")
        if self.normalize in ("percentile", "global") and not 0 <= lower < upper <= 100:
            raise ValueError(
                f"--norm-lower {lower} and --norm-upper {upper} must be percentiles from 0 to 100"
            )
        if self.clip_norm and not self.clip_norm[0] < self.clip_norm[1]:
            raise ValueError(
                f"--clip-norm {self.clip_norm[0]} must be less than {self.clip_norm[1]}"
            )
        return self


class BenchModelConfig(Knobs):
    """Everything that ``penstock bench model`` may be told. Tuples are axes of the sweep."""

    tile_sizes: Annotated[tuple[Tile, ...], BeforeValidator(_many), Field(min_length=1)] = flag(
        ("256", "384"), help="tile sizes, each a number or ZxYxX"
    )
    batch_sizes: Annotated[tuple[Positive, ...], BeforeValidator(_many), Field(min_length=1)] = (
        flag((1, 2, 4), help="batch sizes")
    )
    mode: Literal["inference", "train"] = flag("inference", help="forward, or a whole step")
    device: str = flag("auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    output: Path = flag(Path("logs/stage2_bench.csv"), help="CSV to which results are appended")
    ledger: Path | None = flag(
        None, help="folder of the raw records (default: OUTPUT with the suffix .ledger)"
    )

    model: Annotated[tuple[str, ...], BeforeValidator(_many), Field(min_length=1)] = flag(
        ("prithvi-refiner-tiny",), help="models by name, module:function or file.py:function"
    )
    weights: Path | None = flag(None, help="state dict: safetensors, or a torch file of tensors")
    channels: Annotated[tuple[Positive, ...], BeforeValidator(_many)] | None = flag(
        None, help="input channels (default: what the model's first layer takes)"
    )
    dtype: Annotated[
        tuple[Literal["float32", "bfloat16", "float16"], ...], BeforeValidator(_many)
    ] = flag(("float32",), help="dtype of weights and input")
    amp: Switches = flag((False,), help="autocast: fp16 on CUDA, bf16 elsewhere; off on: both")
    compile: Switches = flag((False,), help="torch.compile; off on: both")
    channels_last: Switches = flag((False,), help="channels-last layout; off on: both")
    checkpointing: Switches = flag(
        (False,), help="recompute activations in the backward pass; off on: both"
    )
    halo: Annotated[tuple[Natural, ...], BeforeValidator(_many)] = flag(
        (0,), help="pixels on each side of a tile that are cropped away: not useful work"
    )
    threads: Positive | None = flag(None, help="threads of torch on the CPU (default: its own)")

    effort: Literal["quick", "standard", "rigorous"] = flag(
        "standard", help="1, 5 or 10 launches of each case; one launch is never compared"
    )
    launch_seconds: Annotated[float, Field(gt=0)] = flag(
        5.0, help="most seconds of samples in a launch"
    )
    precision: Annotated[float, Field(gt=0, lt=1)] = flag(
        0.01,
        help="stop a launch when the median is known this well (half width of its 95 % interval)",
    )
    timeout: Annotated[float, Field(gt=0)] = flag(600.0, help="most seconds of a launch in all")
    seed: Natural = flag(0, help="seed of the order of launches and of the data")
    resume: bool = flag(False, help="run only the launches that the ledger lacks")

    find_limit: bool = flag(False, help="find the largest batch of each tile that fits")
    budget: Bytes | None = flag(
        None, help="memory that a launch may take, such as 16GiB (default: all there is)"
    )
    recommend: Path | None = flag(
        None,
        help="write recommended settings to this YAML file (default: OUTPUT with .inference.yaml "
        "or .train.yaml)",
    )


PRESET_SAMPLES = 64


class GenerateConfig(Knobs):
    """What ``penstock generate`` may be told beside what to make, from what, and where."""

    samples: Positive | None = flag(
        None, help=f"samples (default: {PRESET_SAMPLES} of a preset, all that a file has)"
    )
    grid: Annotated[tuple[Positive, ...], BeforeValidator(_many)] = flag(
        (192, 384), help="cells of latitude and longitude of a preset, both even"
    )
    seed: Natural = flag(0, help="seed of a preset, a volume or scenes")
    slope: Annotated[float, Field(ge=0)] = flag(
        2.0, help="the amplitude of a preset's waves falls with wave number to this power"
    )
    codec: Literal["blosc-lz4", "blosc-zstd", "zstd", "none"] = flag(
        "blosc-lz4", help="compression of the chunks; blosc shuffles the bytes first"
    )
    zarr_format: Annotated[Literal[2, 3], BeforeValidator(int)] = flag(2, help="version of Zarr")
    shards: Annotated[tuple[Positive, ...], BeforeValidator(_many)] | None = flag(
        None, help="samples in a shard (Zarr 3 only); of a volume, a shard's z y x"
    )
    workers: Positive | None = flag(
        None,
        help="threads that make samples, each holding one or a shard of them "
        "(default: one for each core, 8 at most)",
    )
    overwrite: bool = flag(False, help="replace an OUT that is such data, and nothing else")

    inputs: Names | None = flag(
        None, help="variables of the file that are inputs (default: all that fit)"
    )
    targets: Names | None = flag(
        None, help="variables of the file that are targets (default: the inputs that vary)"
    )
    offsets: Annotated[tuple[int, ...], BeforeValidator(_many), Field(min_length=1)] | None = flag(
        None,
        help="steps of the file that inputs are taken from (default: -1 0, or 0 where it is short)",
    )
    target_offset: int = flag(1, help="step of the file that targets are taken from")

    shape: Shape = flag((128, 512, 512), help="z y x of a volume")
    chunks: Shape = flag((64, 128, 128), help="z y x of a volume's chunks")

    scenes: Annotated[int, Field(ge=2)] = flag(4, help="scenes of xview3, of both splits")
    validation: Positive | None = flag(
        None, help="how many of the scenes are for validation (default: a quarter)"
    )
    size: Annotated[tuple[Positive, ...], BeforeValidator(_many)] = flag(
        (2048, 2048), help="rows and columns of a scene; real ones have some 22000 29000"
    )
    objects: Positive = flag(40, help="labelled objects in a scene, where the sea has room")
    tiff: Literal["strips", "deflate", "tiled"] = flag(
        "strips", help="how pixels lie in the 10 m rasters: plain, or deflated strips or tiles"
    )

    @model_validator(mode="after")
    def _sides(self) -> GenerateConfig:
        if len(self.grid) != 2 or any(side % 2 for side in self.grid):
            told = " ".join(map(str, self.grid))
            raise ValueError(f"--grid {told}: give two even numbers, latitude and longitude")
        for name in ("shape", "chunks"):
            if len(getattr(self, name)) != 3:
                raise ValueError(f"--{name} {getattr(self, name)}: give three numbers, z y x")
        if len(self.size) != 2:
            told = " ".join(map(str, self.size))
            raise ValueError(f"--size {told}: give two numbers, rows and columns")
        if self.validation is not None and self.validation >= self.scenes:
            raise ValueError(
                f"--validation {self.validation} leaves none of --scenes {self.scenes} to train on"
            )
        return self


class BenchQueueConfig(Knobs):
    """Everything that ``penstock bench queue`` may be told. Tuples are axes of the sweep."""

    workers: Annotated[tuple[Natural, ...], BeforeValidator(_many), Field(min_length=1)] = flag(
        (0, 1, 2, 4), help="threads that read and decode; 0 reads where it computes"
    )
    queue_sizes: Annotated[tuple[Positive, ...], BeforeValidator(_many), Field(min_length=1)] = (
        flag((1, 2, 4, 8), help="most batches that are read ahead")
    )
    batch_size: Positive = flag(16, help="samples of a batch")
    iterations: Annotated[int, Field(ge=3)] = flag(
        30, help="steps of a launch, the first of which begins with a full queue"
    )
    compute: Literal["sleep", "busy", "train"] = flag(
        "sleep", help="what a step does: sleep, keep one core busy, or train a real network"
    )
    compute_time: Annotated[float, Field(gt=0)] = flag(
        1.0, help="seconds of a step (train takes what it takes)"
    )
    model: str = flag("prithvi-refiner-tiny", help="the network of --compute train")
    tile_size: Tile = flag("64", help="its tiles, a number or ZxYxX")
    device: str = flag("auto", help="where it trains: cpu, cuda, cuda:1, mps")
    shuffle: Literal["none", "sample", "global"] = flag("sample", help="order of the samples")

    output: Path = flag(Path("logs/queue_bench.csv"), help="CSV to which results are appended")
    ledger: Path | None = flag(
        None, help="folder of the raw records (default: OUTPUT with the suffix .ledger)"
    )
    effort: Literal["quick", "standard", "rigorous"] = flag(
        "quick", help="1, 5 or 10 launches of each case; one launch is never compared"
    )
    timeout: Annotated[float, Field(gt=0)] = flag(600.0, help="most seconds of a launch in all")
    seed: Natural = flag(0, help="seed of the order of launches and of samples")
    resume: bool = flag(False, help="run only the launches that the ledger lacks")


class TuneLoaderConfig(Knobs):
    """Everything that ``penstock tune loader`` may be told."""

    step_time: Annotated[float, Field(gt=0)] = flag(
        help="seconds of a step for a batch of --batch-size samples on the accelerator"
    )
    batch_size: Positive = flag(16, help="samples of a batch")
    threads_up_to: Positive | None = flag(
        None, help="most threads to try (default: the cores that this process may use)"
    )
    max_memory: Bytes | None = flag(
        None, help="most host memory of the batches, such as 16GiB (default: half of what is free)"
    )
    utilisation: Annotated[float, Field(gt=0, lt=1)] = flag(
        0.9, help="share of the time that the accelerator must be computing"
    )
    batches: Annotated[int, Field(ge=6)] = flag(16, help="batches that a launch reads")
    launches: Positive = flag(3, help="launches of each number of threads")
    shuffle: Literal["none", "sample", "global"] = flag("sample", help="order of the samples")
    output: Path = flag(Path("logs/loader.yaml"), help="YAML file for the settings")
    ledger: Path | None = flag(
        None, help="folder of the raw records (default: OUTPUT with the suffix .ledger)"
    )
    timeout: Annotated[float, Field(gt=0)] = flag(600.0, help="most seconds of a launch in all")
    seed: Natural = flag(0, help="seed of the order of launches and of samples")


class LoaderConfig(Knobs):
    """Everything that a `penstock.loader.Loader` may be told, but for what the items are."""

    batch_size: Positive = flag(help="items in a batch of one rank")
    shuffle: Literal["none", "sample", "block", "global"] = flag(
        "none",
        help="none: in order; sample: whole samples; block: in windows of chunks; global: all",
    )
    window: Positive = flag(16, help="chunks in a window of the block shuffle")
    seed: Natural = flag(0, help="seed of the order")
    drop_last: bool = flag(False, help="leave out the items that do not fill a last global batch")
    rank: Natural = flag(0, help="which of the processes this is")
    world_size: Positive = flag(1, help="processes that share an epoch")

    workers: Positive | None = flag(
        None, help="threads that decode (default: one for each CPU that this process may use)"
    )
    fetch: Natural = flag(
        0, help="threads that only read ahead of these; 0: who decodes reads, best for local files"
    )
    queue: Natural = flag(2, help="batches that are made ready ahead of the one in use")
    max_memory: Bytes | None = flag(
        None, help="most memory for batches, scratch and cache, such as 8GiB (default: no limit)"
    )
    cache: Bytes = flag(0, help="decoded chunks kept for their next use, such as 2GiB")
    engine: Literal["auto", "native", "tensorstore"] = flag(
        "auto", help="native: local Zarr of regular chunks; tensorstore: anything; auto: as fits"
    )
    missing: Literal["error", "fill"] = flag(
        "error", help="a chunk that is not there is an error, or the store's fill value"
    )
    pin: bool = flag(False, help="batches in page-locked memory, for a quick way to a CUDA device")


class BenchLoaderConfig(Knobs):
    """Everything that ``penstock bench loader`` may be told. Tuples are axes of the sweep."""

    threads: Annotated[tuple[Positive, ...], BeforeValidator(_many), Field(min_length=1)] = flag(
        (1, 2, 4), help="threads of a loader, or its worker processes"
    )
    batch_sizes: Annotated[tuple[Positive, ...], BeforeValidator(_many), Field(min_length=1)] = (
        flag((4, 16), help="samples of a batch")
    )
    loaders: Annotated[tuple[str, ...], BeforeValidator(_many), Field(min_length=1)] = flag(
        (
            "penstock",
            "penstock-tensorstore",
            "tensorstore-read",
            "dask-sample",
            "dask-stacked",
            "zarr",
            "torch",
            "xbatcher",
            "zarrs",
        ),
        help="loaders by name; the first is compared with each of the others",
    )
    shuffle: Literal["none", "sample", "block", "global"] = flag(
        "sample", help="order of the samples, the same for every loader"
    )
    window: Positive = flag(16, help="chunks in a window of the block shuffle")
    cache: Literal["warm", "cold", "as-is"] = flag(
        "warm",
        help="files in memory before the first batch: all, none (each launch drops them), or "
        "whatever is; what was really there is measured and shown",
    )
    batches: Positive = flag(10, help="batches that a launch waits for, and are samples")
    warmup: Natural = flag(
        4,
        help="batches between the first, which is told apart, and those that are samples; in fewer "
        "a loader that uses its memory again has not yet met all of it",
    )
    ladder: bool = flag(True, help="measure the ladder of ceilings as well")

    endpoint: str | None = flag(
        None, help="URL of the S3 server of an s3:// DATA (default: AWS_ENDPOINT_URL)"
    )
    latency_ms: Annotated[float, Field(ge=0)] = flag(
        0.0, help="read DATA over HTTP on loopback, every request so many milliseconds late"
    )

    output: Path = flag(Path("logs/loader_bench.csv"), help="CSV to which results are appended")
    ledger: Path | None = flag(
        None, help="folder of the raw records (default: OUTPUT with the suffix .ledger)"
    )
    effort: Literal["quick", "standard", "rigorous"] = flag(
        "standard", help="1, 5 or 10 launches of each case; one launch is never compared"
    )
    timeout: Annotated[float, Field(gt=0)] = flag(600.0, help="most seconds of a launch in all")
    seed: Natural = flag(0, help="seed of the order of launches and of samples")
    resume: bool = flag(False, help="run only the launches that the ledger lacks")


CHIP_OVERLAP = 64


class PreprocessConfig(Knobs):
    """Everything that ``penstock preprocess`` may be told."""

    data_root: Path = flag(help="folder with train/ and validation/, a folder for each scene")
    train_label_file: Path = flag(help="label CSV of the training scenes")
    val_label_file: Path = flag(help="label CSV of the validation scenes")
    output_dir: Path = flag(help="folder for train/ and val/")
    channels: str = flag(
        "vh,vv,bathymetry",
        help="comma-separated: vh, vv, bathymetry, wind_speed, wind_direction, wind_quality, mask",
    )
    num_workers: Positive = flag(4, help="scenes that are cut at once")
    overwrite_preproc: bool = flag(False, help="cut again what an earlier run cut")
    chip_size: Positive = flag(800, help="pixels of a chip's side")
    overlap: Natural | None = flag(
        None, help=f"pixels that neighbouring chips share (default: {CHIP_OVERLAP}; reference: 0)"
    )
    layout: Literal["penstock", "reference"] = flag(
        "penstock",
        help="one Zarr for each scene, or a .npy for each channel of each chip as the reference "
        "wrote them",
    )
    partial: bool = flag(
        False, help="take only the scenes that have both a folder and labels, rather than refuse"
    )


class TrainConfig(Knobs):
    """Everything that ``penstock train`` may be told. Some defaults are a workload's own: they
    stand in `TRAIN_DEFAULTS`."""

    # data
    train_data_root: Path | None = flag(
        None, help="what is trained on: scenes (detector), a packed data set (emulator)"
    )
    val_data_root: Path | None = flag(
        None, help="what is validated on; an emulator without it holds back its last samples"
    )
    train_label_file: Path | None = flag(None, help="label CSV of the training scenes (detector)")
    val_label_file: Path | None = flag(None, help="label CSV of the validation scenes (detector)")
    train_chips_path: Path | None = flag(
        None, help="chips of the training scenes, as penstock preprocess makes them (detector)"
    )
    val_chips_path: Path | None = flag(None, help="chips of the validation scenes (detector)")
    output_dir: Path = flag(Path("outputs"), help="folder of results and checkpoints")

    # the run
    epochs: Positive = flag(10, help="passes over the training data")
    batch_size: Positive = flag(8, help="samples of a batch on each device")
    learning_rate: Annotated[float, Field(gt=0)] = flag(0.005, help="the optimiser's learning rate")
    optimizer: Literal["sgd", "adam"] = flag(
        "sgd", help="sgd with a momentum of 0.9, or adam; weights decay by --weight-decay"
    )
    weight_decay: Annotated[float, Field(ge=0)] = flag(
        5e-4, help="share by which the optimiser shrinks weights, at a learning rate of 1"
    )
    schedule: Literal["constant", "cosine", "step"] = flag(
        "step",
        help="constant; cosine: to zero at the end; step: a tenth after every --decay-epochs",
    )
    decay_epochs: Positive = flag(3, help="epochs between the falls of --schedule step")
    warmup_steps: Natural = flag(0, help="steps in which the learning rate rises linearly")
    clip_norm: Annotated[float, Field(gt=0)] | None = flag(
        None, help="most length of the gradient of all weights (default: any)"
    )
    max_steps: Positive | None = flag(None, help="end after so many steps, whatever --epochs says")
    seed: Natural = flag(0, help="seed of weights, order and augmentation")
    weights: Path | None = flag(None, help="begin with these weights: safetensors, or a torch file")

    # input
    num_workers: Natural = flag(4, help="processes (of the emulator: threads) that make batches")
    persistent_workers: bool = flag(False, help="keep those processes from epoch to epoch")
    prefetch_factor: Positive | None = flag(
        None, help="batches that each of them makes ahead (default: 2)"
    )

    # devices
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", help="where to train")
    distributed: bool = flag(
        False, help="train on every rank that torchrun or SLURM started, or on all local devices"
    )
    amp: bool = flag(False, help="mixed precision: fp16 with a scaler on CUDA, bf16 elsewhere")
    compile: bool = flag(False, help="torch.compile the model")
    channels_last: bool = flag(False, help="channels-last layout of images and weights")
    cudnn_benchmark: bool = flag(False, help="let cuDNN time its algorithms first")
    tf32: bool = flag(False, help="let CUDA use TF32 in float32 arithmetic")
    threads: Positive | None = flag(None, help="threads of torch on the CPU (default: its own)")

    # checkpoints
    checkpoint_every: Positive | None = flag(
        None, help="steps between checkpoints inside an epoch (default: at its end alone)"
    )
    keep_top: Natural = flag(3, help="how many of the best checkpoints to keep beside the last")
    resume: bool = flag(False, help="go on from the last checkpoint in --output-dir")
    overwrite: bool = flag(False, help="replace what an earlier run left in --output-dir")

    # detector
    backbone: Literal["mobilenet", "resnet50"] = flag(
        "resnet50", help="what the pyramid of features stands on (detector)"
    )
    background: Annotated[float, Field(ge=0)] = flag(
        0.5, help="chips without an object for each chip with one (detector)"
    )
    score_threshold: Annotated[float, Field(ge=0, le=1)] = flag(
        0.5, help="least score of a detection that is counted (detector)"
    )

    # spiral
    num_samples: Annotated[int, Field(ge=8)] = flag(10_000, help="points of the spirals (spiral)")
    noise: Annotated[float, Field(ge=0)] = flag(
        0.05, help="deviation of the points; at 0.2 no model exceeds 57 % (spiral)"
    )
    hidden_dims: Annotated[tuple[Positive, ...], BeforeValidator(_many), Field(min_length=1)] = (
        flag((64, 32, 16), help="widths of the hidden layers (spiral)")
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = flag(0.2, help="share dropped out (spiral)")

    # emulator
    latent_size: Positive = flag(64, help="width of every latent vector (emulator)")
    chunks_per_epoch: Positive | None = flag(
        None,
        help="read an epoch in so many pieces, each held in memory whole (emulator; default: "
        "batch by batch, read ahead)",
    )
    message_steps: Positive = flag(4, help="rounds of messages on the mesh (emulator)")
    mesh_level: Natural = flag(3, help="times that the icosahedron is refined (emulator)")
    grid_step: Positive = flag(1, help="use every so manieth row and column (emulator)")


TRAIN_DEFAULTS: dict[str, dict[str, Any]] = {
    "spiral": {
        "epochs": 50,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "optimizer": "adam",
        "weight_decay": 0.0,
        "schedule": "constant",
        "num_workers": 0,
        "seed": 42,
    },
    "emulator": {
        "batch_size": 1,
        "learning_rate": 1e-3,
        "optimizer": "adam",
        "weight_decay": 0.0,
        "schedule": "cosine",
        "clip_norm": 1.0,
    },
    "detector": {},
}
"""Where a workload's own defaults differ from those above, which are the detector's."""
TRAIN_KNOBS: dict[str, frozenset[str]] = {
    "spiral": frozenset({"num_samples", "noise", "hidden_dims", "dropout"}),
    "emulator": frozenset(
        "train_data_root val_data_root latent_size chunks_per_epoch message_steps mesh_level "
        "grid_step".split()
    ),
    "detector": frozenset(
        "train_data_root val_data_root train_label_file val_label_file train_chips_path "
        "val_chips_path channels_last backbone background score_threshold".split()
    ),
}
"""Knobs of some workloads alone; a run of another refuses them. A user's own takes them all."""


class XView3Rules(Knobs):
    """How the xView3 score is taken. The challenge's own leaderboard set ``drop_low_detect`` and
    ``costly_dist``."""

    distance_tolerance: Annotated[float, Field(gt=0)] = flag(
        200.0, help="a detection is right when it is closer to its label than this, in metres"
    )
    shore_tolerance: Annotated[float, Field(ge=0)] = flag(
        2.0, help="near the shore is this many kilometres; 0: no score of the shore"
    )
    drop_low_detect: bool = flag(
        False, help="leave out predictions that match labels of LOW confidence"
    )
    costly_dist: bool = flag(
        False,
        help="pairs beyond the tolerance never stand in the way of pairs within; without "
        "--strict-official this is always so",
    )
    score_all: bool = flag(False, help="labels of LOW confidence count like the others")
    strict_official: bool = flag(
        False, help="the numbers of the official script, its quirks included"
    )


class ScoreConfig(XView3Rules):
    """Everything that ``penstock score xview3`` may be told."""

    inference_file: Path = flag(help="predictions: CSV as it is submitted")
    label_file: Path = flag(help="labels: CSV of xView3")
    shore_root: Path | None = flag(None, help="folder of SCENE_shoreline.npy")
    scene_id: Names | None = flag(None, help="score these scenes only (default: all)")
    output: Path | None = flag(None, help="JSON file for the scores")


Config = TypeVar("Config", bound=Knobs)


def build(model: type[Config], *layers: Mapping[str, Any]) -> Config:
    """A validated config from layers of settings, later ones over earlier ones.

    Raises `UsageError` with one sentence for the first setting that is wrong.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {str(key).replace("-", "_"): value for key, value in layer.items()}
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of several settings together
            raise UsageError(first["msg"].removeprefix("Value error, ")) from None
        name = "--" + str(first["loc"][0]).replace("_", "-")
        if first["type"] == "missing" and len(first["loc"]) == 1:
            raise UsageError(f"{name} is required") from None
        if first["type"] == "extra_forbidden":
            raise UsageError(f"there is no setting {first['loc'][0]!r}") from None
        if first["type"] == "value_error":  # one of ours, and whole
            raise UsageError(f"{name}: {first['ctx']['error']}") from None
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise UsageError(f"{name} {first['input']!r}: {message}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a YAML file."""
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} holds no settings")
    return settings


def add_flags(parser: argparse.ArgumentParser, model: type[Knobs]) -> None:
    """One flag for each knob; those that are not given are not set."""
    for name, info in model.model_fields.items():
        dashed = "--" + name.replace("_", "-")
        text = info.description or ""
        if info.default not in (None, ..., ("all",)) and not info.is_required():
            shown = (
                info.default
                if not isinstance(info.default, tuple)
                else " ".join(str(item) for item in info.default)
            )
            text += f" (default: {shown})" if "default" not in text else ""
        text = text.replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if info.annotation is bool:
            parser.add_argument(dashed, **options, action=argparse.BooleanOptionalAction)
        else:
            many = "tuple" in str(info.annotation)
            may_be_empty = "tuple[()]" in str(info.annotation) or "_switch" in str(info.metadata)
            nargs = "*" if may_be_empty else "+" if many else None
            parser.add_argument(dashed, **options, nargs=nargs, metavar=_metavar(info))
        extra = info.json_schema_extra
        if isinstance(extra, dict):
            parser.add_argument(
                str(extra["alias"]),
                dest=name,
                action="store_const",
                const=extra["const"],
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS
                if info.annotation is bool
                else f"same as {dashed} {extra['const']}",
            )


def from_flags(model: type[Config], args: argparse.Namespace, config: Path | None = None) -> Config:
    """A config from a YAML file, if any, under the flags that were given."""
    names = model.model_fields.keys()
    given = {key: value for key, value in vars(args).items() if key in names}
    return build(model, read_yaml(config) if config else {}, given)


def _metavar(info: Any) -> str:
    choices = getattr(info.annotation, "__args__", ())
    if "Literal" in str(info.annotation) and "tuple" not in str(info.annotation):
        return "|".join(str(c) for c in choices)
    for kind, word in (("int", "N"), ("float", "X"), ("Path", "PATH")):
        if kind in str(info.annotation):
            return word
    return "VALUE"


def as_settings(config: Knobs) -> dict[str, Any]:
    """Plain values of a config, for a record or a YAML file; what the user left out is left out."""
    return {
        name: value if isinstance(value, str | int | float | bool) else _plain(value)
        for name, value in config
        if name in config.model_fields_set
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
