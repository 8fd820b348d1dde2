"""`penstock verify`: what it proves, and what it finds in outputs that were damaged."""

import contextlib
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.cli import main
from penstock.inference import RunLook, open_run
from penstock.inference import verify as verify_room
from penstock.inference.run_folder.folder import LocalFolder, LogFile
from penstock.inference.run_folder.journal import Journal

from ..parameters import mainly
from .faulty_s3 import Door, write_model
from .kit import arange, values

KNOBS: dict[str, Any] = {"model": "identity", "patch": 16, "overlap": 0, "devices": "cpu",
                         "block": 16, "normalize": "none"}  # fmt: skip
"""8 patches, as blocks are what verify looks at."""
DATA = arange((32, 32, 32)) + 1
DATA[:8] = 0  # no chunk of these is stored
EDGED = arange((36, 30, 40)) + 1
"""Blocks of 16 that its end cuts along every axis."""
CHUNKS = (8, 16, 16)


def chunk(path: Path, *index: int) -> Path:
    """The file of a chunk, or shard, of a store of `stored`."""
    if path.suffix == ".n5":
        return path.joinpath(*map(str, index[::-1]))
    if path.name == "v2.zarr":
        return path / ".".join(map(str, index))
    return (path / "0/c").joinpath(*map(str, index))


def stored(path: Path, data: Any = None, shape: Any = (32, 32, 32), **more: Any) -> Any:
    """Run a job into a store of the kind that its name says. Returns the output's spec."""
    spec: Any = str(path)
    knobs = {**KNOBS, "chunks": CHUNKS, **more}
    if path.name == "v2.zarr":
        del knobs["chunks"]
        metadata = {"chunks": CHUNKS, "shape": shape, "dtype": "<u2",
                    "compressor": {"id": "zstd"}}  # fmt: skip
        spec = json.dumps({"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)},
                           "metadata": metadata, "create": True})  # fmt: skip
    if path.name == "sharded.zarr":
        knobs["shards"] = 16
    penstock.run_inference(DATA if data is None else data, spec, **knobs)
    return spec


Whole = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    """Gives a whole output of `stored` that a test may harm, and its spec. It was made once; its
    run folder and its lock lie beside it, and all of it is always in the same place."""
    place, specs = tmp_path_factory.mktemp("whole"), dict[str, Any]()

    def again(store: str) -> tuple[Path, Any]:
        folder = store.replace(".", " ")  # in a folder like a store the lock would lie beside that
        kept, path = place / "kept" / folder, place / "used" / folder / store
        if store not in specs:
            path.parent.mkdir(parents=True)
            specs[store] = stored(path)
            shutil.copytree(path.parent, kept)
        shutil.rmtree(path.parent)
        shutil.copytree(kept, path.parent)
        return path, specs[store]

    return again


@pytest.fixture
def out(whole: Whole) -> Path:
    return whole("v3.zarr")[0]


def verify(*words: Any) -> int:
    return main(["verify", *map(str, words)])


@pytest.mark.parametrize(("store", "seam"), mainly([("v3.zarr", "trim"), ("out.n5", "blend")], 1))
def test_a_whole_output_is_proven(store: str, seam: str, whole: Whole, tmp_path, capsys) -> None:
    """Chunks of zeros leave no file, and are not missed. Outputs in all stores are proven where
    damage was mended, too."""
    spec = (
        whole(store)[1] if seam == "trim" else stored(tmp_path / store, seam_mode=seam, overlap=2)
    )
    capsys.readouterr()
    assert verify(spec) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "8 of 8 blocks are proven, 64.0 KiB of values" in line


class Heads(nn.Module):
    """Labels of 64 bits, and scores of two channels."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"objects": (x * 1000).long(), "scores": torch.cat([x, -x], 1)}


@pytest.mark.slow
def test_all_heads_of_a_run_are_proven_and_each_is_found_damaged(tmp_path, capsys) -> None:
    outs = [tmp_path / "objects.zarr", tmp_path / "scores.zarr"]
    knobs = KNOBS | {"model": Heads(), "out_dtype": ["int64", "float32"],
                     "head_kind": ["labels", "scores"], "seam_mode": "blend",
                     "overlap": 2}  # fmt: skip
    penstock.run_inference(DATA[16:], outs, **knobs)
    for named in (outs[:1], outs):
        assert verify(*named) == 0
    assert "4 of 4 blocks are proven, 256 KiB" in capsys.readouterr().out
    # of the second alone there is no run folder
    assert verify(outs[1]) == 2
    flip(max(outs[1].rglob("c/**/*"), key=lambda path: path.stat().st_size * path.is_file()))
    assert verify(outs[0]) == 1
    assert f"of {outs[1]} " in capsys.readouterr().out


def test_an_output_that_was_moved_is_proven_where_it_is(out: Path, tmp_path, here) -> None:
    (tmp_path / "archive").mkdir()
    for path in out.parent.glob("v3.zarr*"):
        shutil.move(path, "archive")
    assert verify("archive/v3.zarr") == 0
    Path("archive/v3.zarr.penstock").rename("elsewhere")
    assert verify("archive/v3.zarr") == 2
    assert verify("archive/v3.zarr", "--run-dir", "elsewhere") == 0


def test_a_part_of_a_larger_array_is_proven(tmp_path) -> None:
    """Time points 1 and 2 of an input that begins off the origin, into an array with channels."""
    data = arange((4, 2, 16, 16, 24))
    out = tmp_path / "out.zarr"
    penstock.run_inference(data, out, **KNOBS | {"t": ["1:3"], "chunks": 16})
    assert verify(out) == 0
    flip(next(path for path in (out / "0/c/1/1").rglob("*") if path.is_file()))
    assert verify(out) == 1


def test_pieces_of_a_block_give_the_checksum_of_the_whole(tmp_path, monkeypatch) -> None:
    """However little of it a thread may hold."""
    spec = json.dumps({
        "driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path / "v2.zarr")},
        "metadata": {"chunks": [3, 5, 6, 7], "shape": [3, 11, 13, 15], "dtype": "<u2"},
        "create": True,
    })  # fmt: skip
    small = KNOBS | {"patch": 8, "block": (10, 12, 14)}
    knobs = small | {"model": Several(), "in_channels": 1}
    penstock.run_inference(arange((11, 13, 15)), spec, **knobs)
    penstock.run_inference(arange((11, 13, 15)), tmp_path / "one.zarr", chunks=(5, 6, 7), **small)
    for most in (verify_room.SLAB_BYTES, 5000, 1):
        monkeypatch.setattr(verify_room, "SLAB_BYTES", most)
        assert verify(spec) == verify(tmp_path / "one.zarr") == 0
    flip(tmp_path / "v2.zarr/0.2.2.2")
    assert verify(spec) == 1


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, 2 * x, 3 * x], 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("store", "harm"),
    mainly([("out.n5", flip), ("sharded.zarr", truncate), ("v2.zarr", Path.unlink)], 1),
)
def test_damage_is_found_and_the_command_that_is_named_mends_it(
    store: str, harm: Callable[[Path], Any], tmp_path,
    capsys, here,
) -> None:  # fmt: skip
    """In the middle and at the far edge, where the array's end cuts the chunk of a block."""
    np.save("in.npy", EDGED)
    spec = stored(tmp_path / store, "in.npy", shape=EDGED.shape)
    wanted = values(spec)
    for block in ((1, 0, 0), (2, 1, 2)):
        file = chunk(
            tmp_path / store, *(block if store == "sharded.zarr" else (2 * block[0], *block[1:]))
        )
        harm(file)
        capsys.readouterr()
        missing = harm is Path.unlink and (store == "sharded.zarr" or block[0] == 2)
        assert verify(spec, "--json", f"{block}.json") == (3 if missing else 1)
        said = capsys.readouterr().out
        assert "17 of 18 blocks are proven" in said
        assert f"block {block} Box({tuple(16 * n for n in block)}, " in said
        assert harm is not truncate or str(file)[-16:] in said
        (finding,) = json.loads(Path(f"{block}.json").read_text())[
            "missing" if missing else "damaged"
        ]
        assert (finding["volume"], finding["block"]) == (0, [*block])
        command = shlex.split(said.splitlines()[-1].removeprefix("This makes them: "))
        assert command[:2] == ["penstock", "repair"]
        assert main(command[1:]) == 0
        assert "Repaired: 1 block computed again" in capsys.readouterr().out
        assert (values(spec) == wanted).all()
    assert verify(spec) == 0
    assert main(["repair", *([spec] if isinstance(spec, str) else spec)]) == 0
    assert "Nothing is to be repaired" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", mainly(["run_folder.folder.LocalFolder.forget", "repair.run_job"], 0)
)
def test_a_repair_that_was_killed_is_done_by_the_next(step: str, tmp_path, monkeypatch) -> None:
    """After damaged chunks were emptied, and after their blocks were taken off the list."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    np.save("in.npy", EDGED)
    spec = stored(tmp_path / "v3.zarr", "in.npy")
    truncate(chunk(tmp_path / "v3.zarr", 4, 1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(f"penstock.inference.{step}", killed)
        assert main(["repair", spec]) != 0
    assert main(["repair", spec]) == 0 == verify(spec)


@pytest.mark.slow
def test_what_is_taken_off_the_list_is_written_by_a_resume(whole: Whole, capsys) -> None:
    """As for objects in Python, which no command leads to."""
    path, spec = whole("v3.zarr")
    truncate(chunk(path, 3, 0, 0))
    assert verify(spec) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert "--forget, and then run_inference, called as before" in said
    assert main(["repair", str(spec)]) == 2
    assert "the input of the run was an array in memory" in capsys.readouterr().err
    assert verify(spec, "--forget") == 1
    assert "1 block taken off the list" in capsys.readouterr().out
    assert verify(spec) == 3  # it is not on the list any more
    capsys.readouterr()
    assert main(["status", f"{path}.penstock"]) == 3
    assert "killed: 7 of 8 blocks" in capsys.readouterr().out
    stored(path, resume=True)
    assert json.loads(Path(f"{path}.penstock/summary.json").read_text())["blocks_written"] == 1
    assert verify(spec) == 0


def test_blocks_that_no_log_names_are_counted_and_the_first_are_listed(
    monkeypatch, capsys, here
) -> None:
    """In memory that does not grow with the grid of a run that has just begun."""
    np.save("in.npy", DATA)
    out = stored(Path("out.zarr"), "in.npy")
    log = Path(f"{out}.penstock/done.log")
    *_, first, second = log.read_text().splitlines(keepends=True)
    log.write_text(first + second)
    Path(f"{out}.penstock/summary.json").unlink()
    monkeypatch.setattr(verify_room, "MOST_LISTED", 4)
    capsys.readouterr()
    assert verify(out, "--json", "a.json") == 3
    lines = capsys.readouterr().out.splitlines()
    assert "2 of 8 blocks are proven" in lines[0]
    assert "Missing: 2 more; --json FILE lists all but the last 2" in lines
    table = json.loads(Path("a.json").read_text())
    assert len(table["missing"]) == 4 and table["unlisted"] == 2
    assert main(["repair", out]) == 0 and verify(out) == 0


def test_a_log_that_was_cut_says_so_and_what_to_do(capsys, here) -> None:
    """Whole lines of a run that is done, and a line in the middle; repair writes them again."""
    np.save("in.npy", DATA)
    stored(Path("out.zarr"), "in.npy")
    log = Path("out.zarr.penstock/done.log")
    lines = log.read_text().splitlines(keepends=True)
    for cut, said in (
        (lines[:-2], "is cut: it names 6 of the 8 blocks that were written"),
        ([*lines[:3], lines[3][:9], *lines[5:]], "is cut or damaged in 1 line"),
    ):
        log.write_text("".join(cut))
        capsys.readouterr()
        assert main(["status", "out.zarr"]) == 3
        status = capsys.readouterr().out
        assert (
            status.startswith("incomplete: ")
            and said in status
            and "penstock repair OUTPUT" in status
        )
        assert verify("out.zarr") == 3
        assert f"out.zarr.penstock/done.log {said}" in capsys.readouterr().out
        warned = pytest.warns(RuntimeWarning, match="done.log is cut or damaged in 1 line")
        with warned if "line" in said else contextlib.nullcontext():
            assert main(["repair", "out.zarr"]) == 0
        assert verify("out.zarr") == 0
    capsys.readouterr()
    assert main(["status", "out.zarr"]) == 0
    assert "cut" not in capsys.readouterr().out


def test_a_damaged_chunk_at_the_far_edge_of_which_the_log_lost_its_line_is_mended(here) -> None:
    np.save("in.npy", EDGED)
    spec = stored(Path("v3.zarr"), "in.npy")
    wanted, log = values(spec), Path("v3.zarr.penstock/done.log")
    truncate(chunk(Path("v3.zarr"), 4, 1, 2))
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    assert verify(spec) == 3
    assert main(["repair", spec]) == 0 == verify(spec)
    assert (values(spec) == wanted).all()


@pytest.mark.parametrize("who", ("status", "verify", "resume"))
def test_a_run_that_ends_while_its_log_is_read_is_not_called_cut(who, here, monkeypatch) -> None:
    """Its last lines and its summary come after the look into the log."""
    np.save("in.npy", DATA)
    stored(Path("out.zarr"), "in.npy")
    folder = LocalFolder(Path("out.zarr.penstock"))
    lines = (folder.path / "done.log").read_text().splitlines(keepends=True)
    (folder.path / "done.log").write_text("".join([*lines[:6], lines[6][:9]]))
    summary, run = folder.read("summary.json") or b"", json.loads(folder.read("run.json") or b"")
    folder.delete("summary.json")
    at_work, new_lines = LogFile(folder.path / "done.log"), LocalFolder.new_lines

    def ends(self: LocalFolder, *args: Any) -> Any:
        yield from new_lines(self, *args)
        with (folder.path / "done.log").open("a") as log:
            log.write(lines[6][9:] + lines[7])
        folder.write("summary.json", summary)
        at_work.close()

    monkeypatch.setattr(LocalFolder, "new_lines", ends)
    if who == "status":
        assert RunLook(folder.path).status().state == "running"
    elif who == "verify":
        assert open_run(["out.zarr"], None).cut == ""
    else:
        Journal.open(folder.path, run["fingerprint"], run["maker"], resume=True)  # warns of nothing


def test_a_line_that_names_a_block_beyond_the_plan_counts_for_nothing(capsys, here) -> None:
    """Else as many blocks seem to be written as are planned, and one is lost in silence."""
    np.save("in.npy", DATA)
    stored(Path("out.zarr"), "in.npy")
    log = Path("out.zarr.penstock/done.log")
    lines = log.read_text().splitlines(keepends=True)
    for beyond in ("0 9 9 9", "7 0 0 0", "0 -1 0 0"):
        log.write_text("".join([*lines[:-1], f"{beyond} {lines[0].split()[-1]}\n"]))
        assert main(["status", "out.zarr"]) == 3
        assert "7 of 8 blocks" in capsys.readouterr().out
        with pytest.warns(RuntimeWarning, match="done.log is cut or damaged in 1 line"):
            assert main(["repair", "out.zarr"]) == 0
        assert verify("out.zarr") == 0


@pytest.fixture
def harmed(whole: Whole) -> Path:
    """A whole output, sharded, that each example harms and must mend."""
    return whole("sharded.zarr")[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shard=st.integers(0, 7), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_changes_is_found(harmed: Path, shard: int, place: float, bit: int) -> None:
    file = chunk(harmed, *np.unravel_index(shard, (2, 2, 2)))
    whole = file.read_bytes()
    content = bytearray(whole)
    content[int(place * len(content))] ^= 1 << bit
    file.write_bytes(content)
    try:
        proof = verify_room.verify_run(open_run([harmed], None), 1, 0, lambda seen: None)
        try:
            same = (values(harmed) == DATA).all()
        except ValueError:  # it cannot be decoded
            same = False
        assert proof.proven == (8 if same else 7)
        assert len(proof.findings) == 8 - proof.proven
    finally:
        file.write_bytes(whole)


def test_a_chunk_of_zeros_may_be_away_and_no_other_chunk_may_be_in_its_place(out: Path) -> None:
    assert not chunk(out, 0, 0, 0).exists()
    assert verify(out) == 0
    chunk(out, 0, 0).mkdir(parents=True, exist_ok=True)
    shutil.copy(chunk(out, 3, 0, 0), chunk(out, 0, 0, 0))
    assert verify(out) == 1


def test_a_lock_that_is_gone_is_said(out: Path, capsys) -> None:
    Path(f"{out}.penstock-lock").unlink()
    assert verify(out) == 0
    assert "Not locked: " in capsys.readouterr().out


def test_another_fill_value_is_found(out: Path) -> None:
    metadata = out / "0/zarr.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"fill_value": 7}))
    assert verify(out) == 1


@pytest.mark.slow
def test_the_output_of_another_run_is_not_this_runs(out: Path, tmp_path, capsys) -> None:
    """Made anew with the same settings, and copied over it with its lock or without."""
    other = tmp_path / "other.zarr"
    stored(other, DATA + 1)
    shutil.copytree(f"{out}.penstock", tmp_path / "kept")
    stored(out, DATA + 1, overwrite=True)
    assert verify(out) == 0
    assert verify(out, "--run-dir", tmp_path / "kept") == 1
    assert "was made anew by another run than that in" in capsys.readouterr().err
    shutil.rmtree(out)
    shutil.copytree(other, out)
    assert verify(out) == 0  # the same values
    stored(other, DATA, overwrite=True)
    shutil.rmtree(out)
    shutil.copytree(other, out)
    assert verify(out) == 1
    assert "0 of 8 blocks are proven" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(32, 32, 40), (32, 32)])
def test_an_array_of_another_shape_is_not_this_runs(shape, out, tmp_path, capsys) -> None:
    other = KNOBS | {"patch": (8, 8)} if len(shape) == 2 else KNOBS
    penstock.run_inference(arange(shape), tmp_path / "other.zarr", **other)
    run_dir = ["--run-dir", f"{out}.penstock"]
    assert verify(tmp_path / "other.zarr", *run_dir) == 1
    assert "wrote: that was uint16 of (32, 32, 32) voxels" in capsys.readouterr().err


def test_a_killed_run_is_incomplete_and_the_command_that_is_named_makes_the_rest(
    tmp_path, here, capsys, monkeypatch
) -> None:
    np.save("in put.npy", DATA)
    write_model(tmp_path, "mine", "return x + 1")
    words = ["infer", "--in-spec", "in put.npy", "--out-spec",
             "out.zarr", "--model-type", "mine.py:Net", "--patch", "14", "--overlap", "2",
             "--block", "16", "--chunks", "8", "--devices", "cpu", "--clip-norm", "-1", "2",
             "--no-output-denormalize"]  # fmt: skip
    note = Journal.note

    def killed(self: Journal, *args: Any) -> None:
        note(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", killed)
        assert main(words) == 3
    capsys.readouterr()
    assert verify("out.zarr", "--json", "found.json") == 3
    said = capsys.readouterr().out
    assert "is not noted in done.log" in said
    command = said.splitlines()[-1].partition("runs the code of that model: ")[2]
    assert command == "penstock repair out.zarr --model mine.py:Net"
    done = json.loads(Path("found.json").read_text())["proven"]
    assert 1 <= done < 8
    assert main(shlex.split(command)[1:]) == 0
    blocks = f"{8 - done} blocks" if done < 7 else "1 block"
    assert f"Repaired: {blocks} computed again" in capsys.readouterr().out
    assert verify("out.zarr") == 0


@pytest.mark.slow
def test_an_output_on_s3_is_proven_and_repaired_and_a_store_that_is_away_is_not_called_damaged(
    s3_endpoint: str, here, monkeypatch,
    capsys,
) -> None:  # fmt: skip
    door = Door(s3_endpoint)
    door.open()
    monkeypatch.setenv("AWS_ENDPOINT_URL", door.url)
    once = {"s3_request_retries": {"max_retries": 0}}
    monkeypatch.setattr("penstock.data.stores.kvstore.BRIEF", once)
    out = "s3://test-bucket/some/out.zarr"
    np.save("in.npy", DATA[16:, :30])
    penstock.run_inference("in.npy", out, **KNOBS | {"chunks": (16, 8, 16)})
    assert verify(out) == 0
    door.answers["GET"] = (503, "SlowDown")
    assert verify(out, "--retry-for", "0", "--readers", "1") == 1
    said = capsys.readouterr()
    assert "reading block (" in said.err and "Damaged" not in said.out
    door.answers.clear()
    import tensorstore as ts

    place = {"driver": "s3", "bucket": "test-bucket", "path": "some/out.zarr/0/",
             "endpoint": door.url}  # fmt: skip
    chunks = ts.KvStore.open(place).result()
    chunks["c/0/1/0"] = chunks["c/0/1/1"]
    chunks.write("c/0/3/1", None).result()
    chunks["c/0/3/0"] = b"junk"  # which the array's end cuts
    assert verify(out) == 1
    said = capsys.readouterr()
    assert "1 of 4 blocks are proven" in said.out and "not stored: 1 of its 2" in said.out
    assert main(["repair", out]) == 0 == verify(out)
    door.close()


def test_what_is_no_run_is_refused(out: Path, tmp_path, capsys) -> None:
    folder = Path(f"{out}.penstock")
    noted = (folder / "run.json").read_text()

    def refused(words: list[Any], said: str) -> None:
        capsys.readouterr()
        assert verify(*words) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("penstock verify: ") and said in error

    refused([tmp_path / "none.zarr"], "no such file or folder")
    refused([out, "--run-dir", tmp_path / "none"], "none is not a run folder")
    refused([out, "--run-dir", out], "v3.zarr is not a run folder")
    refused([out, "--json", folder / "done.log", "--overwrite"], "which is an input")
    refused([out, "--json", out / "found.json"], "found.json lies")
    (tmp_path / "mine.json").write_text("mine")
    refused([out, "--json", tmp_path / "mine.json"], "mine.json")
    refused([out, "--run-dir", "http://host/run"], "or a prefix such as s3://BUCKET/PREFIX")
    refused([out, out], "wrote 1 output, not 2; name one of them")
    for share, why in (("0", "is not a share such as 1% or 0.01"), ("200%", "less than or equal")):
        refused([out, "--recompute", share], why)
    for text, said in (("{", "run.json is damaged"), ("[]", "run.json is damaged"),
                       ('{"settings": {}, "fingerprint": {}}', "is not a run folder"),
                       (noted.replace('"domain"', '"doman"'), "is not a run folder")):  # fmt: skip
        (folder / "run.json").write_text(text)
        refused([out], said)
    run = json.loads(noted)
    wrong = {"domain": None, "block": [1], "outputs": [5], "places": [[1]], "volumes": 3}
    for name, value in wrong.items():
        damaged = {**run, "fingerprint": {**run["fingerprint"], name: value}}
        (folder / "run.json").write_text(json.dumps(damaged))
        refused([out], "run.json is damaged: ")
    (folder / "run.json").write_text(json.dumps({**run, "cells": 5}))
    refused([out], "run.json is damaged: ")
    assert main(["status", str(out)]) == 2
    (folder / "run.json").unlink()
    refused([out], "if it has another place, give --run-dir")


def test_a_run_under_way_is_not_forgotten_in(out: Path, capsys) -> None:
    flip(chunk(out, 3, 0, 0))
    log = Path(f"{out}.penstock/done.log")
    before = log.read_bytes()
    with_lock = Journal(Path(f"{out}.penstock"), {})
    with_lock.lock()
    assert verify(out, "--forget") == 2
    assert "another process is writing the run in" in capsys.readouterr().err
    with_lock.close()
    assert log.read_bytes() == before
