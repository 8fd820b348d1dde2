"""Disks that fill up, or may not be written any more: real ones, mounted for the test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.cli import main

from ..preloaded import forked_workers

VOLUME = np.random.default_rng(0).integers(0, 60_000, (32, 32, 48)).astype("uint16")
"""96 KiB that no codec makes smaller, in 12 units."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A disk of 64 KiB, and a function that mounts it anew with other options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        subprocess.run(command, check=True, capture_output=True)

    if sys.platform != "linux":
        pytest.skip("it takes Linux to mount a disk in memory")
    try:
        mount("size=64k")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("it takes the rights of root to mount a disk")
    yield place, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", "-l", str(place)], check=True)


def words(folder: Path, out: Path, *more: object) -> list[str]:
    np.save(folder / "in.npy", VOLUME)
    given = ["--in-spec", folder / "in.npy", "--out-spec", out, "--model-type", "identity",
             "--patch", 16, "--overlap", 0, "--block", 16, "--chunks", 16, "--devices", "cpu",
             "--normalize", "none", "--prep-workers", 1, "--writer-workers", 2, *more]  # fmt: skip
    return ["infer", *map(str, given)]


def check_notes(out: Path, folder: Path) -> int:
    """Each unit that is noted is whole; how many there are."""
    written, stored = penstock.open_source(out), 0
    logs = [(folder / "done.log"), *folder.glob("done-*.log")]
    for line in "".join(log.read_text() for log in logs).splitlines():
        if line[:1].isdigit() and line.count(" ") >= 4:
            _, *unit = map(int, line.split()[:4])
            start = tuple(16 * n for n in unit)
            box = penstock.Box.of((0, 0, *start), (1, 1, 16, 16, 16))
            assert (written.read(box)[0, 0] == VOLUME[box.slices[2:]]).all()
            stored += 1
    return stored


@pytest.mark.parametrize("beside", [True, False], ids=["and its run folder", "alone"])
def test_an_output_on_a_disk_that_fills_is_told_and_resumed(
    beside: bool, disk: tuple[Path, Callable[[str], None]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    place, remount = disk
    out = place / "out.zarr"
    folder = place / "out.zarr.penstock" if beside else tmp_path / "run"
    command = words(tmp_path, out, *(() if beside else ("--run-dir", folder)))
    assert main(command) == 3
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("penstock infer: write failed at block ")
    assert "No space left on device" in error and "Traceback" not in error
    assert error.endswith("; make room there, then run again with --resume")
    assert 0 < check_notes(out, folder) < 12
    assert not (folder / "retries.jsonl").exists()
    remount("size=4m")
    assert main([*command, "--resume"]) == 0
    assert check_notes(out, folder) == 12
    capsys.readouterr()
    assert main(["verify", str(out), "--run-dir", str(folder)]) == 0
    left = [path for path in place.rglob("*") if path.suffix in (".__lock", ".part")]
    assert left == []


@pytest.mark.slow
def test_a_disk_that_fills_under_a_cluster_is_told_and_resumed(
    disk: tuple[Path, Callable[[str], None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("distributed")
    place, remount = disk
    out, folder = place / "out.zarr", tmp_path / "run"
    command = words(tmp_path, out, "--run-dir", folder, "--threads", 1, "--cluster", "local:2",
                    "--parts", 4)  # fmt: skip
    with forked_workers():
        assert main(command) == 3
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(
        r"penstock infer: \d+ of 12 blocks, in \d+ parts?, are not written \(part", error
    )
    assert "write failed at block" in error and "No space left on device" in error
    assert 0 < check_notes(out, folder) < 12
    assert main(["status", str(folder)]) == 3
    assert capsys.readouterr().out.startswith("ended: ")
    remount("size=4m")
    with forked_workers():
        assert main([*command, "--resume"]) == 0
    assert check_notes(out, folder) == 12
    capsys.readouterr()
    assert main(["verify", str(out), "--run-dir", str(folder)]) == 0


def test_a_disk_that_becomes_read_only_is_told_and_resumed(
    disk: tuple[Path, Callable[[str], None]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from penstock.inference.run_folder.journal import Journal

    place, remount = disk
    remount("size=4m")
    out, note = place / "out.zarr", Journal.note

    def noted(self: Journal, *args: object) -> None:
        note(self, *args)  # type: ignore[arg-type]
        if self.written == 5:
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=False)

    # One writer: while the disk becomes read-only, no other finishes what is left.
    command = words(tmp_path, out, "--run-dir", tmp_path / "run", "--writer-workers", "1")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", noted)
        code = main(command)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1, error
    assert "Read-only file system" in error
    assert 5 <= check_notes(out, tmp_path / "run") < 12
    ended = json.loads((tmp_path / "run/ended.json").read_text())
    assert "Read-only file system" in ended["error"]
    remount("rw,size=4m")
    assert main([*command, "--resume"]) == 0
    assert check_notes(out, tmp_path / "run") == 12
