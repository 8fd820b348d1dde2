"""The page cache, of real files on a disk."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from penstock.instruments import page_cache as pagecache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page cache of Linux")

PAGES = 64


@pytest.fixture
def path(on_disk: Path) -> Path:
    path = on_disk / "file"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    pagecache.drop_pages([path])
    if pagecache.residency([path]) != 0:
        pytest.skip("temporary files lie in memory, or their file system keeps what it likes")
    return path


def test_what_was_dropped_is_gone_and_what_was_read_is_there(path: Path) -> None:
    pagecache.warm_pages([path])
    assert pagecache.residency([path]) == 1
    pagecache.drop_pages([path])
    assert pagecache.residency([path]) == 0


def test_pages_that_nobody_has_written_back_are_dropped_too(path: Path) -> None:
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    pagecache.drop_pages([path])
    assert pagecache.residency([path]) == 0


def test_a_part_that_was_read_counts_as_its_part(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        file.read(1)
    assert pagecache.residency([path]) == 1 / PAGES


def test_residency_is_of_all_files_by_their_sizes(path: Path, tmp_path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x")  # in memory, as written a moment ago
    empty = tmp_path / "empty"
    empty.touch()
    assert pagecache.residency([path, small, empty]) == 1 / (PAGES + 1)
    assert pagecache.residency([empty]) is None


def test_elsewhere_the_residency_is_not_known(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert pagecache.residency([path]) is None


def test_of_a_file_of_somebody_else_it_is_not_known(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)  # noqa: PTH116
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert pagecache.residency([path]) is None


def test_a_missing_file_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        pagecache.residency([tmp_path / "none"])
