"""The knobs of a job that runs unattended, and of where it finds sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .knobs import Names, Natural, Place, Seconds, flag
from .sharing import Sharing


class Unattended(Sharing):
    """The knobs of a job that runs unattended, and of what it leaves on record."""

    groups: ClassVar = {
        "faults": "retry_for stall_timeout grace take_over",
        "records": "run_dir metrics_json metrics_interval trace",
    }

    retry_for: Seconds = flag(
        900.0,
        help="how long a store may fail without a success, by faults that may pass such as a busy "
        "server, before the job ends with exit code 3 (default: 15min)",
    )
    stall_timeout: Seconds = flag(
        1800.0,
        help="how long a block may make no progress in a stage before the job ends with exit code "
        "3 and the stacks of its threads in the run folder; 0: no limit (default: 30min)",
    )
    grace: Seconds = flag(
        20.0,
        help="how long a job that is asked to end (SIGTERM, SIGUSR1) may write finished blocks; a "
        "second SIGTERM ends it at once (default: 20s)",
    )
    take_over: bool = flag(
        False,
        help="take an output that another run has locked and not released, if that run may have "
        "ended: on another machine, or in an array",
    )
    run_dir: Place | None = flag(
        None,
        help="folder of the run's records, or s3://BUCKET/PREFIX (default: OUTPUT.penstock beside "
        "a local output, else in the working folder; with a hash of the address where the name "
        "alone is ambiguous)",
    )
    metrics_json: Path | None = flag(None, help="write queue and system metrics to this file")
    metrics_interval: Annotated[float, Field(gt=0)] = flag(
        1.0, help="seconds between rows of metrics", unit="seconds"
    )
    trace: Path | None = flag(None, help="write a trace for Perfetto or chrome://tracing")


class Sampled(Unattended):
    """The knobs that say where there is sample: only there is anything computed."""

    groups: ClassVar = {
        "only where there is sample": "mask mask_output skip_below skip_level box",
    }

    mask: Any | None = flag(
        None,
        help="compute only where this array is not 0: a path, URL or spec, of any resolution, that "
        "lies over the input in world coordinates (nearest voxel); the output has its fill value "
        "elsewhere",
    )
    mask_output: Literal["yes", "no"] = flag(
        "yes",
        help="no: keep the output of whole patches, also outside --mask and --box",
    )
    skip_below: float | None = flag(
        None, help="leave out patches in which no voxel of the input reaches this value"
    )
    skip_level: Natural | None = flag(
        None, help="estimate --skip-below by this level of an OME-Zarr input, without reading more"
    )
    box: Names | None = flag(
        None, help="compute only within a box of voxels: a range for each of z y x, as 0:64 : 10:90"
    )

    @model_validator(mode="after")
    def _sample(self) -> Sampled:
        if self.skip_level is not None and self.skip_below is None:
            raise ValueError("--skip-level decides on --skip-below; give both")
        if self.mask_output == "no" and self.mask is None and self.box is None:
            raise ValueError("--mask-output no keeps what lies outside --mask or --box; give one")
        return self
