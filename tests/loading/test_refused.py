"""What cannot be read is said before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UsageError
from penstock.loading import Loader, PatchGrid

from .kit import distinct, served, threads_of_loaders, write

pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


def test_what_cannot_be_read_is_said_before_all_starts(data: dict[str, Path], tmp_path) -> None:
    short = write(tmp_path / "short.zarr", distinct((11, 4, 7)), (1, 4, 5))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "none", {}, "there is no such folder"),
        (tmp_path, {}, "none of .zarray"),
        ({}, {}, "no arrays"),
        (data, {"offsets": {"inptus": (0,)}}, "offsets names inptus; the arrays are inputs"),
        (data, {"batch_size": 0}, "^`batch_size` 0: "),
        (data, {"engine": "warp"}, "^`engine` 'warp': "),
        (
            data,
            {"patch": {"inputs": PatchGrid((2,))}},
            "numbers of patches of the arrays differ",
        ),
        (
            data,
            {"patch": {"inputs": (2, 2), "targets": [2]}},
            "patches of the arrays differ: inputs ",
        ),
        (
            {**data, "targets": short},
            {},
            "the numbers of samples of the arrays differ: inputs 12, targets 11",
        ),
        (data, {"offsets": 0}, "offsets 0 is not a list of whole numbers, nor one for each array"),
        (data, {"channels": {"inputs": 3}}, r"channels \{'inputs': 3\} is not a list of whole num"),
        (data, {"channels": [1.5]}, r"channels \[1\.5\] is not a list of whole numbers"),
        (data, {"patch": 4}, "patch 4 is not a list of whole numbers"),
        (data, {"channel_axis": "x"}, "channel_axis 'x' is not a whole number, nor one for each"),
        (data, {"transform": 3}, "transform 3 cannot be called"),
    ]
    with served(tmp_path) as url:
        far = f"{url}/short.zarr"
        with pytest.raises(UsageError, match=r"short\.zarr: it is remote; engine native cannot"):
            Loader(far, batch_size=2, engine="native")
        assert Loader(far, batch_size=2).engine.name == "tensorstore"
    for what, knobs, message in cases:
        with pytest.raises(UsageError, match=message):
            Loader(what, **{"batch_size": 2, **knobs})
    assert threads_of_loaders() == []


def test_a_damaged_document_is_one_sentence(tmp_path) -> None:
    (tmp_path / "dataset.json").write_text('{"format": "zip"}')
    with pytest.raises(UsageError, match=r"dataset\.json is not that of a packed data set"):
        Loader(tmp_path, batch_size=2)
    (tmp_path / "dataset.json").write_text(
        '{"format": "penstock-packed", "version": 1, "arrays": 3}'
    )
    with pytest.raises(UsageError, match="malformed: 'int' object"):
        Loader(tmp_path, batch_size=2)
