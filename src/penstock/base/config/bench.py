"""The knobs of the benchmarks and of ``penstock tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .infer import InferConfig
from .knobs import (
    TRUST_MODEL,
    Bytes,
    Fraction,
    Knobs,
    Natural,
    Overwriting,
    Positive,
    Seconds,
    Switches,
    Tile,
    flag,
    many,
)
from .run_labels import Labels
from .sharing import OnWorkers


class RecordKnobs(Overwriting, Labels):
    """The place where launches are recorded, and the most time that one may take."""

    ledger: Path | None = flag(
        None,
        help="folder of the raw records (default: OUTPUT with the suffix .ledger)",
        group="launches",
    )
    timeout: Annotated[float, Field(gt=0)] = flag(
        600.0, help="most seconds of a launch in all", unit="seconds", group="launches"
    )
    seed: Natural = flag(0, help="seed of the order of launches and of samples", group="launches")


class CompareConfig(Overwriting):
    """The knobs of ``penstock compare``."""

    fail_if_slower: Fraction | None = flag(
        None,
        help="a gate: the change that matters, 5% or 0.05 (default: the noise within the "
        "launches, by A/A); exit code 3 if it stays uncertain",
    )
    metric: str | None = flag(
        None,
        help="time to compare: step, device, or a phase such as forward or read (default: step; "
        "for trainings sample, the seconds of a step over its samples)",
    )
    anyway: bool = flag(False, help="also compare different machines, work or models")
    markdown: Path | None = flag(None, help="also write a summary for a pull request")
    html: Path | None = flag(None, help="also write a page that compares the runs")


class SweepKnobs(RecordKnobs, OnWorkers):
    """The number of launches of each case, their device, and whether earlier launches count."""

    effort: Literal["quick", "standard", "rigorous"] = flag(
        "standard", help="1, 5 or 10 launches of each case; one launch is never compared"
    )
    resume: bool = flag(False, help="run only the launches that the ledger lacks")


class BenchModelConfig(SweepKnobs):
    """The knobs of ``penstock bench model``. Tuples are axes of the sweep."""

    tile_sizes: Annotated[tuple[Tile, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        ("256", "384"), help="tile sizes, each a number or ZxYxX"
    )
    batch_sizes: Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        (1, 2, 4), help="batch sizes"
    )
    mode: Literal["inference", "train"] = flag("inference", help="forward, or a whole step")
    device: str = flag("auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    output: Path = flag(Path("logs/stage2_bench.csv"), help="CSV to which results are appended")

    model: Annotated[tuple[str, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        ("prithvi-refiner-tiny",), help="models by name, module:function or file.py:function"
    )
    weights: Path | None = flag(
        None, help="state dict: safetensors, or a torch file of tensors", group="the network"
    )
    trust_model: bool = flag(False, help=TRUST_MODEL, group="the network")
    channels: Annotated[tuple[Positive, ...], BeforeValidator(many)] | None = flag(
        None,
        help="input channels (default: what the model's first layer takes)",
        group="the network",
    )
    dtype: Annotated[
        tuple[Literal["float32", "bfloat16", "float16"], ...], BeforeValidator(many)
    ] = flag(("float32",), help="dtype of weights and input")
    amp: Switches = flag((False,), help="autocast: fp16 on CUDA, bf16 elsewhere; off on: both")
    compile: Switches = flag((False,), help="torch.compile; off on: both")
    channels_last: Switches = flag(
        (False,), help="channels-last layout; off on: both", group="the network"
    )
    tf32: Switches = flag(
        (False,), help="let CUDA use TF32 in float32 arithmetic; off on: both", group="the network"
    )
    checkpointing: Switches = flag(
        (False,),
        help="recompute activations in the backward pass; off on: both",
        group="the network",
    )
    halo: Annotated[tuple[Natural, ...], BeforeValidator(many)] = flag(
        (0,),
        help="pixels on each side of a tile that are cropped away: not useful work",
        unit="pixels",
        group="the network",
    )
    threads: Positive | None = flag(
        None, help="threads of torch on the CPU (default: torch's own)", group="the network"
    )

    launch_seconds: Annotated[float, Field(gt=0)] = flag(
        5.0, help="most seconds of samples in a launch", unit="seconds", group="launches"
    )
    precision: Annotated[float, Field(gt=0, lt=1)] = flag(
        0.01,
        help="end a launch once half the width of the median's 95 % interval is this share of it",
        unit="share",
        group="launches",
    )

    find_limit: bool = flag(
        False, help="find the largest batch of each tile that fits, to a hundredth"
    )
    budget: Annotated[Bytes, Field(ge=1)] | None = flag(
        None,
        help="most memory of a launch, such as 16GiB (default: all that there is)",
        group="limits",
    )
    recommend: Path | None = flag(
        None,
        help="write recommended settings to this YAML file (default: OUTPUT with .inference.yaml "
        "or .train.yaml)",
    )


class PatchKnobs(Knobs):
    """The patches that samples are cut into."""

    patch: Annotated[tuple[Positive, ...], BeforeValidator(many)] | None = flag(
        None,
        group="reading",
        help="cut samples into patches of this shape along the last axes. With a number for each "
        "axis of the array, the whole array, such as a volume, is one sample; --shuffle global "
        "then takes its patches in any order",
    )


class BenchLoaderConfig(SweepKnobs, PatchKnobs):
    """The knobs of ``penstock bench loader``. Tuples are axes of the sweep."""

    threads: Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        (1, 2, 4), help="threads of a loader, or its worker processes"
    )
    batch_sizes: Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        (4, 16), help="samples of a batch"
    )
    loaders: Annotated[tuple[str, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        (
            "penstock",
            "penstock-tensorstore",
            "tensorstore-read",
            "dask-sample",
            "dask-stacked",
            "zarr",
            "torch",
        ),
        help="loaders by name; the first is compared with each of the others",
    )
    shuffle: Literal["none", "sample", "block", "global"] = flag(
        "sample", help="order of the samples, the same for every loader"
    )
    window: Positive = flag(16, help="chunks in a window of the block shuffle", group="reading")
    cache: Literal["warm", "cold", "as-is"] = flag(
        "warm",
        help="files in the page cache before the first batch: all (warm), none (cold: each launch "
        "drops them), or as they are; what was there is measured and shown",
        group="reading",
    )
    batches: Positive = flag(10, help="batches of a launch that are timed", group="reading")
    warmup: Positive = flag(
        4,
        help="batches between the first, which is reported apart, and those that are timed: enough "
        "for a loader to have used all of its memory once. A loader that reads further ahead than "
        "this warms up for as many batches as it reads ahead",
        group="reading",
    )
    ladder: bool = flag(
        True,
        help="also measure the ladder of ceilings: how fast each part of the loader could be",
        group="reading",
    )

    output: Path = flag(Path("logs/loader_bench.csv"), help="CSV to which results are appended")


class QueueKnobs(Knobs):
    """How the samples of a queue, or of one loader, are read."""

    shuffle: Literal["none", "sample", "global"] = flag(
        "sample", help="order of the samples", group="reading"
    )
    missing: Literal["error", "fill"] = flag(
        "error",
        group="reading",
        help="what an absent chunk is: an error, or the store's fill value",
    )


class BenchQueueConfig(SweepKnobs, QueueKnobs):
    """The knobs of ``penstock bench queue``. Tuples are axes of the sweep."""

    workers: Annotated[tuple[Natural, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        (0, 1, 2, 4), help="threads that read and decode; 0: the thread that computes reads"
    )
    queue_sizes: Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1)] = flag(
        (1, 2, 4, 8), help="most batches that are read ahead"
    )
    batch_size: Positive = flag(16, help="samples of a batch")
    iterations: Annotated[int, Field(ge=3)] = flag(
        30, help="steps of a launch; the first begins with a full queue"
    )
    compute_time: Annotated[float, Field(gt=0)] = flag(
        1.0, help="seconds of a step, which sleeps", unit="seconds"
    )
    output: Path = flag(Path("logs/queue_bench.csv"), help="CSV to which results are appended")
    effort: Literal["quick", "standard", "rigorous"] = flag(
        "quick", help="1, 5 or 10 launches of each case; one launch is never compared"
    )


class TuneLoaderConfig(RecordKnobs, PatchKnobs, QueueKnobs):
    """The knobs of ``penstock tune loader``."""

    step_time: Annotated[float, Field(gt=0)] = flag(
        help="SECONDS of a step on the accelerator, with --batch-size samples", unit="seconds"
    )
    batch_size: Positive = flag(4, help="samples of a batch")
    threads_up_to: Positive | None = flag(
        None, help="most threads to try (default: the cores that this process may use)"
    )
    max_memory: Annotated[Bytes, Field(ge=1)] | None = flag(
        None, help="most host memory of the loader, such as 16GiB (default: half of what is free)"
    )
    batches: Annotated[int, Field(ge=6)] = flag(16, help="batches that a launch reads")
    launches: Positive = flag(3, help="launches with each number of threads")
    output: Path = flag(Path("logs/loader.yaml"), help="YAML file for the settings")


class TuneInferConfig(InferConfig, RecordKnobs):
    """The knobs of ``penstock tune infer``: those of the job, and how it is tuned."""

    output: Path = flag(Path("logs/infer.yaml"), help="YAML file for the settings", group="tuning")
    most_seconds: Seconds = flag(
        180.0, help="about how long to measure (default: 3min)", group="tuning"
    )
    launch_seconds: Annotated[float, Field(gt=0)] = flag(
        3.0, help="about how long each run of a launch takes", unit="seconds", group="tuning"
    )
