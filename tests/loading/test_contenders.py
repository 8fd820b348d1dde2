"""Other libraries' loaders: the samples that numpy has, in the order given, and no leftovers."""

import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.base.errors import MissingDependency, StageError, UsageError
from penstock.data import Audit, Packed
from penstock.loading.contenders import by_name
from penstock.loading.order import Order

from ..parameters import mainly
from .kit import SAMPLES, TRUTH, pack

LIBRARY = {
    "zarr": "zarr",
    "tensorstore-loop": "tensorstore",
    "tensorstore-read": "tensorstore",
    "dask-sample": "dask",
    "dask-stacked": "dask",
    "torch": "torch",
}
"""What each cannot do without."""
IN_PROCESS = [name for name in LIBRARY if name != "torch"]
"""Torch reads by zarr, in processes that take seconds to start. Dask and Xarray take a second to
load, so that most tests of them are slow."""


def make(name: str, data: Any, order: Order, threads: int = 2) -> Any:
    return by_name.make_contender(name, data, order, threads=threads)


def needs(name: str) -> None:
    for library in ("zarr", "xarray", LIBRARY[name]):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Packed:
    return pack(tmp_path_factory.mktemp("packed") / "data")


def check_epoch(batches: Iterator[dict[str, np.ndarray]], order: Order, packed: Packed) -> None:
    audit, count = Audit(packed), 0
    for number, batch in enumerate(batches):
        samples = order.items(0, number)
        assert set(batch) == set(TRUTH)
        for name, expected in TRUTH.items():
            assert batch[name].dtype == np.float32
            np.testing.assert_array_equal(batch[name], expected[samples])
        audit.batch(samples, batch)
        count += 1
    assert count == order.num_batches
    assert audit.result().right


def test_every_contender_of_another_library_is_tested_here() -> None:
    others = {name for name in by_name.CONTENDERS if not name.startswith("penstock")}
    assert others == set(LIBRARY)


RANK = "second of two ranks"
ORDERS = {
    "stored": Order(SAMPLES, 3, drop_last=True),
    "shuffled": Order(SAMPLES, 3, seed=5, shuffle="global"),  # its last batch is short
    RANK: Order(SAMPLES, 2, seed=1, shuffle="sample", rank=1, world_size=2),
}


@pytest.mark.parametrize(
    ("name", "kind"), mainly([*product(IN_PROCESS, ["shuffled"]), ("zarr", RANK)], 0, 1, -1)
)
def test_batches_are_those_of_numpy_in_their_order(name: str, kind: str, packed: Packed) -> None:
    needs(name)
    loader = make(name, packed.root, ORDERS[kind])
    for _ in range(2):
        check_epoch(loader.batches(), ORDERS[kind], packed)
    loader.close()
    loader.close()


@pytest.mark.slow
def test_torch_workers_deliver_two_epochs_and_end_with_the_loader(packed: Packed) -> None:
    needs("torch")
    before = set(psutil.Process().children(recursive=True))
    loader = make("torch", packed.root, ORDERS["shuffled"], threads=2)
    for _ in range(2):
        check_epoch(loader.batches(), ORDERS["shuffled"], packed)
    halfway = loader.batches()
    next(halfway)
    workers = set(psutil.Process().children(recursive=True)) - before
    assert sum("spawn_main" in " ".join(worker.cmdline()) for worker in workers) == 2
    loader.close()
    loader.close()
    workers = {w for w in workers if "resource_tracker" not in " ".join(_command(w))}
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_torch_without_workers_reads_here(packed: Packed) -> None:
    needs("torch")
    loader = make("torch", packed.root, ORDERS["shuffled"], threads=0)
    check_epoch(loader.batches(), ORDERS["shuffled"], packed)
    loader.close()


def test_loaders_read_shards(tmp_path) -> None:
    packed = pack(tmp_path / "data", shards=4)
    for name in ("zarr", "tensorstore-loop"):
        needs(name)
        loader = make(name, packed.root, ORDERS["stored"])
        check_epoch(loader.batches(), ORDERS["stored"], packed)
        loader.close()


@pytest.mark.parametrize("name", mainly([*LIBRARY], 0, 1, 3))
def test_a_missing_library_is_named_with_its_line(name: str, packed: Packed, monkeypatch) -> None:
    needs(name)
    library = LIBRARY[name]
    for module in [m for m in sys.modules if m.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=rf"{library} is not .*pip install 'penstock-dl\["):
        make(name, packed.root, ORDERS["stored"])


@pytest.mark.parametrize("name", mainly([*LIBRARY], 0, 1, -1))
def test_what_cannot_be_read_is_refused(name: str, packed: Packed, tmp_path) -> None:
    needs(name)
    with pytest.raises(UsageError, match="whole samples, not 4 patches"):
        make(name, packed.root, Order(SAMPLES, 1, patches_per_sample=4))
    with pytest.raises(UsageError, match="no array at"):
        make(name, {"inputs": str(tmp_path / "none")}, ORDERS["stored"])


@pytest.mark.parametrize("name", mainly(["zarr", "torch", "dask-sample", "dask-stacked"], 0, 1))
def test_an_error_names_the_array(name: str, packed: Packed, tmp_path) -> None:
    """TensorStore names the chunk by itself."""
    needs(name)
    root = shutil.copytree(packed.root, tmp_path / "data")
    damaged = root / packed.arrays["targets"].path.name
    for chunk in damaged.iterdir():
        if not chunk.name.startswith("."):
            chunk.write_bytes(chunk.read_bytes()[:20])
    loader = make(name, root, ORDERS["stored"], threads=0 if name == "torch" else 2)
    with pytest.raises(StageError, match=f"read failed at .*{damaged}: "):
        next(loader.batches())
    loader.close()
