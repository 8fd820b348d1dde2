"""A device that has no memory for a batch: the batch that fits is named, or patches are halved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base.errors import StageError
from penstock.cli import main
from penstock.inference import run as infer
from penstock.inference.lanes import out_of_memory
from penstock.inference.run_folder.log_file import read_units

from .faulty_s3 import distinct, write_model
from .kit import job

FULL = (
    "if x.device.type != 'meta' and len(x) > {0} and (x == {1}).any():\n"
    "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')\n"
    "return x"
)
REALLY = (
    "if x.device.type != 'meta' and len(x) > 1 and (x == 5).any():\n"
    "    torch.empty(2**60, dtype=torch.uint8)\n"
    "return x"
)


def words(folder: Path, model: str) -> list[str]:
    """A job of 8 units; patches of one unit are in no other."""
    np.save(folder / "in.npy", distinct(16))
    given = ["--in-spec", folder / "in.npy", "--out-spec", folder / "out.zarr", "--model-type",
             model, "--patch", 8, "--overlap", 0, "--block", 8, "--chunks", 8, "--devices", "cpu",
             "--normalize", "none", "--head-kind", "intensity"]  # fmt: skip
    return ["infer", *map(str, given)]


@pytest.mark.parametrize("body", [FULL.format(1, 5), REALLY], ids=["a device", "the host"])
def test_the_job_ends_with_a_sentence_and_resumes(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(tmp_path, write_model(tmp_path, "full", body))
    assert main(command) == 3
    error = capsys.readouterr().err
    assert error.startswith("penstock infer: forward failed at block ")
    assert "the host has no memory left for 2 patches at a time; run again with --resume" in error
    assert len(error.strip().splitlines()) == 1
    assert main([*command, "--resume", "--oom", "halve"]) == 0
    written = penstock.open_source(tmp_path / "out.zarr")
    assert (written.read(written.domain)[0, 0] == distinct(16)).all()


def test_what_ran_in_smaller_batches_is_listed_and_survives_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The voxel of value 5 lies in the first patch, which shares its forward with the second."""
    command = [*words(tmp_path, write_model(tmp_path, "full", FULL.format(1, 5))), "--oom", "halve"]
    assert main(command) == 0
    assert "Halved: " in capsys.readouterr().out
    folder = tmp_path / "out.zarr.penstock"
    rows = [json.loads(line)["unit"] for line in (folder / "halved.jsonl").read_text().splitlines()]
    assert rows == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert json.loads((folder / "summary.json").read_text())["halved"] == len(rows)
    with (folder / "halved.jsonl").open("a") as torn:
        torn.write('{"unit": [0, 0')
    (folder / "halved.jsonl").write_text('{"unit": [0, 0')
    lines = (folder / "done.log").read_text().splitlines(keepends=True)
    (folder / "done.log").write_text("".join(x for x in lines if not x.startswith("0 0 0 ")))
    assert main([*command, "--resume"]) == 0
    assert "Halved: 2 " in capsys.readouterr().out
    assert len(read_units((folder / "halved.jsonl").read_bytes())) == 2
    assert main([*command, "--overwrite", "--oom", "stop"]) == 3
    assert not (folder / "halved.jsonl").exists()


def test_elements_that_are_started_again_count_each_block_once_and_a_new_run_none(
    tmp_path: Path,
) -> None:
    command = words(tmp_path, write_model(tmp_path, "full", FULL.format(1, 5)))
    folder = tmp_path / "out.zarr.penstock"

    def shared(elements: int, *started: int, more: list[str]) -> Any:
        parts = [f"--part={element}/{elements}" for element in started]
        for step in ["--prepare", *parts, "--finish"]:
            count = ["--workers", str(elements)] if step == "--prepare" else []
            anew = [word for word in more if word != "--overwrite" or step == "--prepare"]
            assert main([*command, step, *count, *anew]) == 0
        return json.loads((folder / "summary.json").read_text())

    assert shared(2, 1, 1, 2, more=["--oom", "halve"])["halved"] == 2
    command[command.index("--model-type") + 1] = "identity"
    anew = shared(1, 1, more=["--overwrite"])
    assert anew["halved"] == 0
    assert [worker["name"] for worker in anew["workers"]] == ["part-1-of-1"]
    assert anew["units_written"] == 8 and not [*folder.glob("halved*")]


def test_halves_give_the_same_patches_in_the_same_places(tmp_path: Path) -> None:
    whole, halved = job(tmp_path / "whole", batch=8), job(
        tmp_path, batch=8, model_type=write_model(tmp_path, "full", FULL.format(1, 1000)),
        oom="halve", normalize="none", head_kind="intensity",
    )  # fmt: skip
    infer.run_job(whole)
    assert infer.run_job(halved).halved > 0
    assert (halved.config.out_spec[0] == halved.config.in_spec).all()


def test_one_patch_that_does_not_fit_ends_the_job(tmp_path: Path) -> None:
    model = write_model(tmp_path, "full", FULL.format(0, 1000))
    knobs = {"oom": "halve", "normalize": "none", "head_kind": "intensity", "model_type": model}
    with pytest.raises(StageError, match="smaller --patch") as caught:
        infer.run_job(job(tmp_path, **knobs))
    assert caught.value.exit_code == 3


def test_the_batch_that_fits_is_a_half_a_quarter_and_so_on() -> None:
    fits = out_of_memory.halved_to_fit
    assert fits(16, peak=100, of_batch=80, room=99) == 8
    assert fits(16, peak=100, of_batch=80, room=59) == 4
    assert fits(16, peak=100, of_batch=80, room=40) == 4
    assert fits(16, peak=100, of_batch=80, room=10) == 1  # nothing does: the least is named
    assert fits(1, peak=100, of_batch=80, room=10) == 1


def test_the_bytes_of_a_batch_are_part_of_the_peak(tmp_path: Path) -> None:
    plan = job(tmp_path).plan
    assert plan.batch_bytes > 0
