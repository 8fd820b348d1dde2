"""A loader as a data set of torch: the same memory, and no worker processes."""

from pathlib import Path

import pytest

from penstock.base.errors import UsageError
from penstock.loading.loader import Loader

from .kit import arrays, distinct

pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


def test_torch_sees_the_same_memory(data: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    whole = arrays(data)
    with Loader(data, batch_size=3, workers=2) as loader:
        dataset = loader.as_torch()
        feeder = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=0)
        assert len(feeder) == 4
        for place, batch in enumerate(feeder):
            rows = slice(place * 3, place * 3 + 3)
            for name in data:
                assert torch.equal(batch[name], torch.from_numpy(whole[name][rows]))
        assert len({batch["inputs"].data_ptr() for batch in dataset}) <= 4
        assert dataset.state_dict()["epoch"] == 2
        workers = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        with pytest.raises(UsageError, match="num_workers=0"):
            next(iter(workers))


def test_torch_workers_by_fork_are_refused(data: dict[str, Path], monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    dataset = Loader(data, batch_size=3).as_torch()
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    with pytest.raises(UsageError, match="use num_workers=0 and set the loader's workers"):
        iter(dataset)


def test_bfloat16_is_handed_to_torch(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "a.zarr")}}
    array = ts.open(spec, create=True, dtype=ts.bfloat16, shape=(4, 3)).result()
    array.write(distinct((4, 3)).astype(ts.bfloat16.numpy_dtype)).result()
    with Loader(tmp_path / "a.zarr", batch_size=4) as loader:
        (batch,) = loader.as_torch()
    assert torch.equal(batch["data"], torch.arange(1, 13, dtype=torch.bfloat16).reshape(4, 3))
