"""The knobs of a job that several processes share: a cluster's workers, or an array's elements;
that runs unattended; and that computes only where there is sample."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .knobs import Bytes, Names, Natural, Overwriting, Place, Positive, Seconds, Shape, flag


def _share(value: object) -> str:
    element, _, elements = str(value).partition("/")
    numbers = re.fullmatch(r"[1-9]\d*/[1-9]\d*", str(value), re.ASCII)
    if numbers is None or int(element) > int(elements):
        raise ValueError(f"{str(value)!r} is not an element such as 1/64, counted from 1")
    return str(value)


Share = Annotated[str, BeforeValidator(_share)]
"""``3/64``: an element of an array, counted from 1, and the number of elements."""


def share_of(text: str) -> tuple[int, int]:
    """The element and the number of elements in a text such as ``3/64``."""
    element, _, elements = text.partition("/")
    return int(element), int(elements)


class OnWorkers(Overwriting):
    """Workers of a cluster, and how long a job waits for them."""

    cluster: str | None = flag(
        None,
        help="workers of Dask: local or local:N, processes of this machine, or the address of a "
        "scheduler, such as tcp://HOST:8786",
        group="workers and parts",
    )
    worker_timeout: Seconds = flag(
        86400.0,
        help="how long a job of a cluster waits while no worker is there, or while workers die "
        "and nothing is done, before it ends with exit code 3 (default: 24h)",
        group="workers and parts",
    )


class Stepwise(OnWorkers):
    """The knobs of a job that reads an array and writes one, and of which each process may do a
    step, as the elements of an array of jobs do."""

    level: Natural = flag(0, help="resolution level of an OME-Zarr input", group="input and model")
    series: Natural | None = flag(
        None,
        help="image to take of a TIFF file, or of an OME-Zarr group, that holds several",
        group="input and model",
    )
    axes: str | None = flag(
        None,
        help="axes of the input as stored, such as tyx: letters of t c z y x (default: by its "
        "names of dimensions, else by their number)",
        group="input and model",
    )
    raw: bool = flag(
        False,
        help="read a Zarr array's numbers as they are stored, whatever its scale_factor, "
        "add_offset, _FillValue and valid_range say",
        group="input and model",
    )
    chunks: Shape | None = flag(
        None,
        help="chunks of a new output: one number, z y x, or y x",
        unit="voxels",
        group="a new output",
    )
    shards: Shape | None = flag(
        None, help="shards of a new output, z y x (zarr v3)", unit="voxels", group="a new output"
    )
    levels: Positive | Literal["none"] | None = flag(
        None,
        help="levels of an OME-Zarr output, or none (default: until y and x are <= 256)",
        group="a new output",
    )
    max_memory: Annotated[Bytes, Field(ge=1)] | None = flag(
        None, help="most host memory, such as 16GiB (default: 80 % of what is free)"
    )
    resume: bool = flag(False, help="write only what an earlier run did not write")
    take_over: bool = flag(
        False,
        help="take an output that another run has locked and not released, if that run may have "
        "ended: on another machine, or in an array",
        group="faults",
    )

    prepare: bool = flag(
        False,
        help="make output and run folder for an array of --part i/n, and write no block",
        group="workers and parts",
    )
    part: Share | None = flag(
        None,
        help="i/n: element i of n, counted from 1, writes its share of the parts",
        group="workers and parts",
    )
    finish: bool = flag(
        False,
        help="check that all elements have written their shares, and close the output",
        group="workers and parts",
    )

    @property
    def step_flags(self) -> list[str]:
        """The flags of steps that are given."""
        steps = ("prepare", "statistics", "part", "finish")
        return [f"--{name}" for name in steps if getattr(self, name, None)]

    @property
    def is_element(self) -> bool:
        """Whether the process does one step of an array."""
        return bool(self.step_flags)

    @property
    def joins(self) -> bool:
        """Whether the process joins a run that --prepare began."""
        return self.is_element and not self.prepare

    @property
    def resumes(self) -> bool:
        """Whether the run goes on with an earlier one."""
        return self.resume or self.joins

    @model_validator(mode="after")
    def _one_step(self) -> Stepwise:
        given = self.step_flags
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are two steps of an array; give one")
        if given and self.cluster is not None:
            raise ValueError(f"{given[0]} is a step of an array; --cluster does all of a job")
        return self


class Sharing(Stepwise):
    """The knobs that divide a job into parts among processes."""

    workers: Positive | None = flag(
        None,
        help="workers that the job is cut for (default: those of the cluster, or the elements of "
        "the array)",
        group="workers and parts",
    )
    parts: Positive | None = flag(
        None,
        help="least number of parts that the job is cut into (default: as workers need)",
        group="workers and parts",
    )
    statistics: Share | None = flag(
        None,
        help="i/n: element i of n counts its share of the values for percentiles of the whole "
        "volume, after --prepare",
        group="workers and parts",
    )

    @property
    def shared_by(self) -> int | None:
        """Number of processes that share the job; None for one that does it alone."""
        for share in (self.part, self.statistics):
            if share is not None:
                return self.workers or share_of(share)[1]
        return self.workers or (1 if self.is_element or self.parts else None)

    @model_validator(mode="after")
    def _cut_for(self) -> Sharing:
        if self.prepare and self.workers is None:
            raise ValueError("--prepare needs --workers N, the number of elements of the array")
        return self


class Unattended(Sharing):
    """The knobs of a job that runs unattended, and of what it leaves on record."""

    retry_for: Seconds = flag(
        900.0,
        help="how long a store may fail without a success, by faults that may pass such as a busy "
        "server, before the job ends with exit code 3 (default: 15min)",
        group="faults",
    )
    stall_timeout: Seconds = flag(
        1800.0,
        help="how long a block may make no progress in a stage before the job ends with exit code "
        "3 and the stacks of its threads in the run folder; 0: no limit (default: 30min)",
        group="faults",
    )
    grace: Seconds = flag(
        20.0,
        help="how long a job that is asked to end (SIGTERM, SIGUSR1) may write finished blocks; a "
        "second SIGTERM ends it at once (default: 20s)",
        group="faults",
    )
    run_dir: Place | None = flag(
        None,
        help="folder of the run's records, or s3://BUCKET/PREFIX (default: OUTPUT.penstock beside "
        "a local output, else in the working folder; with a hash of the address where the name "
        "alone is ambiguous)",
        group="records",
    )
    metrics_json: Path | None = flag(
        None,
        help="write queue and system metrics to this file; each of several processes that share "
        "the job to one of its own, with its name added",
        group="records",
    )
    metrics_interval: Annotated[float, Field(gt=0)] = flag(
        1.0, help="seconds between rows of metrics", unit="seconds", group="records"
    )
    trace: Path | None = flag(
        None,
        help="write a trace for Perfetto or chrome://tracing, likewise",
        group="records",
    )


class Sampled(Unattended):
    """The knobs that say where there is sample: only there is anything computed."""

    mask: Any | None = flag(
        None,
        help="compute only where this array is not 0: a path, URL or spec, of any resolution, that "
        "lies over the input in world coordinates (nearest voxel); the output has its fill value "
        "elsewhere",
        group="only where there is sample",
    )
    mask_output: Literal["yes", "no"] = flag(
        "yes",
        help="no: keep the output of whole patches, also outside --mask and --box",
        group="only where there is sample",
    )
    skip_below: float | None = flag(
        None,
        help="leave out patches in which no voxel of the input reaches this value",
        group="only where there is sample",
    )
    skip_level: Natural | None = flag(
        None,
        help="estimate --skip-below by this level of an OME-Zarr input, without reading more",
        group="only where there is sample",
    )
    box: Names | None = flag(
        None,
        help="compute only within a box of voxels: a range for each of z y x, as 0:64 : 10:90",
        group="only where there is sample",
    )

    @model_validator(mode="after")
    def _sample(self) -> Sampled:
        if self.skip_level is not None and self.skip_below is None:
            raise ValueError("--skip-level decides on --skip-below; give both")
        if self.mask_output == "no" and self.mask is None and self.box is None:
            raise ValueError("--mask-output no keeps what lies outside --mask or --box; give one")
        return self
