"""Pinned memory and its copies to devices: what a CPU can tell of it.

Memory is pageable here, and CUDA is played by what notes whom the ring waits for.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.loading.loader import Loader
from penstock.loading.ring import Ring

from .kit import arrays

torch = pytest.importorskip("torch")
pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


class Cuda:
    """Three devices; torch holds memory of two of them."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        self.events: list[Event] = []
        self.capturing = False

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 2

    def device_count(self) -> int:
        return 3

    def memory_reserved(self, device: int) -> int:
        return 2**20 * (device == 0)

    def synchronize(self, device: int) -> None:
        self.waited.append(device)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Event(self, blocking: bool) -> "Event":
        assert blocking, "else a thread that waits for it keeps a core busy"
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.recorded = cuda, False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.cuda.waited.append(self)


@pytest.fixture
def cuda(monkeypatch) -> Iterator[Cuda]:
    played = Cuda()
    monkeypatch.setattr("penstock.loading.ring._cuda", lambda: played)
    monkeypatch.setattr(Ring, "_pinned", lambda self: torch.empty(self.nbytes, dtype=torch.uint8))
    yield played
    gc.collect(1)  # what is lent comes back while CUDA is played; all of it is young


def lent_by(ring: Ring) -> NDArray[np.uint8]:
    return ring.lend()


@pytest.mark.slow
def test_a_buffer_of_arrays_waits_for_each_device_that_may_copy_from_it(cuda: Cuda) -> None:
    ring = Ring(64, 1, None, pin=True)
    ring.begin()
    lent = lent_by(ring)
    view = torch.from_numpy(lent[8:])
    del lent
    assert ring.lend() is None, "a view is left"
    assert cuda.waited == []
    del view
    again = lent_by(ring)
    assert cuda.waited == [0, 2], "device 1 holds nothing of torch's"
    assert ring.made == 1 and again.nbytes == 64


def test_memory_lent_as_tensors_waits_for_no_device(cuda: Cuda) -> None:
    ring = Ring(64, 2, None, pin=True)
    ring.begin(as_tensors=True)
    memory = lent_by(ring).base
    assert isinstance(memory, torch.Tensor)
    part, other = memory[8:16].view(torch.int32), lent_by(ring)
    del memory
    assert ring.lend() is None, "of the first a tensor is left"
    assert cuda.events == []
    del part
    assert len(cuda.events) == 1 and cuda.waited == []
    third = lent_by(ring)
    assert cuda.waited == cuda.events
    assert ring.made == 2
    cuda.capturing = True  # no event may be recorded now
    del other, third
    lent_by(ring)
    assert len(cuda.events) == 1 == len(cuda.waited)


def test_a_ring_goes_from_arrays_to_tensors_and_back(cuda: Cuda) -> None:
    ring = Ring(64, 1, None, pin=True)
    for as_tensors in (False, True, True, False, False):
        ring.begin(as_tensors=as_tensors)
        for _ in range(3):
            buffer = lent_by(ring)
            assert isinstance(buffer.base, torch.Tensor) == as_tensors
            assert ring.lend() is None
            del buffer
        assert ring.made == 1
    ring.clear()
    assert ring.made == 0


def test_batches_of_tensors_are_of_torchs_storage(data: dict[str, Path], cuda: Cuda) -> None:
    whole = arrays(data)

    def thins(batch: Any) -> None:
        batch["inputs"] = batch["inputs"][..., ::2]

    with Loader(data, batch_size=3, workers=2, pin=True, transform=thins) as loader:
        for place, batch in enumerate(loader.as_torch()):
            rows = slice(place * 3, place * 3 + 3)
            storages = {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
            assert len(storages) == 1
            assert {len(t.untyped_storage()) for t in batch.values()} == {loader.batch_bytes}
            for name, tensor in batch.items():
                expected = whole[name][rows]
                expected = expected[..., ::2] if name == "inputs" else expected
                assert (tensor.numpy() == expected).all()
        del batch, tensor
    assert place == 3
    assert cuda.waited and all(isinstance(each, Event) for each in cuda.waited)
