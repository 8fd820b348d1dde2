"""How near ``penstock infer`` comes to the limits of this machine, and to what else does the job.

    python benchmarks/infer.py            the numbers of README.md: 512 cubed, five rounds
    python benchmarks/infer.py --quick    a smoke test: 128 cubed, one round, README untouched

Contenders run in turn, round after round, each in a fresh process: a launch is one sample. Ratios
are taken between launches of one round, then their median over rounds. Raw samples are appended to
``results/<date>-infer.jsonl``, and every number and every sentence of the report is computed
from them: ``--report FILE`` does so again without running anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import readme
from contenders import CHUNK, spec

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"

SIZE, ROUNDS = 512, 5
QUICK_SIZE, QUICK_ROUNDS = 128, 1
PIECE = 128
"""Side of the volume that is synthesised; the rest is its mirror images under fresh noise."""
SEED = 0
BATCHES = (1, 2, 4, 16)
"""Tried by the compute limit in every round, and once by whoever has a batch to set."""
FORWARD_SECONDS, QUICK_FORWARD_SECONDS = 20.0, 1.0
"""How long the compute limit times the best of them; each is tried for a tenth of it."""
TIMEOUT = 1800.0
"""Seconds until a launch counts as hung."""
SAMPLE_EVERY = 0.1
MARGIN = 16
"""Voxels at each face that are not compared: there everyone pads in their own way."""

IDENTITY_OF_COPY = {"penstock": 0.6, "penstock, by default": 0.75}
UNET_OF_FLOOR = 0.95
READ_AMPLIFICATION = 1.1
WRITE_AMPLIFICATION = 1.0
MEMORY_WITHIN = 0.1

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A network and how it is run."""

    overlap: int
    normalize: str
    size: int | None = None
    """Side of its volume where the network is too slow for that of the others."""
    default: bool = True
    patch: int = 64

    @property
    def large_patch(self) -> int:
        """A chunk and its halo: the patch of a contender that computes chunk by chunk."""
        return CHUNK + self.overlap


CASES = {
    "identity": Case(overlap=10, normalize="none"),
    "three_conv": Case(overlap=10, normalize="global"),
    "unet": Case(overlap=16, normalize="global"),
    "denoise_net": Case(overlap=16, normalize="global", size=128, default=False),
}


@dataclass(frozen=True)
class Entry:
    """A line of the table: a contender and how it differs from the case."""

    contender: str
    tuned: bool = False
    """Takes the fastest of `BATCHES` on a small volume; else its own default."""
    large: bool = False
    """Runs the large patch."""
    chosen: bool = False
    """Runs the patch and the overlap that Penstock chooses."""
    against: str = "penstock"
    """Which of Penstock's entries has the same patch."""
    install: str = ""


ENTRIES = {
    "penstock": Entry("penstock"),
    "penstock, tuned batch": Entry("penstock", tuned=True),
    "penstock, patch of a chunk": Entry("penstock", tuned=True, large=True),
    "penstock, by default": Entry("penstock", chosen=True),
    "monai": Entry("monai", tuned=True, install="monai"),
    "torch-em": Entry("torch_em", tuned=True, install="torch-em"),
    "naive loop": Entry("naive", install="zarr"),
    "dask map_overlap": Entry(
        "dask", large=True, against="penstock, patch of a chunk", install="dask"
    ),
}
QUICK = {
    "identity": ("penstock", "naive loop"),
    "three_conv": ("penstock", "monai", "torch-em", "dask map_overlap"),
}
"""What the smoke test runs: every contender once."""

COPY_BLOCKS = {
    "128 cubed": (128, 128, 128),
    "128 x 256 x 256": (128, 256, 256),
    "256 cubed": (256, 256, 256),
}
LIMITS = {
    **{f"read {name}": ("read", block) for name, block in COPY_BLOCKS.items()},
    **{f"write {name}": ("write", block) for name, block in COPY_BLOCKS.items()},
    **{f"copy {name}": ("copy", block) for name, block in COPY_BLOCKS.items()},
    "copy by TensorStore": ("copy", ()),
}
"""The limit of a round is the fastest of its variants in that round."""


# --- the volume ------------------------------------------------------------------------------


def make_volume(path: Path, size: int) -> None:
    """A synthetic light-sheet volume: one piece and its mirror images, noise fresh everywhere."""
    import tensorstore as ts

    sys.path.insert(0, str(SOURCE))
    from penstock.data.volumes import clean_volume, noisy

    piece = clean_volume((PIECE,) * 3, SEED)
    place = np.arange(size) % (2 * PIECE)
    mirrored = np.where(place < PIECE, place, 2 * PIECE - 1 - place)
    store = ts.open(spec(str(path), size, create=True)).result()
    for z in range(0, size, CHUNK):
        clean = piece[np.ix_(mirrored[z : z + CHUNK], mirrored, mirrored)]
        store[z : z + CHUNK].write(noisy(clean, seed=SEED + 1 + z)).result()


def warm(path: Path) -> None:
    """Bring a store into the page cache, and let earlier writes reach the disk first."""
    os.sync()
    for file in path.iterdir():
        file.read_bytes()


# --- one launch ------------------------------------------------------------------------------


@dataclass
class Bench:
    """Where a benchmark runs and where its records go."""

    folder: Path
    results: Path
    run: str
    size: int
    peers_python: str
    timeout: float

    def volume(self, size: int) -> Path:
        path = self.folder / f"in-{size}.zarr"
        if not path.exists():
            print(f"making a volume of {size} cubed", flush=True)
            make_volume(path, size)
        return path

    def launch(self, kind: str, entry: str, number: int, **job: Any) -> Record:
        """Run one contender in a fresh process and append its record."""
        job.setdefault("size", self.size)
        source = self.volume(job["size"])
        job |= {"input": str(source), "output": str(self.folder / "out.zarr")}
        for old in (Path(job["output"]), Path(job["output"] + ".run")):
            shutil.rmtree(old, ignore_errors=True)
        warm(source)
        peer = job["contender"] in ("monai", "torch_em", "naive", "dask")
        answer, seconds, tree = self._process(job, self.peers_python if peer else sys.executable)
        voxels = job["size"] ** 3
        record = {
            "schema": 1,
            "run": self.run,
            "time": now(),
            "kind": kind,
            "entry": entry,
            "model": job.get("model"),
            "round": number,
            "job": {k: v for k, v in job.items() if k not in ("input", "output")},
            "cache": "warm",
            "voxels": voxels,
            "bytes": 2 * voxels,
            "process_seconds": seconds,
            **answer,
            "peak_rss": max(filter(None, (answer.get("peak_rss"), tree)), default=None),
        }
        with self.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._tell(record)
        return record

    def _process(self, job: Record, python: str) -> tuple[Record, float, int]:
        asked, answered = self.folder / "job.json", self.folder / "answer.json"
        asked.write_text(json.dumps(job))
        answered.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
        log = self.folder / "log.txt"
        load, tree = os.getloadavg()[0], 0
        start = time.perf_counter()
        with log.open("w") as output:
            process = psutil.Popen(
                [python, str(HERE / "contenders.py"), str(asked), str(answered)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path},
            )
            while process.poll() is None:
                tree = max(tree, tree_rss(process))
                if time.perf_counter() - start > self.timeout:
                    process.kill()
                    process.wait()
                    break
                time.sleep(SAMPLE_EVERY)
        seconds = time.perf_counter() - start
        if answered.exists():
            answer = json.loads(answered.read_text())
        else:
            late = seconds > self.timeout
            end = log.read_text(errors="replace")[-2000:].replace(str(self.folder), "WORK")
            answer = {
                "status": "timeout" if late else "crash",
                "error": end.replace(str(HERE.parent), "."),
            }
        return answer | {"load_before": load}, seconds, tree

    def _tell(self, record: Record) -> None:
        if record["status"] == "ok":
            said = f"{record['seconds']:8.2f} s of {record['process_seconds']:.2f} s"
        elif record["status"] == "unsupported":
            said = f"skipped: {record['error']}"
            if record["entry"] in ENTRIES:
                said += f"; pip install {ENTRIES[record['entry']].install}"
        else:
            said = f"{record['status']}: {record['error'].strip().splitlines()[-1:]}"
        name = f"{record['model'] or ''} {record['entry']}".strip()
        print(f"round {record['round']}  {name:<40} {said}", flush=True)


def tree_rss(process: psutil.Process) -> int:
    try:
        return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> Record:
    """What the numbers depend on and a reader can know."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    git = ["git", "-C", str(HERE)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "processor": model,
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        "dirty": bool(dirty.stdout.strip()),
    }


# --- the run ---------------------------------------------------------------------------------


def measure(bench: Bench, rounds: int, chosen: Mapping[str, Sequence[str]], quick: bool) -> None:
    """Plan and tune, then the rounds; ``chosen`` are the entries to run for each case."""
    skipped: set[str] = set()
    plans, batches = {}, {}
    for name, entries in chosen.items():
        plans[name] = bench.launch("plan", "plan", 0, contender="plan", **settings(name))
        for entry in entries:
            batches[name, entry] = _batch(bench, name, entry, quick, skipped)
    limits = [name for name in LIMITS if not quick or "128 cubed" in name]
    for number in range(1, rounds + 1):
        for limit in limits:
            contender, block = LIMITS[limit]
            bench.launch("limit", limit, number, contender=contender, block=block)
        for name, entries in chosen.items():
            _forward(bench, name, number, plans[name], quick)
            for entry in entries:
                if entry in skipped:
                    continue
                record = bench.launch(
                    "peer" if entry in peers() else "penstock",
                    entry,
                    number,
                    contender=ENTRIES[entry].contender,
                    **settings(name, entry, batches[name, entry]),
                )
                if record["status"] == "unsupported":
                    skipped.add(entry)
                elif record["status"] == "ok" and number == 1:
                    _compare(bench, name, entry)


def _forward(bench: Bench, name: str, number: int, plan: Record, quick: bool) -> None:
    """The limit of computing: the network of a case alone, on as many patches as planned."""
    if plan["status"] != "ok":
        return
    bench.launch(
        "limit",
        "forward",
        number,
        contender="forward",
        num_patches=plan["extra"]["num_patches"],
        batches=BATCHES,
        seconds=QUICK_FORWARD_SECONDS if quick else FORWARD_SECONDS,
        **settings(name),
    )


def settings(name: str, entry: str | None = None, batch: int | None = None) -> Record:
    """The part of a job that a case and an entry decide."""
    case = CASES[name]
    large = entry is not None and ENTRIES[entry].large
    chosen = entry is not None and ENTRIES[entry].chosen
    given: Record = {
        "model": name,
        "overlap": case.overlap,
        "patch": 0 if chosen else case.large_patch if large else case.patch,
        "normalize": case.normalize,
        "batch": batch,
    }
    return given | ({"size": case.size} if case.size else {})


def peers() -> list[str]:
    return [name for name, entry in ENTRIES.items() if entry.contender != "penstock"]


def _batch(bench: Bench, name: str, entry: str, quick: bool, skipped: set[str]) -> int | None:
    """The batch of an entry: its default, or the fastest on a small volume."""
    if not ENTRIES[entry].tuned or entry in skipped:
        return None
    if quick:
        return BATCHES[0]
    seconds = {}
    for batch in BATCHES:
        job = settings(name, entry, batch) | {"size": 2 * CHUNK}
        record = bench.launch("tune", entry, 0, contender=ENTRIES[entry].contender, **job)
        if record["status"] == "unsupported":
            skipped.add(entry)
            return None
        if record["status"] == "ok":
            seconds[batch] = record["seconds"]
    return min(seconds, key=lambda b: seconds[b]) if seconds else BATCHES[0]


def _compare(bench: Bench, name: str, entry: str) -> None:
    """Hold an output against Penstock's of this run, away from the faces; append what differs."""
    import tensorstore as ts

    size = CASES[name].size or bench.size
    mine, reference = bench.folder / "out.zarr", bench.folder / f"reference-{name}-{size}.zarr"
    if not reference.exists():
        shutil.copytree(mine, reference)
        return
    inside = slice(MARGIN, size - MARGIN)
    got, want = (ts.open(spec(str(p), size), read=True).result() for p in (mine, reference))
    above, most, count = 0, 0, 0
    for z in range(MARGIN, size - MARGIN, CHUNK):
        part = (slice(z, min(z + CHUNK, size - MARGIN)), inside, inside)
        a, b = (store[part].read().result().astype(np.int32) for store in (got, want))
        difference = np.abs(a - b)
        above += int((difference > 1).sum())
        most, count = max(most, int(difference.max())), count + difference.size
    record = {
        "schema": 1,
        "run": bench.run,
        "time": now(),
        "kind": "equality",
        "entry": entry,
        "model": name,
        "round": 1,
        "status": "ok",
        "most": most,
        "differing": above / count,
    }
    with bench.results.open("a") as file:
        file.write(json.dumps(record) + "\n")


# --- the report: everything below is computed from records ----------------------------------------


class Results:
    """The records of one run, by what was measured and in which round."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.run = next(r for r in records if r["kind"] == "run")
        self.records = records = [r for r in records if r["kind"] != "run"]
        self.cores: int = self.run["machine"]["cores"]
        self.rounds = sorted({r["round"] for r in records if r["round"]})

    @property
    def cases(self) -> list[str]:
        return [name for name in CASES if any(r["model"] == name for r in self.records)]

    def of(self, kind: str, entry: str, model: str | None = None) -> dict[int, Record]:
        """Launches that went well, by round."""
        return {
            r["round"]: r
            for r in self.records
            if (r["kind"], r["entry"], r["model"], r["status"]) == (kind, entry, model, "ok")
        }

    def limit(self, contender: str) -> dict[int, Record]:
        """The fastest variant of a limit in each round."""
        best: dict[int, Record] = {}
        for name, (which, _) in LIMITS.items():
            if which == contender:
                for number, record in self.of("limit", name).items():
                    if number not in best or record["seconds"] < best[number]["seconds"]:
                        best[number] = record
        return best

    def plan(self, model: str) -> Record:
        plans = self.of("plan", "plan", model)
        return plans[0]["extra"] if plans else {}

    def floor(self, model: str) -> dict[int, float]:
        """Seconds that compute and the CPU work of reading and writing cannot go below.

        The network uses every core when it runs alone, so each CPU second of decoding and encoding
        delays it by 1 / cores. Percentiles of the whole volume add one more reading.
        """
        passes = self.plan(model).get("statistics_passes", 0.0)
        copy, read = self.limit("copy"), self.limit("read")
        floors = {}
        for number, compute in self.of("limit", "forward", model).items():
            if number in copy and number in read:
                share = compute["voxels"] / copy[number]["voxels"]
                cpu = copy[number]["cpu_seconds"] + passes * read[number]["cpu_seconds"]
                floors[number] = compute["seconds"] + share * cpu / self.cores
        return floors


Spread = tuple[float, float, float]


def spread(values: Sequence[float]) -> Spread | None:
    """Median, least, most."""
    return (statistics.median(values), min(values), max(values)) if values else None


def ratios(above: dict[int, Record], below: dict[int, Record], key: str = "seconds") -> list[float]:
    """Round by round."""
    return [above[n][key] / below[n][key] for n in sorted(above.keys() & below.keys())]


def shown(values: Sequence[float], digits: int = 2) -> str:
    interval = spread(values)
    if interval is None:
        return "not measured"
    middle, low, high = (f"{v:.{digits}f}" for v in interval)
    return middle if len(values) == 1 else f"{middle} [{low} - {high}]"


def report(results: Results) -> Iterator[str]:
    """The report in Markdown."""
    run, m = results.run, results.run["machine"]
    yield (
        f"{run['time'][:10]}, {m['processor']}, {m['cores']} cores, {m['memory'] / 2**30:.0f} GiB, "
        f"{m['system']}, Python {m['python']}; commit {m['commit']}"
        f"{' with uncommitted changes' if m['dirty'] else ''}."
    )
    yield f"Command: `{run['command']}`. Rounds: {len(results.rounds)}. Page cache: warm."
    loads = [r["load_before"] for r in results.records if r.get("load_before") is not None]
    if loads:
        yield (
            f"Load average before a launch: median {statistics.median(loads):.1f}, most "
            f"{max(loads):.1f}. Each value: median [least - most] over rounds."
        )
    yield ""
    yield from limits_table(results)
    for model in results.cases:
        yield ""
        yield from case_table(results, model)
    yield ""
    yield "### Targets"
    yield ""
    yield from verdicts(results)
    yield ""
    yield from trouble(results)


def limits_table(results: Results) -> Iterator[str]:
    yield "### Limits"
    yield ""
    yield "| limit | seconds | Mvox/s | GB/s raw | CPU seconds | fastest variant |"
    yield "|---|---|---|---|---|---|"
    names = {"read": "R, read", "write": "W, write", "copy": "RW, copy"}
    for contender, name in names.items():
        rows = results.limit(contender)
        if rows:
            winners = [r["entry"].removeprefix(contender).strip() for r in rows.values()]
            yield row(
                name,
                shown([r["seconds"] for r in rows.values()], 3),
                shown([r["voxels"] / r["seconds"] / 1e6 for r in rows.values()], 0),
                shown([r["bytes"] / r["seconds"] / 1e9 for r in rows.values()]),
                shown([r["cpu_seconds"] for r in rows.values()]),
                statistics.mode(winners),
            )
    for model in results.cases:
        rows = results.of("limit", "forward", model)
        if rows:
            best = statistics.mode(r["extra"]["best_batch"] for r in rows.values())
            patches = next(iter(rows.values()))["extra"]["num_patches"]
            yield row(
                f"C, {model}, {patches} patches",
                shown([r["seconds"] for r in rows.values()], 3),
                shown([r["voxels"] / r["seconds"] / 1e6 for r in rows.values()], 1),
                shown([r["bytes"] / r["seconds"] / 1e9 for r in rows.values()], 3),
                shown([r["cpu_seconds"] for r in rows.values()]),
                f"batch {best}",
            )


def case_table(results: Results, model: str) -> Iterator[str]:
    case = CASES[model]
    size = next(r["job"]["size"] for r in results.records if r["model"] == model and "job" in r)
    yield (
        f"### {model}: {size} cubed, patch {case.patch}, overlap {case.overlap}, "
        f"normalisation {case.normalize}"
    )
    yield ""
    yield (
        "| contender | job seconds | Mvox/s | process seconds | CPU seconds | peak RSS, GB "
        "| patch / batch | time / Penstock's | within 1 count of Penstock |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, entry in ENTRIES.items():
        kind = "peer" if name in peers() else "penstock"
        rows = results.of(kind, name, model)
        if not rows:
            continue
        ours = results.of("penstock", entry.against, model)
        job = next(iter(rows.values()))["job"]
        batch = job["batch"] or (results.plan(model).get("batch") if kind == "penstock" else 1)
        relative = "1" if name == "penstock" else shown(ratios(rows, ours))
        if entry.against != "penstock" and ours:
            relative += f" ({entry.against})"
        yield row(
            name,
            shown([r["seconds"] for r in rows.values()]),
            shown([r["voxels"] / r["seconds"] / 1e6 for r in rows.values()], 1),
            shown([r["process_seconds"] for r in rows.values()]),
            shown([r["cpu_seconds"] for r in rows.values()]),
            shown([r["peak_rss"] / 1e9 for r in rows.values()]),
            f"{job['patch'] or 'its own'} / {batch}",
            relative,
            equality(results, model, name),
        )
    planned, rows = results.plan(model), results.of("penstock", "penstock", model)
    if planned and rows:
        got = [r["extra"] for r in rows.values()]
        yield ""
        yield (
            f"Penstock: computes {planned['patch_amplification']:.2f} voxels for each voxel; reads "
            f"{planned['read_planned']:.2f} times the input by plan and "
            f"{shown([g['read_measured'] for g in got], 3)} measured (stored bytes fetched, "
            f"{planned['statistics_passes']:.0f} of it for percentiles); writes "
            f"{shown([g['write_measured'] for g in got], 3)}; peak memory "
            f"{shown([g['planned_peak'] / 1e9 for g in got])} GB by plan. "
            f'Its own words: "{got[-1]["bound_by"]}"'
        )


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def equality(results: Results, model: str, entry: str) -> str:
    for record in results.records:
        if (record["kind"], record["model"], record["entry"]) == ("equality", model, entry):
            if record["differing"] == 0:
                return "all"
            return f"**{1 - record['differing']:.2%}**, most {record['most']}"
    return "reference" if entry == "penstock" else "not compared"


def verdicts(results: Results) -> Iterator[str]:
    """A line for each target and model: met, or missed and by how much."""
    for model in results.cases:
        rows = results.of("penstock", "penstock", model)
        tuned = results.of("penstock", "penstock, tuned batch", model)
        if not rows:
            yield f"- NOT MET: {model}: no launch of Penstock went well"
            continue
        if model == "identity":
            for name, goal in IDENTITY_OF_COPY.items():
                if launches := results.of("penstock", name, model):
                    shares = ratios(results.limit("copy"), launches)
                    yield at_least(f"{model}: {name}: speed / RW", shares, goal)
        else:
            floors = results.floor(model)
            for name, launches in (("", rows), (", tuned batch", tuned)):
                part = [floors[n] / launches[n]["seconds"] for n in floors.keys() & launches.keys()]
                if part:
                    yield at_least(f"{model}{name}: T_floor / time", part, UNET_OF_FLOOR)
        passes = results.plan(model).get("statistics_passes", 0.0)
        extra = [r["extra"] for r in rows.values()]
        yield at_most(
            f"{model}: read amplification",
            [e["read_measured"] - passes for e in extra],
            READ_AMPLIFICATION,
        )
        yield at_most(
            f"{model}: write amplification",
            [round(e["write_measured"], 2) for e in extra],
            WRITE_AMPLIFICATION,
        )
        peaks = [r["peak_rss"] / r["extra"]["planned_peak"] for r in rows.values()]
        yield within(f"{model}: peak RSS / plan", peaks, MEMORY_WITHIN)
        for name in peers():
            against = ENTRIES[name].against
            ours = results.of("penstock", against, model)
            faster = ratios(results.of("peer", name, model), ours)
            if faster:
                yield at_least(f"{model}: speed of {against} / {name}'s", faster, 1.0)


def at_least(what: str, values: Sequence[float], target: float) -> str:
    return _verdict(what, [target - v for v in values], values, f"at least {target:g}")


def at_most(what: str, values: Sequence[float], target: float) -> str:
    return _verdict(what, [v - target for v in values], values, f"at most {target:g}")


def within(what: str, values: Sequence[float], target: float) -> str:
    return _verdict(what, [abs(v - 1) - target for v in values], values, f"1 +- {target:g}")


def _verdict(what: str, short: Sequence[float], values: Sequence[float], target: str) -> str:
    """``short`` is by how much each round misses the target; the median decides."""
    if not values:
        return f"- NOT MET: {what}: not measured"
    said = f"{what} is {shown(values, 3)}, target {target}"
    said += f", met in {sum(s <= 0 for s in short)} of {len(short)} round(s)"
    missing = statistics.median(short)
    return f"- met: {said}" if missing <= 0 else f"- **NOT MET by {missing:.3f}**: {said}"


def trouble(results: Results) -> Iterator[str]:
    """Launches that did not go well, and contenders that are not installed."""
    for record in results.records:
        if record["status"] != "ok":
            last = (record.get("error") or "").strip().splitlines()[-1:]
            yield (
                f"- {record['status']}: {record['model'] or ''} {record['entry']}, round "
                f"{record['round']}: {''.join(last)}"
            )


# --- the command ------------------------------------------------------------------------------


def load(path: Path) -> Results:
    """The last run of a file of records."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = records[-1]["run"]
    return Results([r for r in records if r["run"] == last])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README is not written")
    parser.add_argument("--size", type=int, help=f"side of the volume (default: {SIZE})")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--models", nargs="+", choices=list(CASES), metavar="NAME")
    parser.add_argument("--entries", nargs="+", choices=list(ENTRIES), metavar="NAME")
    parser.add_argument(
        "--peers-python", default=sys.executable, help="interpreter that has the peers installed"
    )
    parser.add_argument("--folder", type=Path, help="where volumes go (default: a temporary one)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where records go")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for one launch")
    parser.add_argument("--no-readme", action="store_true", help="leave README.md as it is")
    parser.add_argument("--report", type=Path, metavar="JSONL", help="run nothing, report this")
    return parser.parse_args()


def command() -> str:
    """The command line without the paths of this machine."""
    words, hidden = ["python", "benchmarks/infer.py"], False
    for word in sys.argv[1:]:
        words.append("..." if hidden else word)
        hidden = word in ("--peers-python", "--folder", "--results")
    return shlex.join(words)


def main() -> int:
    args = arguments()
    results = load(args.report or run(args))
    text = "\n".join(report(results)).rstrip()
    print(f"\n{text}")
    if not (args.quick or args.no_readme):
        readme.write("infer", text)
    good = {"ok", "unsupported"}
    ours = [r for r in results.records if r["kind"] in ("limit", "plan", "penstock")]
    return 0 if all(r["status"] in good for r in ours) else 1


def run(args: argparse.Namespace) -> Path:
    """Measure; the file of records."""
    args.results.mkdir(parents=True, exist_ok=True)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    started = now()
    bench = Bench(
        folder=folder,
        results=args.results / f"{started[:10]}-infer.jsonl",
        run=started,
        size=args.size or (QUICK_SIZE if args.quick else SIZE),
        peers_python=args.peers_python,
        timeout=args.timeout,
    )
    with bench.results.open("a") as file:
        head = {"kind": "run", "schema": 1, "run": started, "time": started, "status": "ok"}
        file.write(json.dumps(head | {"command": command(), "machine": machine()}) + "\n")
    usual = {name: tuple(ENTRIES) for name, case in CASES.items() if case.default}
    chosen = QUICK if args.quick else usual
    models = args.models or chosen
    chosen = {name: args.entries or chosen.get(name, tuple(ENTRIES)) for name in models}
    try:
        measure(bench, args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS), chosen, args.quick)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    return bench.results


if __name__ == "__main__":
    sys.exit(main())
