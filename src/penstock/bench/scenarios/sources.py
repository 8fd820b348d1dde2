"""The data that the scenarios of loaders read, and counters of bytes and processor time."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
from numpy.typing import NDArray

from ...base import UsageError, plural, well_formed
from ...data import (
    CHECKS,
    DOCUMENT,
    Audit,
    Packed,
    PackedArray,
    explained_errors,
    open_dataset,
    parse_document,
    read_key,
)
from ...instruments import drop_pages, process_tree, residency, warm_pages
from ...loading import Order, cut_of, open_dataset_or_array, with_checks
from . import WrongResult


class CaseData:
    """The data set of a case: a folder of this machine, or a URL."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._case, self._closing = case, contextlib.ExitStack()
        self.threads = int(case["threads"])
        self.patch = case.get("patch")
        self.further = 0
        """The number of batches that may be read and are neither warm-up nor samples."""
        self.place: str = case["data"]
        self.remote = "://" in self.place
        self.requests = case["threads"] if self.remote else 0
        """The number of concurrent requests for remote data, which hide latency."""
        with contextlib.ExitStack() as closing:
            self.packed = self._open(closing)
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
        if not self.remote:
            return open_dataset_or_array(self.place, patch=self.patch)
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        _fetch_documents(self.place, folder)
        return open_dataset(folder, f"DATA {self.place} as")

    def batches(self) -> list[NDArray[np.int64]]:
        """The samples of each batch that is read, in order."""
        asked = self._case["batches"] + 1 + self._case["warmup"] + self.further
        return [self.order.items(0, i) for i in range(min(asked, self.order.num_batches))]

    def rows(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The sample and the patch of each item, as arguments of an engine; patches are None if
        samples are whole."""
        samples, patches = self.order.split(items)
        return samples, None if self.patch is None else patches

    def files(self) -> list[Path]:
        """The files that hold the batches, in the order of the plan; empty for remote data."""
        if self.remote:
            return []
        of = [files for samples in self.batches() for files in self.files_of(samples)]
        return list(dict.fromkeys(of))

    def files_of(self, samples: NDArray[np.int64]) -> list[Path]:
        arrays = self.packed.arrays.values()
        return [path for array in arrays for path in chunk_files(array, samples)]

    def prepare(self) -> dict[str, Any]:
        """Bring the page cache into the state of the case. Returns ``resident``, the fraction that
        it holds, and for a cold cache ``again``, see `read_again`."""
        files = self.files()
        if not files:
            return {"resident": None}
        if self._case["cache"] == "cold":
            drop_pages(files)
        elif self._case["cache"] == "warm":
            warm_pages(files)
        state: dict[str, Any] = {"resident": residency(files)}
        if self._case["cache"] == "cold":
            state["again"] = self.read_again()
        return state

    def read_again(self) -> float:
        """The fraction of the reads of all batches but the first that an earlier batch has done.
        These come from memory, even if the cache was cold.
        """
        read = [self._pieces(samples) for samples in self.batches()]
        seen: set[Hashable] = set(*read[:1])
        again = total = 0
        for pieces in read[1:]:
            again += sum(size for piece, size in pieces.items() if piece in seen)
            total += sum(pieces.values())
            seen |= pieces.keys()
        return again / total if total else 0.0

    def _pieces(self, samples: NDArray[np.int64]) -> dict[Hashable, int]:
        """The pieces that a batch reads, with their sizes: chunks along the samples, in bytes; or
        files, which all have size 1, if samples are cut into patches.
        """
        if self.patch is not None:
            return dict.fromkeys(self.files_of(samples), 1)
        return {
            (name, chunk): array.chunks[0] * array.sample_bytes
            for name, array in self.packed.arrays.items()
            for chunk in (samples // array.chunks[0]).tolist()
        }

    def audit(
        self,
        batches: Sequence[NDArray[np.int64]],
        delivered: Iterable[Mapping[str, NDArray[Any]]],
        facts: dict[str, Any],
    ) -> None:
        """Check every row of the batches that a loader delivered, and add the counts to ``facts``.

        Raises `WrongResult` if a sample came twice, did not come or was wrong.
        """
        samples = [int(sample) for batch in batches for sample in batch]
        audit = Audit(with_checks(self.packed, samples))
        for batch, arrays in zip(batches, delivered, strict=True):
            audit.batch(batch, arrays)
        counts = audit.result()
        facts |= asdict(counts) | {"verified_batches": len(batches)}
        if not counts.right:
            raise WrongResult(
                f"of {plural(len(samples), 'sample')} {counts.duplicates} came twice, "
                f"{counts.missing} did not come and {plural(counts.wrong, 'array')} came wrong",
                facts,
            )

    def counters(self) -> Counters:
        """The use of this process and its children so far."""
        counted = Counters.of_tree()
        return Counters(counted.cpu_s, None) if self.remote else counted

    def close(self) -> None:
        self._closing.close()


def order_of(case: Mapping[str, Any], packed: Packed) -> Order:
    """The order of a case, the same for every loader."""
    if case["batch"] > packed.num_samples:
        raise UsageError(
            f"--batch-sizes {case['batch']} is more than the "
            f"{plural(packed.num_samples, 'sample')} of {case['data']}"
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
    """A hash of a data set: its description and the checksums of its samples."""
    digest = hashlib.sha256(json.dumps(packed.document, sort_keys=True).encode())
    for name in sorted(packed.checks):
        digest.update(packed.checks[name].tobytes())
    return digest.hexdigest()[:16]


def chunk_files(array: PackedArray, samples: NDArray[np.int64]) -> list[Path]:
    """The files of an array that hold some samples, each once: its chunks, or its shards."""
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
    """Copy the description of a remote data set, and its checksums, into a folder; no chunks."""

    def fetch(key: str, strict: bool = False) -> bytes | None:
        content = read_key(url.rstrip("/"), key, strict=strict)
        if content is not None:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(content)
        return content

    document = fetch(DOCUMENT, strict=True)
    if document is None:
        raise UsageError(f"DATA {url}: no packed data set: there is no {DOCUMENT}")
    where = f"DATA {url}"
    with explained_errors(where):
        described = parse_document(document, where)
    with well_formed(f"{where}: what describes it is malformed"):
        paths = [str(entry["path"]) for entry in described["arrays"].values()]
        keys = [str(described["ids"]), CHECKS]
    for key in keys + [f"{path}/{name}" for path in paths for name in (".zarray", "zarr.json")]:
        fetch(key)


@dataclass(frozen=True)
class Counters:
    """The processor time and the bytes that a process tree has used."""

    cpu_s: float
    stored: int | None
    """Bytes that were requested from files, counted by the kernel (page cache included). None if
    there is no count, as of remote data."""
    _counting: ClassVar[int] = 0
    """The bytes that this process has read for the counting itself."""

    @classmethod
    def of_tree(cls) -> Counters:
        began, cpu_s = read_case_store(), 0.0
        tree = process_tree(psutil.Process())
        # Looking for children reads too, on some systems a line about every process.
        stored = -(cls._counting + read_case_store() - began)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                # Children that have ended count in the process that waited for them.
                cpu_s += times.user + times.system + times.children_user + times.children_system
                if hasattr(process, "io_counters"):
                    stored += process.io_counters().read_chars
        Counters._counting += read_case_store() - began
        return cls(cpu_s, max(stored, 0) + mapped_bytes() or None)

    def __sub__(self, other: Counters) -> Counters:
        stored = None
        if self.stored is not None and other.stored is not None:
            stored = self.stored - other.stored
        return Counters(self.cpu_s - other.cpu_s, stored)


def read_case_store() -> int:
    """Bytes that this thread has read; 0 if the system does not count them."""
    try:
        counters = Path("/proc/thread-self/io").read_text()
    except OSError:
        return 0
    return int(counters.partition("rchar:")[2].split()[0])


def mapped_bytes() -> int:
    """The bytes of files that TensorStore has mapped in this process, which the kernel does not
    count as reads: the length of each file, as often as it was mapped.
    """
    if (tensorstore := sys.modules.get("tensorstore")) is None:
        return 0
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/file/mmap_bytes")
    return sum(int(value["value"]) for metric in metrics for value in metric["values"])
