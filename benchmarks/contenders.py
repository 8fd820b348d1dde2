"""What is measured: one contender, one fresh process.

    python contenders.py JOB.json ANSWER.json

A contender is a function in `CONTENDERS`. It gets ready (imports, network), then does its job in
``with job.clock:``, which runs from the first read to the last write; what it returns is kept with
the record. Nothing here knows of rounds, ratios or targets: that is ``infer.py``.

    limits   read, write, copy, forward   one resource each, no pipeline
    penstock                              the command line, in this process
    peers    monai, torch_em, naive, dask the same job by other means
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module, metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 128
CODEC = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1}
PERCENTILES = (0.5, 99.9)
THREADS = 4
"""Blocks under way at once in the limits; the decoding below them is TensorStore's own pool."""
LIBRARIES = ("numpy", "tensorstore", "zarr", "torch", "penstock", "monai", "torch_em", "dask")


class Clock:
    """Seconds and CPU seconds of the job itself."""

    seconds = cpu_seconds = 0.0

    def __enter__(self) -> None:
        cpu = os.times()
        self.started, self.cpu_started = time.perf_counter(), cpu.user + cpu.system

    def __exit__(self, *error: object) -> None:
        cpu = os.times()
        self.seconds = time.perf_counter() - self.started
        self.cpu_seconds = cpu.user + cpu.system - self.cpu_started


@dataclass
class Job:
    """What a contender is told."""

    contender: str
    input: str
    output: str
    size: int
    model: str = ""
    patch: int = 64
    """0 for the patch and the overlap that Penstock chooses."""
    overlap: int = 10
    batch: int | None = None
    """Patches in one forward; None is Penstock's default."""
    batches: tuple[int, ...] = ()
    """For the compute limit: the batch sizes to try."""
    seconds: float = 0.0
    """For the compute limit: how long each of them runs, at least."""
    normalize: str = "none"
    num_patches: int = 0
    block: tuple[int, ...] = ()
    """For read, write and copy: what one thread takes at once."""
    clock: Clock = field(default_factory=Clock)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,) * 3

    @property
    def halo(self) -> int:
        return self.overlap // 2

    @property
    def stride(self) -> int:
        return self.patch - self.overlap


def spec(path: str, size: int, *, create: bool = False) -> dict[str, Any]:
    """The TensorStore spec of a volume: zarr v2, chunks of 128, blosc zstd."""
    opened: dict[str, Any] = {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}
    if create:
        opened["metadata"] = {
            "shape": [size] * 3,
            "chunks": [CHUNK] * 3,
            "dtype": "<u2",
            "compressor": CODEC,
        }
        opened |= {"create": True, "delete_existing": True}
    return opened


def boxes(shape: tuple[int, ...], step: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    starts = [range(0, n, s) for n, s in zip(shape, step, strict=True)]
    for corner in product(*starts):
        yield tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, step, shape, strict=True))


def open_both(job: Job) -> tuple[Any, Any]:
    import tensorstore as ts

    source = ts.open(spec(job.input, job.size), read=True).result()
    return source, ts.open(spec(job.output, job.size, create=True)).result()


def in_threads(work: Callable[[tuple[slice, ...]], object], job: Job) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(work, boxes(job.shape, job.block)):
            pass


# --- limits ----------------------------------------------------------------------------------


def read(job: Job) -> dict[str, Any]:
    """R: every chunk decoded once, nothing kept."""
    source, _ = open_both(job)
    with job.clock:
        in_threads(lambda box: source[box].read().result(), job)
    return {}


def write(job: Job) -> dict[str, Any]:
    """W: the same voxels, from RAM, in whole chunks."""
    source, sink = open_both(job)
    volume = source.read().result()
    with job.clock:
        in_threads(
            lambda box: (
                sink[box].write(volume[box], can_reference_source_data_indefinitely=True).result()
            ),
            job,
        )
    return {}


def copy(job: Job) -> dict[str, Any]:
    """RW: whole chunks read and written, no network. No ``block``: TensorStore's own copy."""
    source, sink = open_both(job)

    def move(box: tuple[slice, ...]) -> None:
        block = source[box].read().result()
        sink[box].write(block, can_reference_source_data_indefinitely=True).result()

    with job.clock:
        if job.block:
            in_threads(move, job)
        else:
            sink.write(source).result()
    return {}


def forward(job: Job) -> dict[str, Any]:
    """C: the network alone on patches in memory, at the best of some batch sizes.

    A tenth of ``job.seconds`` tells for each which is best; that one is timed for all of them, and
    scaled to the patches of the plan. It is their mean: a job, too, pays for what disturbs it, and
    is there as long as a job.
    """
    from penstock.base import one_heap

    one_heap()  # as the command does for itself: a limit that takes its memory anew is none
    import torch

    import models

    net, trials = models.make(job.model), {}
    for part in net.modules():
        if isinstance(part, torch.nn.Conv3d):  # the faster layout: a limit is the best there is
            part.to(memory_format=torch.channels_last_3d)

    def timed(batch: int, seconds: float) -> list[float]:
        patches, times = torch.rand((batch, 1, *(job.patch,) * 3)), []
        net(patches)  # the first forward picks kernels and takes memory
        while sum(times) < seconds and len(times) < 1000:
            start = time.perf_counter()
            net(patches)
            times.append(time.perf_counter() - start)
        return times

    with torch.inference_mode():
        for batch in job.batches:
            trials[batch] = timed(batch, job.seconds / 10)
        each = {batch: float(np.median(times)) / batch for batch, times in trials.items()}
        best = min(each, key=lambda batch: each[batch])
        used = os.times()
        samples = timed(best, job.seconds)
        after = os.times()
    busy = (after.user + after.system - used.user - used.system) / (after.elapsed - used.elapsed)
    job.clock.seconds = float(np.mean(samples)) / best * job.num_patches
    job.clock.cpu_seconds = job.clock.seconds * busy
    return {
        "best_batch": best,
        "median_seconds_per_patch": each,
        "num_patches": job.num_patches,
        "patches_timed": len(samples) * best,
        "trials": trials,
        "samples": samples,
    }


# --- penstock --------------------------------------------------------------------------------


def penstock(job: Job) -> dict[str, Any]:
    """The command line in this process, timed by its own clock: first read to last write."""
    import tensorstore as ts

    from penstock import cli

    cli.set_up_libraries()  # as the command does for itself

    import_module(
        "penstock.inference.run"
    )  # torch is imported before the clock starts, as for peers
    run_dir = Path(job.output + ".run")
    with job.clock:
        code = cli.main(["infer", *_flags(job), "--run-dir", str(run_dir)])
    if code != 0:
        raise RuntimeError(f"penstock infer returned {code}")
    summary = json.loads((run_dir / "summary.json").read_text())
    job.clock.seconds = summary["seconds"]  # without opening and planning
    counters = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_")
    moved = {c["name"].rpartition("/")[2]: c["values"][0]["value"] for c in counters}
    return {
        "planned_peak": summary["planned_peak"],
        "sampled_peak_rss": summary["peak_rss"],
        "stages": summary["stages"],
        "bound_by": summary["bound_by"],
        "read_measured": moved["bytes_read"] / stored_bytes(job.input),
        "write_measured": moved["bytes_written"] / stored_bytes(job.output),
    }


def plan(job: Job) -> dict[str, Any]:
    """What Penstock plans for the job; not timed."""
    from penstock.base.config.flags import add_flags, from_flags
    from penstock.base.config.infer import InferConfig
    from penstock.inference.opening.job import Job as Inference

    parser = argparse.ArgumentParser()
    add_flags(parser, InferConfig)
    opened = Inference(from_flags(InferConfig, parser.parse_args(_flags(job))))
    planned = opened.plan
    return {
        "num_patches": planned.num_patches,
        "batch": opened.net.batch,
        "patch_amplification": planned.patch_amplification,
        "read_planned": (planned.read_bytes + planned.statistics_bytes) / planned.input_bytes,
        "statistics_passes": planned.statistics_bytes / planned.input_bytes,
        "planned_peak": planned.memory.total,
    }


def _flags(job: Job) -> list[str]:
    flags = {
        "--in-spec": json.dumps(spec(job.input, job.size)),
        "--out-spec": json.dumps(spec(job.output, job.size, create=True)),
        "--model-type": f"{Path(__file__).with_name('models.py')}:{job.model}",
        "--normalize": job.normalize,
        "--head-kind": "intensity",  # an untrained net may look like one of probabilities
        "--devices": "cpu",
    }
    if job.patch:
        flags |= {"--patch": str(job.patch), "--overlap": str(job.overlap)}
    if job.batch is not None:
        flags["--batch"] = str(job.batch)
    return [word for pair in flags.items() for word in pair]


def stored_bytes(store: str) -> int:
    """Size of a store's chunks on disk."""
    return sum(f.stat().st_size for f in Path(store).iterdir() if not f.name.startswith("."))


# --- peers -----------------------------------------------------------------------------------


def scaling(job: Job, volume: np.ndarray) -> tuple[float, float]:
    """Lower and scale of the normalisation that Penstock was asked for."""
    if job.normalize == "none":
        return 0.0, 1.0
    lower, upper = np.percentile(volume, PERCENTILES)
    return float(lower), float(upper - lower)


def to_counts(values: np.ndarray, lower: float, scale: float) -> np.ndarray:
    """Back to intensities, in place but for the last step."""
    values *= np.float32(scale)
    values += np.float32(lower)
    return np.clip(np.rint(values, out=values), 0, 65535, out=values).astype(np.uint16)


def monai(job: Job) -> dict[str, Any]:
    """`sliding_window_inference` over the volume in memory, read and written by TensorStore."""
    import torch
    from monai.inferers.utils import sliding_window_inference

    import models

    net, (source, sink) = models.make(job.model), open_both(job)
    with job.clock, torch.inference_mode():
        volume = source.read().result()
        lower, scale = scaling(job, volume)
        inputs = torch.from_numpy(volume.astype(np.float32)).sub_(lower).div_(scale)
        output = sliding_window_inference(
            inputs[None, None],
            (job.patch,) * 3,
            job.batch,
            net,
            overlap=job.overlap / job.patch,
            mode="constant",
            padding_mode="reflect",
        )
        sink.write(to_counts(output[0, 0].numpy(), lower, scale)).result()
    return {}


def torch_em(job: Job) -> dict[str, Any]:
    """`predict_with_halo_pipelined` over the volume in memory, read and written by TensorStore."""
    import models

    _let_torch_em_import()
    from torch_em.util.prediction import predict_with_halo_pipelined

    net, (source, sink) = models.make(job.model), open_both(job)
    with job.clock:
        volume = source.read().result()
        lower, scale = scaling(job, volume)
        output = np.empty(job.shape, np.uint16)
        predict_with_halo_pipelined(
            volume,
            net,
            ["cpu"],
            (job.stride,) * 3,
            (job.halo,) * 3,
            output=output,
            preprocess=lambda x: (x.astype(np.float32) - np.float32(lower)) / np.float32(scale),
            postprocess=lambda y: to_counts(y[0], lower, scale),
            batch_size=job.batch,
            disable_tqdm=True,
        )
        sink.write(output).result()
    return {}


def _let_torch_em_import() -> None:
    """torch-em imports torchvision for augmentation and for the pictures of its training log.

    Prediction uses neither. PyPI's torchvision does not load beside a CPU build of torch; where it
    does not, empty modules stand in for it.
    """
    from unittest.mock import MagicMock

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in ("torchvision", "torchvision.utils", "torchvision.transforms"):
            sys.modules[name] = MagicMock()


def naive(job: Job) -> dict[str, Any]:
    """The loop that one writes first: read a patch, run it, write its core, with zarr-python.

    Percentiles take one more read of everything. Cores are no whole chunks, so nearly each write
    reads chunks back; a loop over whole chunks is what `dask` stands for.
    """
    import torch

    import models

    net, (source, sink) = models.make(job.model), _zarr_arrays(job)
    with job.clock, torch.inference_mode():
        lower, scale = scaling(job, source[:] if job.normalize != "none" else source)
        for core in boxes(job.shape, (job.stride,) * 3):
            starts = [c.start - job.halo for c in core]
            inside = tuple(slice(max(0, s), min(job.size, s + job.patch)) for s in starts)
            missing = [
                (i.start - s, s + job.patch - i.stop) for s, i in zip(starts, inside, strict=True)
            ]
            patch = np.pad(source[inside].astype(np.float32), missing, mode="reflect")
            patch = (patch - np.float32(lower)) / np.float32(scale)
            output = net(torch.from_numpy(patch)[None, None])[0, 0].numpy().copy()
            keep = tuple(slice(job.halo, job.halo + c.stop - c.start) for c in core)
            sink[core] = to_counts(output[keep], lower, scale)
    return {}


def dask(job: Job) -> dict[str, Any]:
    """`map_overlap` over whole chunks, one forward for each, on Dask's threads, with zarr-python.

    The patch is the chunk and its halo, so that Dask computes fewer voxels than a patch of 64 does:
    it is compared with Penstock at the same patch.
    """
    import dask.array as da
    import torch

    import models

    net, (source, sink) = models.make(job.model), _zarr_arrays(job)
    torch.set_num_threads(1)  # Dask's threads are the parallelism

    def run(block: np.ndarray, lower: float, scale: float) -> np.ndarray:
        with torch.inference_mode():
            patch = torch.from_numpy(block.astype(np.float32)).sub_(lower).div_(scale)
            return to_counts(net(patch[None, None])[0, 0].numpy().copy(), lower, scale)

    with job.clock:
        lower, scale = scaling(job, source[:] if job.normalize != "none" else source)
        volume = da.from_zarr(source)
        output = volume.map_overlap(
            run,
            depth=job.halo,
            boundary="reflect",
            meta=np.empty((0,) * 3, np.uint16),
            lower=lower,
            scale=scale,
        )
        da.store(output, sink, lock=False, scheduler="threads")
    return {}


def _zarr_arrays(job: Job) -> tuple[Any, Any]:
    import zarr

    open_both(job)  # creates the output
    return zarr.open_array(job.input, mode="r"), zarr.open_array(job.output, mode="r+")


CONTENDERS: dict[str, Callable[[Job], dict[str, Any]]] = {
    f.__name__: f
    for f in (read, write, copy, forward, plan, penstock, monai, torch_em, naive, dask)
}


# --- the process -----------------------------------------------------------------------------


def peak_rss() -> int:
    """Most resident bytes this process ever held."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss starts from that of the parent that forked us; this one starts at exec.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    version_of = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        # Only what this contender has used; the source tree of Penstock has no metadata.
        if name in sys.modules:
            try:
                version_of[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                version_of[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return version_of


def main(job_file: str, answer_file: str) -> None:
    job = Job(**json.loads(Path(job_file).read_text()))
    job.block, job.batches = tuple(job.block), tuple(job.batches)
    answer: dict[str, Any] = {"status": "ok"}
    try:
        answer["extra"] = CONTENDERS[job.contender](job)
    except ImportError as error:
        answer |= {"status": "unsupported", "error": str(error)}
    total = os.times()
    answer |= {
        "seconds": job.clock.seconds,
        "cpu_seconds": job.clock.cpu_seconds,
        "process_cpu_seconds": sum(total[:4]),
        "peak_rss": peak_rss(),
        "versions": versions(),
    }
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
