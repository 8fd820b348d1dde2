"""The record of a launch: its case, its measurements and its machine, in one JSON line.

A **case** is one point of a sweep: a scenario and all its knobs. A **launch** is one fresh process
that measures one case. Its **record** holds the raw samples, so that statistics can be taken anew.
A value that is not known is null, never 0. A launch that failed has a record too.
A record of another schema than `SCHEMA` is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base import UsageError, canonical, parsed_json, redacted

SCHEMA = 1

Status = Literal[
    "ok", "oom_device", "oom_host", "timeout", "crash", "unsupported", "wrong_result"
]  # fmt: skip

FAILED: Mapping[str, str] = {
    "oom_device": "ran out of device memory",
    "oom_host": "ran out of host memory",
    "timeout": "did not end in time",
    "crash": "crashed",
    "unsupported": "is not supported here",
    "wrong_result": "gave a wrong result",
}
"""The words for a launch that is not ok."""


class _RecordModel(BaseModel):
    # Fields that others add are kept. JSON has no number that is not finite: one would be written
    # as null, and the record could not be read again.
    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)


class Warmup(_RecordModel):
    """The calls before the first sample; they are never part of a statistic."""

    setup_s: float | None = None
    """Imports, building the scenario, first allocations."""
    first_s: float | None = None
    """The first call alone: lazy initialisation, compilation, autotuning."""
    compile_s: float | None = None
    """The part of the first calls that torch.compile took; null where nothing is compiled."""
    samples_s: tuple[float, ...] = ()
    """The calls after the first."""
    settled: bool | None = None
    """True where the rule saw a steady state before its caps; False is shown as "unstable"."""


class Memory(_RecordModel):
    """Bytes. Peaks span setup, warm-up and samples."""

    host_baseline: int | None = None
    """Resident in the process before the scenario was built."""
    host_peak: int | None = None
    """The process tree, sampled by the supervisor; PSS where several processes share pages."""
    host_peak_kernel: int | None = None
    """The kernel's own high-water mark of the measured process (VmHWM)."""
    host_shared: int | None = None
    """Pages of files and of shared memory in the process, which a memory limit does not count."""
    host_counted: int | None = None
    """Peak of the bytes that a memory limit counts: private mappings, touched or not."""
    device_allocated: int | None = None
    """Bytes alive in tensors after the last step."""
    device_peak: int | None = None
    """Peak of the bytes alive in tensors."""
    device_reserved: int | None = None
    """Peak of the bytes that torch's allocator held."""
    device_driver: int | None = None
    """Peak of the device's bytes by the driver (NVML), less what the device held before."""
    alloc_retries: int | None = None
    """The times that the allocator emptied its cache to go on; above 0 the batch hardly fits."""


class Failure(_RecordModel):
    """Why a launch is not ok."""

    stage: str
    """The stage in which it failed: start, setup, warmup, measure, verify, report."""
    message: str
    """One sentence."""
    stderr: str = ""
    """The end of its standard error."""


class Record(_RecordModel):
    """One launch."""

    schema_version: int = Field(SCHEMA, alias="schema")
    id: str
    time: str
    """The time when the launch began, in ISO 8601 with its offset."""
    scenario: str
    name: str | None = None
    """Name of the run that the launch belongs to; no part of the key."""
    tags: dict[str, str] = {}
    """Tags of that run."""
    case: dict[str, Any]
    """All knobs, plain values."""
    key: str
    """The `case_key` of the scenario and the case."""
    launch: int
    """Its number among the launches of the case, from 0."""
    order: int | None = None
    """Its place in the shuffled order of its sweep."""
    status: Status
    work: dict[str, float] = {}
    """Counted work of one step: samples, pixels, useful_pixels, bytes, flops ..."""
    steps_per_sample: int = 1
    """Steps that are timed together for one sample, which is their mean."""
    samples_s: dict[str, Annotated[tuple[float, ...], Field(min_length=1)]] = {}
    """Raw seconds per step: ``step`` (wall clock of the host), ``device`` (by device events), and
    each phase, such as forward, backward, optimizer."""
    stop: Literal["precise", "noise_stable", "budget"] | None = None
    """The reason why sampling ended."""
    warmup: Warmup = Warmup()
    memory: Memory = Memory()
    clocks: tuple[dict[str, Any], ...] = ()
    """GPU clocks (MHz), temperature, power and throttle reasons around the samples."""
    facts: dict[str, Any] = {}
    """Facts of the scenario: model, parameters, structure hash, uncounted operators."""
    environment: dict[str, Any] = {}
    error: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether the launch succeeded, so that its samples count."""
        return self.status == "ok"

    def line(self) -> str:
        """The record as one line of JSON, without its newline."""
        return self.model_dump_json(by_alias=True)


def case_key(scenario: str, case: Mapping[str, Any]) -> str:
    """A hash of a scenario and its knobs: equal cases have equal keys, on every machine.

    Args:
        scenario: the name of the scenario.
        case: its knobs.

    Returns:
        16 hexadecimal digits.

    >>> case_key("model", {"batch": 1, "tile": [8]}) == case_key("model", {"tile": [8], "batch": 1})
    True
    """
    return hashlib.sha256(canonical(redacted([scenario, dict(case)])).encode()).hexdigest()[:16]


class _Header(BaseModel):
    """The one field that a record of any schema has."""

    schema_version: int = Field(alias="schema")


def parse_record(line: str | bytes) -> Record:
    """A record from its line.

    Raises:
        UsageError: the record is of another schema.
        ValueError: the line is not a record.
    """
    document = parsed_json(line)
    try:
        schema = _Header.model_validate(document).schema_version
        if schema != SCHEMA:
            raise UsageError(
                f"the record is of schema {schema}; this Penstock reads schema {SCHEMA}"
            )
        return Record.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
