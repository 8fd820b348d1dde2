"""Scenario ``infer``: an inference over neighbouring patches in the middle of a volume.

    first step         runs over more and more patches, until they take the seconds of the case
    every other step   one run over so many patches: read, forward, stitch, write

The input is the user's own. The output goes to a folder that is removed, without levels. What the
user leaves out of the volume is computed here, as a patch takes the same time anywhere.

The case is

    settings    the settings of `InferConfig`, as JSON
    seconds     about how long a run shall take
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base import InferConfig, build, one_heap, trim_heap
from ...data import Box
from ...inference import Job, Plan, run_job
from . import Phase, Work

_MOST_GROWTH = 8
"""Most times as many patches as in the run before, whose time was mostly that of its start."""
_ENOUGH = 0.6
"""Share of the seconds of the case that a run must take."""


class InferScenario:
    """An inference; each step runs it once."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        one_heap()
        self._case, self._numbers = case, itertools.count()
        with contextlib.ExitStack() as ends:
            self._folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
            job = Job(self._config(), trial=True)
            job.plan.refuse()
            self._ends = ends.pop_all()
        self._plan, self._volume = job.plan, job.volumes[0]
        self.device = str(job.devices[0])
        self.facts = facts_of(job)
        self._patches = 0

    def step(self, phase: Phase) -> Work:
        if not self._patches:
            self._patches = self._fitting()
            return {}
        job = self._job(self._patches)
        phase("open")
        run_job(job)
        phase("run")
        shutil.rmtree(self._place)
        return {"patches": self._patches}

    def close(self) -> None:
        self._ends.close()

    def _fitting(self) -> int:
        """The number of patches that take about the seconds of the case."""
        goal, all_patches = float(self._case["seconds"]), self.facts["patches_of_volume"]
        count = self.facts["batch"]
        while True:
            job = self._job(count)
            began = time.perf_counter()
            run_job(job)
            took = time.perf_counter() - began
            shutil.rmtree(self._place)
            if took >= _ENOUGH * goal or count >= all_patches:
                return min(count, all_patches)
            count = math.ceil(count * min(_MOST_GROWTH, goal / took))

    def _job(self, patches: int) -> Job:
        """The job over some patches in the middle of the volume."""
        # A plan counts what the process holds, and the heap keeps what the run before has freed.
        trim_heap()
        config, volume = self._config(), self._volume
        self._place.mkdir()
        part = {"t": (volume.t,), "c": volume.channels, "box": middle(self._plan, patches)}
        return Job(config.model_copy(update=part), trial=True)

    def _config(self) -> InferConfig:
        """The settings of the job, with outputs of its own in a new place."""
        self._place = self._folder / str(next(self._numbers))
        outputs = len(self._case["settings"]["out_spec"])
        scratch: dict[str, Any] = {
            "out_spec": [str(self._place / f"{i}.ome.zarr") for i in range(outputs)],
            "run_dir": str(self._place / "run"),
            "levels": "none",
        }
        return build(InferConfig, self._case["settings"], scratch)


def check(case: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case, and the facts of its plan. Raises `UsageError` for what cannot be done."""
    scenario = InferScenario(case)
    scenario.close()
    return dict(case), scenario.facts


def facts_of(job: Job) -> dict[str, Any]:
    """What a job has settled, for the record."""
    plan, net = job.plan, job.net
    return {
        "patch": list(plan.geometry.patch[-net.shape.model_axes :]),
        "overlap": list(plan.geometry.overlap),
        "block": list(plan.geometry.block),
        "batch": net.batch,
        "threads": job.maker["threads"],
        "volume": list(plan.geometry.domain.shape),
        "patches_of_volume": plan.geometry.patches.size,
        "patches": plan.num_patches,
        "planned_bytes": plan.memory.total,
    }


def middle(plan: Plan, count: int) -> tuple[str, ...]:
    """The voxels that about ``count`` patches in the middle of a volume own, as ``--box``."""
    geometry, sides = plan.geometry, [1, 1, 1]
    grid = geometry.patches
    while math.prod(sides) < count:
        growing = [axis for axis in range(3) if sides[axis] < grid.shape[axis]]
        if not growing:
            break
        axis = min(growing, key=lambda each: sides[each] * geometry.stride[each])
        sides[axis] += 1
    first = [
        start + (size - side) // 2
        for start, size, side in zip(grid.start, grid.shape, sides, strict=True)
    ]
    core = geometry.core_of(Box.of(first, sides))
    return tuple(f"{start}:{stop}" for start, stop in zip(core.start, core.stop, strict=True))
