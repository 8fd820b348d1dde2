"""The caller's process is as it was after every call of the library, whatever became of it."""

import contextlib
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base import caller

VOLUME = np.arange(20 * 16 * 16, dtype="uint16").reshape(20, 16, 16)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """A number that is neither one nor what a machine comes with."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def elsewhere(ask: Callable[[], Any]) -> Any:
    """What a thread that is born now says."""
    said: list[Any] = []
    born = threading.Thread(target=lambda: said.append(ask()))
    born.start()
    born.join()
    return said[0]


@pytest.fixture(autouse=True)
def _counted(monkeypatch) -> None:
    """What is frozen is counted here, as it is by those who call. All that the tests froze takes
    80 ms to count, so freezing is noted and not done."""
    frozen = [100_000]

    def freeze() -> None:
        frozen[0] += 1000

    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.__setitem__(0, 0))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen[0])


def state() -> dict[str, Any]:
    """All that a caller may have set."""
    import torch

    backends = torch.backends
    return {
        "threads": (torch.get_num_threads(), elsewhere(torch.get_num_threads)),
        "flags": [getattr(backends.cuda.matmul, n) for n in ("allow_tf32", "fp32_precision")]
        + [getattr(backends.cudnn, n) for n in ("allow_tf32", "benchmark", "deterministic")],
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": (random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())),
        "environment": dict(os.environ),
        "frozen": gc.get_freeze_count() > 0,
        "collects": gc.isenabled(),
    }


def asking(fails: bool = False) -> Any:
    """A net that notes the threads of its own, and those of one that is born meanwhile."""
    import torch

    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.said = set[tuple[int, int]]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.device.type == "cpu":
                self.said.add((torch.get_num_threads(), elsewhere(torch.get_num_threads)))
                if fails and len(x) == 2:
                    raise RuntimeError("it is broken")
            return x

    return Asks()


@pytest.mark.usefixtures("three_threads")
def test_threads_are_those_of_the_calling_thread_alone() -> None:
    import torch

    from penstock.inference.lanes import lane

    for scope in (caller.torch_threads(1), lane.one_thread()):
        with pytest.raises(KeyError), scope:
            assert torch.get_num_threads() == 1
            assert elsewhere(torch.get_num_threads) == 3
            with caller.torch_threads(None), caller.torch_threads(2):
                assert torch.get_num_threads() == 2
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
    assert caller.torch_threads(2)(torch.get_num_threads)() == 2


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("threads", "fails"), [(2, False), (1, True), pytest.param(None, False, marks=pytest.mark.slow)]
)
def test_inference_leaves_all_as_it_was(threads: int | None, fails: bool) -> None:
    model, before, out = asking(fails), state(), np.zeros_like(VOLUME)
    knobs: dict[str, Any] = {"patch": 8, "overlap": 2, "normalize": "none", "threads": threads}
    knobs |= {"tf32": True}
    with contextlib.suppress(penstock.PenstockError):
        penstock.plan_inference(VOLUME, out, model=model, **knobs)
        assert state() == before
        penstock.run_inference(VOLUME, out, model=model, **knobs)
        assert not fails
    assert state() == before
    assert model.said == {(threads or 3, 3)}


def test_what_a_caller_froze_stays_frozen() -> None:
    held = gc.get_freeze_count()
    if not held:
        gc.freeze()
        held = gc.get_freeze_count()
    with caller.frozen_garbage():
        pass
    assert gc.get_freeze_count() >= held - 100  # less what was let go meanwhile
    try:
        gc.unfreeze()
        with pytest.raises(KeyError), caller.frozen_garbage():
            assert gc.get_freeze_count()
            raise KeyError
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()


def test_a_module_is_imported_without_the_collector_once(monkeypatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: held.append(gc.isenabled()))
    held = list[bool]()
    for loaded in ({}, {"torch": object()}):
        monkeypatch.setattr(sys, "modules", loaded)
        with pytest.raises(ImportError), caller.importing("torch"):
            assert gc.isenabled() == bool(loaded)
            raise ImportError
        assert gc.isenabled()
    assert held == [False]


def test_flags_that_only_the_newer_names_can_read_are_put_back() -> None:
    import torch

    part = torch.backends.cuda.matmul
    with caller.cuda_flags_kept():
        part.fp32_precision = "tf32"
        part.allow_tf32 = False
        assert part.fp32_precision == "ieee"
        part.fp32_precision = "tf32"
        with caller.cuda_flags_kept():
            part.allow_tf32 = False
        assert part.fp32_precision == "tf32"


@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader'")
def test_training_leaves_all_as_it_was(tmp_path) -> None:
    before = state()
    knobs: dict[str, Any] = {"epochs": 1, "max_steps": 2, "threads": 1, "device": "cpu"}
    knobs |= {"cudnn_benchmark": True, "output_dir": tmp_path / "run", "num_samples": 64}
    penstock.run_training("spiral", **knobs)
    assert state() == before
    with pytest.raises(penstock.UsageError):
        penstock.run_training("spiral", **knobs)
    assert state() == before


def caching() -> Any:
    """A net that makes what it needs in its first forward, as rotary embeddings do."""
    import torch

    class Caches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv3d(1, 1, 1)
            torch.nn.init.constant_(self.conv.weight, 3.0)  # within [0, 1] are probabilities
            self.gain: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.gain is None:
                self.gain = torch.full((1,), 2.0, device=x.device)
            return self.conv(x) * self.gain

    return Caches()


@pytest.mark.parametrize("call", ["plan_inference", "run_inference"])
def test_a_net_can_be_trained_after_it_was_used(call: str, tmp_path) -> None:
    import torch

    net = caching()
    net.conv.eval()  # frozen by the caller
    getattr(penstock, call)(
        VOLUME, tmp_path / "out.zarr", model=net, devices="cpu", patch=8, overlap=0
    )
    assert [part.training for part in net.modules()] == [True, False]
    net(torch.ones(1, 1, 2, 2, 2)).sum().backward()
