"""Scenario ``loader``: the wait for one batch, of our loader or of a contender.

    setup     import the library; bring the page cache into the state that is asked for
    step 1    open the data and wait for the first batch, with all the threads that it takes
    step ...  wait for the next, in the same order for every loader
    verify    the same batches again, from a loader made anew, by the checksums of the data set

Where the data set has fewer batches than are asked for, they come again, in one epoch without an
end: at an end a loader would wait for what it could not read ahead, and then have the rest ready.

What was read ahead of the samples comes for nothing. So the warm-up takes as many batches as a
loader reads ahead, if need be, and ``facts["fresh"]`` says which share of the samples' bytes was
read while they were waited for: with less than all, the waits are too short.

A step is the wait alone: what is done with a batch is for others to add. The checksums of a batch
take as long as reading it, and in between two waits they would be time in which a loader reads
ahead; so all batches that were timed are delivered once more, untimed, and every byte of every row
is checked there. Anything but 0 duplicates, 0 missing and 0 wrong is a wrong result.

Bytes and processor time are counted from the first batch to the last, of the whole tree of
processes, so that what runs ahead at one end makes up for the other.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
from numpy.typing import NDArray

from .. import loaders, pagecache
from ..batches import Field, need_of
from ..caller import less_collecting
from ..dataset import (
    CHECKS,
    Audit,
    Packed,
    PackedArray,
    cut_of,
    open_any,
    open_dataset,
    with_checks,
)
from ..errors import UsageError
from ..loaders import DOCUMENT, parse_document
from ..loopback import Loopback
from ..order import Endless, Order, Price, price
from . import Phase, Work, WrongResult

Batch = Mapping[str, NDArray[Any]]
OURS = ("penstock", "penstock-native", "penstock-tensorstore")
_PRICED = 64
"""Batches whose reads are counted beforehand."""


class LoaderScenario:
    """A loader and the batches that it is to deliver."""

    device = "cpu"

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._case = case
        self._source = Source(case)
        self._packed, self._order = self._source.packed, self._source.order
        self._timed_from = 1 + case["warmup"]
        self.work: Work = {
            "samples": case["batch"],
            "bytes": case["batch"] * self._packed.sample_bytes,
        }
        try:  # made in vain: what is to be imported is imported, and what is missing is said
            contender = self._make()
            self._ahead = ahead_of(contender)
            contender.close()
        except BaseException:
            self._source.close()
            raise
        self._further = max(0, self._ahead - case["warmup"]) if case["warmup"] else 0
        if case["cache"] == "cold":  # what came once is in memory
            spare = self._order.num_batches - self._timed_from - case["batches"]
            self._further = min(self._further, max(0, spare))
        self._source.further = self._further + self._ahead
        self.facts: dict[str, Any] = {**self._source.facts, **self._source.prepare()}
        self.facts["ahead"] = self._ahead
        self._steps = 0
        self._stored: int | None = None
        """What had been read when the samples began, or one batch before."""
        self._lead = 0
        """Batches from then on that are no samples."""
        self._still = contextlib.ExitStack()
        self._contender: loaders.Contender | None = None
        self._batches: Iterator[Batch] = iter(())
        self._batch: Batch | None = None
        self._before: Counters | None = None
        self._taken = 0
        """Batches, those of the steps and those that `_settle` takes."""

    def step(self, phase: Phase) -> Work:
        if self._steps and self._steps == self._timed_from - 1:
            self._settle()
        self._batch = self._next()
        self._steps += 1
        if self._before is None:
            self._before = self._source.counters()
            self._stored = self._before.stored
        rows = {len(array) for array in self._batch.values()}
        if rows != {self._case["batch"]}:
            raise WrongResult(f"a batch has {sorted(rows)} rows, not {self._case['batch']}")
        return self.work

    def verify(self) -> None:
        """Deliver the batches once more and check every row of them."""
        assert self._before is not None
        self._count(self._source.counters() - self._before, self._taken - 1)
        self._close()
        # A further epoch of the same seed would be the same batches again.
        number = min(self._taken, self._order.num_batches)
        delivered = (int(i) for n in range(number) for i in self._order.items(0, n))
        audit = Audit(with_checks(self._packed, delivered))
        self._contender = self._make()
        self._batches = self._contender.batches()
        for index in range(number):
            audit.batch(self._order.items(0, index), next(self._batches, {}))
        delivery = audit.result()
        self.facts |= asdict(delivery) | {"verified_batches": number}
        if not delivery.right:
            raise WrongResult(
                f"of {number * self._case['batch']} samples {delivery.duplicates} came twice, "
                f"{delivery.missing} did not come and {delivery.wrong} arrays were wrong",
                self.facts,
            )

    def close(self) -> None:
        self._still.close()
        self._close()
        self._source.close()

    def _make(self) -> loaders.Contender:
        case = self._case
        knobs: dict[str, Any] = {}
        if case["loader"] in OURS:
            knobs = {"fetch": self._source.requests, "patch": self._source.patch}
        try:
            order = Endless(**asdict(self._order))
            contender = loaders.make(
                case["loader"], self._source.place, order, threads=case["threads"], **knobs
            )
            if case["loader"] in OURS:
                contender.loader.order = order  # type: ignore[attr-defined]
            return contender
        except UsageError as error:  # the port of the slow server says nothing to anybody
            raise UsageError(str(error).replace(self._source.url, case["data"])) from error

    def _settle(self) -> None:
        """Before the last wait of the warm-up: use up what was read ahead, and begin to count."""
        # Whoever measures does this between warm-up and samples. Then it has nothing left to do,
        # and nobody reads ahead meanwhile.
        gc.collect()
        self._still.enter_context(less_collecting())
        for _ in range(self._further):
            self._next()
        self._stored, self._lead = self._source.counters().stored, 1

    def _next(self) -> Batch:
        if self._contender is None:
            self._contender = self._make()
            self._batches = self._contender.batches()
        batch = next(self._batches, None)
        if batch is None:
            raise WrongResult(f"{self._case['loader']} ended after {self._taken} batches")
        self._taken += 1
        return batch

    def _count(self, spent: Counters, batches: int) -> None:
        self.facts["fresh"] = self._share_read()
        if not batches:
            return
        delivered = batches * self.work["bytes"]
        self.facts["cpu_s_per_gb"] = spent.cpu_s / (delivered / 1e9)
        if spent.stored is None:
            return
        stored = spent.stored / batches
        share = self._case["batch"] / self._packed.num_samples
        self.facts["stored_bytes"] = stored
        self.facts["read_amplification"] = stored / (self._source.stored_bytes * share)

    def _share_read(self) -> float | None:
        """Of the bytes of the samples, how much was read while they were waited for.

        Where nobody counts, 0 if all of them may have been read before; else None.
        """
        batches = self._steps - self._timed_from
        now = self._source.counters().stored
        if now is None or self._stored is None:
            return 0.0 if self._ahead >= batches else None
        ahead = self._source.batches()
        if self._source.patch is not None:
            needs = [sum(p.stat().st_size for p in self._source.files_of(b)) for b in ahead]
            return float((now - self._stored) / (batches + self._lead) / np.mean(needs))
        # The smallest chunks, for nobody needs less than those of one array.
        size = min(array.chunks[0] for array in self._packed.arrays.values())
        chunks = [len(np.unique(samples // size)) for samples in ahead]
        samples = max(self._case["batch"], size * sum(chunks) / len(chunks))
        need = self._source.stored_bytes * samples / self._packed.num_samples
        return float((now - self._stored) / (batches + self._lead) / need)

    def _close(self) -> None:
        self._batch, self._batches = None, iter(())
        if self._contender is not None:
            self._contender.close()
            self._contender = None


def ahead_of(contender: Any) -> int:
    """Batches that a contender reads, at most, before they are asked for."""
    ours = getattr(contender, "loader", None)
    return int(ours.config.queue if ours is not None else getattr(contender, "ahead", 0))


def check(case: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case with the hash of its data set; raises `UsageError` for what makes no sense."""
    with contextlib.closing(Source(case)) as source:
        facts = {**source.facts, "price": str(price_of(source))}
        return {**case, "dataset": source.facts["dataset"]}, facts


def price_of(source: Source) -> Price:
    """What the order of a case costs and buys."""
    arrays = source.packed.arrays.items()
    fields = [
        cut_of(array) or Field(name, array.shape, array.chunks, array.dtype)
        for name, array in arrays
    ]
    order = source.order
    return price(order, need_of(fields, order, first=0), num_batches=_PRICED)


# --- the data -----------------------------------------------------------------------------------


class Source:
    """A data set where a case wants it: a folder, the same behind a slow server, a bucket."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._case, self._closing = case, contextlib.ExitStack()
        self.threads = int(case["threads"])
        self.patch = case.get("patch")
        self.further = 0
        """Batches that may be read and are neither warm-up nor samples."""
        self.remote = "://" in case["data"] or bool(case["latency_ms"])
        self.requests = case["threads"] if self.remote else 0
        """Requests that may be under way at once, where it is they that hide latency."""
        if case["endpoint"]:
            os.environ["AWS_ENDPOINT_URL"] = case["endpoint"]
        self._server: Loopback | None = None
        with contextlib.ExitStack() as closing:
            self.packed = self._open(closing)
            self.place: Any = case["data"]
            if case["latency_ms"]:
                self._server = closing.enter_context(
                    Loopback(self.packed.root, case["latency_ms"] / 1e3)
                )
                self.place = {
                    name: loaders.Location(
                        f"{self._server.url}/{array.path.relative_to(self.packed.root)}", array.axes
                    )
                    for name, array in self.packed.arrays.items()
                }
            self.url = self._server.url if self._server else case["data"]
            self.order = order_of(case, self.packed)
            self._closing = closing.pop_all()
        document = self.packed.document
        self.stored_bytes = int(document["stored_bytes"])
        self.facts: dict[str, Any] = {
            "dataset": fingerprint(self.packed),
            "samples": self.packed.num_samples,
            "sample_bytes": self.packed.sample_bytes,
            "compression_ratio": document["compression_ratio"],
            "preset": document.get("preset"),
            "arrays": {
                name: {"shape": array.shape, "chunks": array.chunks, "shards": array.shards}
                for name, array in self.packed.arrays.items()
            },
        }

    def _open(self, closing: contextlib.ExitStack) -> Packed:
        if "://" not in self._case["data"]:
            return open_any(self._case["data"], patch=self.patch)
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        _fetch_documents(self._case["data"], folder)
        return open_dataset(folder, f"DATA {self._case['data']} as")

    def batches(self) -> list[NDArray[np.int64]]:
        """The samples of each batch that is read, in order."""
        asked = self._case["batches"] + 1 + self._case["warmup"] + self.further
        number = min(asked, self.order.num_batches)
        return [self.order.items(0, index) for index in range(number)]

    def rows(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The sample and the patch of each, as an engine is asked for them."""
        samples, patches = self.order.split(items)
        return samples, None if self.patch is None else patches

    def files(self) -> list[Path]:
        """What the batches are stored in, in the order of the plan; empty where it is far away."""
        if "://" in self._case["data"]:
            return []
        of = [files for samples in self.batches() for files in self.files_of(samples)]
        return list(dict.fromkeys(of))

    def files_of(self, samples: NDArray[np.int64]) -> list[Path]:
        arrays = self.packed.arrays.values()
        return [path for array in arrays for path in chunk_files(array, samples)]

    def prepare(self) -> dict[str, Any]:
        """Bring the page cache into the state of the case; what it was in then."""
        files = self.files()
        if not files:
            return {"resident": None}
        if self._case["cache"] == "cold":
            pagecache.drop(files)
        elif self._case["cache"] == "warm":
            pagecache.warm(files)
        found: dict[str, Any] = {"resident": pagecache.residency(files)}
        if self._case["cache"] == "cold":
            found["again"] = self.read_again()
        return found

    def read_again(self) -> float:
        """Of what the batches after the first read, the share that one before them has read: it
        comes from memory, however cold the cache was."""
        if self.patch is not None:
            known: set[Path] = set()
            shared = every = 0
            for number, samples in enumerate(self.batches()):
                own = set(self.files_of(samples))
                if number:
                    shared, every = shared + len(own & known), every + len(own)
                known |= own
            return shared / every if every else 0.0
        seen: set[tuple[str, int]] = set()
        again = total = 0
        for number, samples in enumerate(self.batches()):
            for name, array in self.packed.arrays.items():
                chunks = {(name, chunk) for chunk in (samples // array.chunks[0]).tolist()}
                if number:
                    size = array.chunks[0] * array.sample_bytes
                    again, total = again + len(chunks & seen) * size, total + len(chunks) * size
                seen |= chunks
        return again / total if total else 0.0

    def counters(self) -> Counters:
        """What this process and those below it have used so far; the slow server left out."""
        served = self._server.served()["bytes"] if self._server else None
        counted = Counters.of_tree(self._server.pid if self._server else None)
        if self.remote:
            return Counters(counted.cpu_s, served)
        return counted

    def close(self) -> None:
        self._closing.close()


def order_of(case: Mapping[str, Any], packed: Packed) -> Order:
    """The order of a case, the same for every loader."""
    if case["batch"] > packed.num_samples:
        raise UsageError(
            f"--batch-sizes {case['batch']} is more than the {packed.num_samples} samples of "
            f"{case['data']}"
        )
    shapes = [cut_of(array) or array for array in packed.arrays.values()]
    cuts = [cut.patches_per_sample for array in packed.arrays.values() if (cut := cut_of(array))]
    return Order(
        packed.num_samples // (cuts or [1])[0],
        case["batch"],
        seed=case["seed"],
        shuffle=case["shuffle"],
        window=case["window"] or 1,
        chunk=max(each.chunks[0] for each in shapes),
        patches_per_sample=(cuts or [1])[0],
        drop_last=True,
    )


def fingerprint(packed: Packed) -> str:
    """A hash of what is in a data set: its description and the checksums of its samples."""
    found = hashlib.sha256(json.dumps(packed.document, sort_keys=True).encode())
    for name in sorted(packed.checks):
        found.update(packed.checks[name].tobytes())
    return found.hexdigest()[:16]


def chunk_files(array: PackedArray, samples: NDArray[np.int64]) -> list[Path]:
    """The files that hold some samples of an array, each once: its chunks, or its shards."""
    grid = array.shards or array.chunks
    indices: Iterable[tuple[int, ...]]
    if cut_of(array) is None:
        along = [range(math.ceil(n / c)) for n, c in zip(array.shape[1:], grid[1:], strict=True)]
        first = dict.fromkeys((samples // grid[0]).tolist())
        indices = itertools.product(first, *along)
    else:
        indices = itertools.chain.from_iterable(
            itertools.product(
                *(
                    range(part.start // size, -(-part.stop // size))
                    for part, size in zip(array.box(item), grid, strict=True)
                )
            )
            for item in samples.tolist()
        )
    return [
        array.path / (array.prefix + array.separator.join(map(str, index)))
        for index in dict.fromkeys(indices)
    ]


def _fetch_documents(url: str, folder: Path) -> None:
    """Copy what describes a far data set, and its checksums, into a folder; none of its chunks."""
    from ..loaders.tensorstore import read_object
    from ..stores.tensorstore import explaining

    def fetch(key: str, strict: bool = False) -> bytes | None:
        found = read_object(url.rstrip("/"), key, strict=strict)
        if found is not None:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(found)
        return found

    document = fetch(DOCUMENT, strict=True)
    if document is None:
        raise UsageError(f"DATA {url}: no packed data set: there is no {DOCUMENT}")
    where = f"DATA {url}"
    with explaining(where):
        described = parse_document(document.decode(), where)
    try:
        paths = [str(entry["path"]) for entry in described["arrays"].values()]
        keys = [str(described["ids"]), CHECKS]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: what describes it is malformed: {error!r}") from error
    for key in keys + [f"{path}/{name}" for path in paths for name in (".zarray", "zarr.json")]:
        fetch(key)


@dataclass(frozen=True)
class Counters:
    """What a tree of processes has used."""

    cpu_s: float
    stored: int | None
    """Bytes that were asked for: of files, by the kernel's count, from memory or not; of the slow
    server, by its own."""
    _counting: ClassVar[int] = 0
    """Bytes that this process has read to count."""

    @classmethod
    def of_tree(cls, without: int | None = None) -> Counters:
        began, cpu_s = _read_here(), 0.0
        root = psutil.Process()
        tree = (root, *root.children(recursive=True))
        # To look for children is to read a line about every process of the machine.
        stored = -(cls._counting + _read_here() - began)
        for process in tree:
            if process.pid == without:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                # Those below it that have ended count with who waited for them.
                cpu_s += times.user + times.system + times.children_user + times.children_system
                if hasattr(process, "io_counters"):
                    stored += process.io_counters().read_chars
        Counters._counting += _read_here() - began
        return cls(cpu_s, max(stored, 0) + _mapped_bytes() or None)

    def __sub__(self, other: Counters) -> Counters:
        stored = None
        if self.stored is not None and other.stored is not None:
            stored = self.stored - other.stored
        return Counters(self.cpu_s - other.cpu_s, stored)


def _read_here() -> int:
    """Bytes that this thread has read, 0 where nobody counts them."""
    try:
        found = Path("/proc/thread-self/io").read_text()
    except OSError:
        return 0
    return int(found.partition("rchar:")[2].split()[0])


def _mapped_bytes() -> int:
    """Of files that this process has mapped by TensorStore, which the kernel counts as no reading:
    their lengths, as often as they were mapped."""
    if (tensorstore := sys.modules.get("tensorstore")) is None:
        return 0
    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/file/mmap_bytes")
    return sum(int(value["value"]) for metric in found for value in metric["values"])
