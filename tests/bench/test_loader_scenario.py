"""Scenarios ``loader`` and ``ladder`` on real data."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.bench.scenarios import WrongResult
from penstock.bench.scenarios import loader_scenario as measured_by
from penstock.bench.scenarios.loader_scenario import LoaderScenario, check, rung
from penstock.bench.scenarios.sources import Counters
from penstock.data.packed.format import checksum
from penstock.instruments import page_cache as pagecache
from penstock.loading.any_array import open_dataset_or_array, with_checks
from penstock.loading.contenders import by_name

from ..slow_server import Loopback
from .kit_loader import SAMPLE_BYTES, case, measured, own_array, weather


@pytest.mark.slow
@pytest.mark.parametrize("name", ["penstock", "zarr"])
def test_a_launch_waits_for_batches_and_checks_every_row(data: Path, name: str) -> None:
    result = measured(LoaderScenario(case(data, loader=name)))
    facts = result["facts"]
    assert len(result["samples_s"]["step"]) == 3
    assert result["warmup"]["first_s"] > 0
    assert (facts["duplicates"], facts["missing"], facts["wrong"]) == (0, 0, 0)
    # The first, one to warm up and 3; and of ours one more, for it reads 2 ahead.
    assert facts["verified_batches"] == 5 + (facts["ahead"] == 2)
    assert result["work"] == {"samples": 2, "bytes": 2 * facts["sample_bytes"]}
    assert facts["sample_bytes"] == SAMPLE_BYTES
    assert facts["resident"] is None or facts["resident"] > 0.99


def test_batches_begin_anew_where_there_are_too_few(data: Path) -> None:
    """16 samples are 4 batches of 4; the first, two to warm up and 5 more come a second time."""
    result = measured(LoaderScenario(case(data, batch=4, batches=5)), 5)
    assert len(result["samples_s"]["step"]) == 5
    assert result["facts"]["verified_batches"] == 4


class _Damaging:
    """A loader whose batches are those of another, but for what was done to them."""

    def __init__(self, whole: Any, damage: Any) -> None:
        self._whole, self._damage = whole, damage
        self.loader = whole.loader

    def batches(self) -> Iterator[Mapping[str, Any]]:
        for number, batch in enumerate(self._whole.batches()):
            yield self._damage({n: a.copy() for n, a in batch.items()}, number)

    def close(self) -> None:
        self._whole.close()


def _one_bit(batch: dict[str, Any], number: int) -> dict[str, Any]:
    if number == 1:
        batch["targets"].view(np.uint32).flat[-1] ^= 1
    return batch


def _twice(batch: dict[str, Any], number: int) -> dict[str, Any]:
    for array in batch.values():
        array[1] = array[0]
    return batch


def _short(batch: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: array[:1] for name, array in batch.items()}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_one_bit, "0 came twice, 1 did not come and 1 array came wrong"),
        (_twice, "came twice"),
        (_short, r"a batch has \[1\] rows, not 2"),
    ],
)
def test_what_a_loader_got_wrong_is_told(data: Path, monkeypatch, damage: Any, said: str) -> None:
    make = by_name.make_contender
    monkeypatch.setattr(
        measured_by, "make_contender", lambda *args, **how: _Damaging(make(*args, **how), damage)
    )
    with pytest.raises(WrongResult, match=said):
        measured(LoaderScenario(case(data)))


@pytest.mark.slow
def test_data_far_away_is_measured_and_verified_and_has_no_rungs_of_files(data: Path) -> None:
    with Loopback(data, 0.002) as server:
        far = case(Path("data"), cache="as-is") | {"data": server.url}
        facts = measured(LoaderScenario(far))["facts"]
        assert facts["wrong"] == 0 and "stored_bytes" not in facts
        with pytest.raises(UsageError, match="not on a disk of this machine"):
            rung({**far, "rung": "L1"})


@pytest.mark.skipif(not hasattr(pagecache.os, "posix_fadvise"), reason="no posix_fadvise here")
def test_a_cold_cache_is_verified(data: Path, on_disk: Path) -> None:
    shutil.copytree(data, on_disk / "data")
    result = measured(LoaderScenario(case(on_disk / "data", cache="cold")))
    resident = result["facts"]["resident"]
    assert resident is None or resident < 0.05


def test_a_case_is_tied_to_what_is_in_the_data(data: Path, tmp_path) -> None:
    checked, facts = check(case(data))
    assert checked["dataset"] == facts["dataset"] and len(checked["dataset"]) == 16
    assert facts["decoded_per_used"] == (26 + 13) / (15 + 13), "chunks of 13 channels"
    other = weather(tmp_path / "other", seed=7)
    assert check(case(other))[0]["dataset"] != checked["dataset"]
    with pytest.raises(UsageError, match="--batch-sizes 17 is more than the 16 samples"):
        check(case(data, batch=17))


@pytest.mark.parametrize("name", ["L1", "L2", "L3", "L4"])
def test_every_rung_delivers_the_same_bytes(data: Path, name: str) -> None:
    before = sorted(data.rglob("*"))
    knobs = {k: v for k, v in case(data).items() if k != "loader"}
    scenario = rung({**knobs, "rung": name})
    result = measured(scenario)
    assert result["work"] == {"samples": 2, "bytes": 2 * SAMPLE_BYTES}
    assert sorted(data.rglob("*")) == before, "its files are gone"
    if name in ("L3", "L4"):
        assert result["facts"]["wrong"] == result["facts"]["missing"] == 0


@pytest.fixture(scope="module")
def planes(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("planes") / "v.zarr"
    own_array(path, "zarr", (16, 32, 32), chunks=[4, 32, 32])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "shuffle", "again"), [(4, "none", 0.0), (2, "none", 0.6), (4, "sample", 1.0)]
)
def test_a_cold_cache_is_warm_where_batches_share_chunks(batch, shuffle, again, planes) -> None:
    cold = case(planes, cache="cold", batch=batch, shuffle=shuffle, batches=1)
    facts = measured(LoaderScenario(cold), 1)["facts"]
    assert facts["again"] == pytest.approx(again, abs=0.3 if shuffle == "sample" else 1e-9)
    if again < 1:
        assert "again" not in measured(LoaderScenario({**cold, "cache": "warm"}), 1)["facts"]


def test_to_count_is_not_counted() -> None:
    """Who looks for children reads of every process of the machine."""
    before = Counters.of_tree()
    if before.stored is None:
        pytest.skip("nobody counts reads here")
    spent = Counters.of_tree() - before
    assert spent.stored is not None and spent.stored < 1000


def test_a_cold_cache_with_too_few_batches_to_warm_up_is_refused(data: Path) -> None:
    with pytest.raises(UsageError, match=r"reads 2 batches ahead.* lower --batches by 1"):
        LoaderScenario(case(data, cache="cold", batches=6))


@pytest.mark.slow
def test_a_chunk_that_a_library_fills_in_silence_is_wrong(data: Path, tmp_path) -> None:
    pytest.importorskip("zarr")
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    scenario = LoaderScenario(case(copy, loader="zarr"))
    (path, *_) = scenario._data.files_of(scenario._order.items(0, 0))
    path.unlink()
    with pytest.raises(WrongResult, match="1 did not come and 1 array came wrong"):
        measured(scenario)


def test_any_array_is_measured_and_checked(tmp_path) -> None:
    """Not only packed sets: what it lacks, checksums and sizes, is read from the array."""
    path = tmp_path / "own"
    values = own_array(path, "ome", (16, 6, 8))
    facts = measured(LoaderScenario(case(path, batch=4, batches=2)), 2)["facts"]
    assert facts["wrong"] == 0 and facts["verified_batches"] >= 4
    assert facts["stored_bytes"] > 0
    checked = with_checks(open_dataset_or_array(path), range(16))
    assert checked.checks["data"].tolist() == [checksum(sample) for sample in values]


def test_an_n5_whose_extents_are_no_numbers_is_refused(tmp_path) -> None:
    about = {"dimensions": ["a", 5], "blockSize": [4, 5], "dataType": "uint8"}
    (tmp_path / "attributes.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match="holds no array"):
        open_dataset_or_array(tmp_path)
