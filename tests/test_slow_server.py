"""The slow server sends the files of its folder, and nothing else."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from .slow_server import Loopback


def test_a_file_is_sent_and_counted_and_what_lies_elsewhere_is_not(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a").write_bytes(b"0123456789")
    (tmp_path / "secret").write_bytes(b"0")
    with Loopback(tmp_path / "served", 0.0) as store:
        part = urllib.request.Request(f"{store.url}/a", headers={"Range": "bytes=2-4"})
        with urllib.request.urlopen(part) as answer:
            assert answer.read() == b"234"
        for path in ("absent", "../secret", "%2e%2e/secret", ""):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{store.url}/{path}")
        assert store.served() == {"requests": 5, "bytes": 3}
