"""`penstock verify`: what it proves, and what it finds in outputs that were damaged."""

from __future__ import annotations

import json
import shlex
import shutil
import time
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
from penstock.inference import verify as verify_room
from penstock.inference.run_folder.reader import open_run

from ..parameters import all_of, crossed
from ..preloaded import started
from .faulty_s3 import Door
from .kit import arange

KNOBS: dict[str, Any] = {"model": "identity", "patch": 16, "overlap": 0, "devices": "cpu",
                         "block": 16, "normalize": "none"}  # fmt: skip
"""8 patches, as blocks are what verify looks at."""
DATA = arange((32, 32, 32)) + 1
DATA[:8] = 0  # no chunk of these is stored
CHUNKS = (8, 16, 16)
STORES = ["v3.zarr", "sharded.zarr", "v2.zarr", "out.n5"]


def chunk(path: Path, *index: int) -> Path:
    """The file of a chunk, or shard, of a store of `stored`."""
    if path.suffix == ".n5":
        return path.joinpath(*map(str, index[::-1]))
    if path.name == "v2.zarr":
        return path / ".".join(map(str, index))
    return (path / "0/c").joinpath(*map(str, index))


def stored(path: Path, data: Any = None, **more: Any) -> Any:
    """Run a job into a store of the kind that its name says. Returns the output's spec."""
    spec: Any = str(path)
    knobs = {**KNOBS, "chunks": CHUNKS, **more}
    if path.name == "v2.zarr":
        del knobs["chunks"]
        metadata = {"chunks": CHUNKS, "shape": [32, 32, 32], "dtype": "<u2",
                    "compressor": {"id": "zstd"}}  # fmt: skip
        spec = json.dumps({"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)},
                           "metadata": metadata, "create": True})  # fmt: skip
    if path.name == "sharded.zarr":
        knobs["shards"] = 16
    penstock.run_inference(DATA if data is None else data, spec, **knobs)
    return spec


Whole = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
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
    """A whole output that a test may harm."""
    return whole("v3.zarr")[0]


def verify(*words: Any) -> int:
    return main(["verify", *map(str, words)])


# --- what is whole -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "seam"),
    all_of(STORES, ["trim", "blend"], default=[("v3.zarr", "trim"), ("out.n5", "blend")]),
)
def test_a_whole_output_is_proven_in_one_line(
    store: str, seam: str, whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chunks of zeros leave no file, and are not missed. Outputs in all stores are proven where
    damage was mended, too."""
    spec = (
        whole(store)[1] if seam == "trim" else stored(tmp_path / store, seam_mode=seam, overlap=2)
    )
    capsys.readouterr()
    assert verify(spec) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "8 of 8 blocks are proven, 64.0 KiB of values" in line


def test_an_output_of_nothing_but_zeros_is_proven(tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    penstock.run_inference(np.zeros((32, 32, 32), "uint16"), out, **KNOBS)
    assert not [path for path in out.rglob("c/**/*") if path.is_file()]
    assert verify(out) == 0


class Heads(nn.Module):
    """Labels of 64 bits, and scores of two channels."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"objects": (x * 1000).long(), "scores": torch.cat([x, -x], 1)}


def test_all_heads_of_a_run_are_proven_and_each_is_found_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_an_output_that_was_moved_is_proven_where_it_is(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "archive").mkdir()
    for path in out.parent.glob("v3.zarr*"):
        shutil.move(path, "archive")
    assert verify("archive/v3.zarr") == 0
    Path("archive/v3.zarr.penstock").rename("elsewhere")
    assert verify("archive/v3.zarr") == 2
    assert verify("archive/v3.zarr", "--run-dir", "elsewhere") == 0


def test_a_part_of_a_larger_array_is_proven(tmp_path: Path) -> None:
    """Time points 1 and 2 of an input that begins off the origin, into an array with channels."""
    data = arange((4, 2, 16, 16, 24))
    out = tmp_path / "out.zarr"
    penstock.run_inference(data, out, **KNOBS | {"t": ["1:3"], "chunks": 16})
    assert verify(out) == 0
    flip(next(path for path in (out / "0/c/1/1").rglob("*") if path.is_file()))
    assert verify(out) == 1


def test_pieces_of_a_unit_give_the_checksum_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """Three channels of one head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, 2 * x, 3 * x], 1)


# --- what is damaged, and what is missing --------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(("store", "harm"), crossed(STORES, [flip, truncate, Path.unlink]))
def test_damage_is_found_forgotten_and_mended(
    store: str, harm: Callable[[Path], Any], whole: Whole, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path, spec = whole(store)
    index = (1, 0, 0) if store == "sharded.zarr" else (3, 0, 0)
    harm(chunk(path, *index))
    capsys.readouterr()
    missing = store == "sharded.zarr" and harm is Path.unlink
    assert verify(spec, "--json", tmp_path / "found.json") == (3 if missing else 1)
    said = capsys.readouterr().out
    assert "7 of 8 blocks are proven" in said
    assert "block (1, 0, 0) Box((16, 0, 0), (32, 16, 16)) of volume 0" in said
    if harm is truncate:
        assert str(chunk(path, *index)) in said
    elif harm is Path.unlink and not missing:
        assert "not stored: 1 of its 2 chunks, first Box((0, 0, 24, 0, 0)" in said
    listed = json.loads((tmp_path / "found.json").read_text())
    (finding,) = listed["missing" if missing else "damaged"]
    assert (finding["volume"], finding["block"], finding["start"]) == (0, [1, 0, 0], [16, 0, 0])

    assert verify(spec, "--forget") == (3 if missing else 1)
    assert "1 block taken off the list" in capsys.readouterr().out
    assert verify(spec) == 3  # it is not on the list any more
    capsys.readouterr()
    assert main(["status", f"{path}.penstock"]) == 3
    assert "killed: 7 of 8 blocks" in capsys.readouterr().out
    assert stored_again(path) == 1
    assert verify(spec) == 0


def stored_again(path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        summaries: list[Any] = []
        run = penstock.run_inference
        patch.setattr(penstock, "run_inference", lambda *a, **k: summaries.append(run(*a, **k)))
        stored(path, resume=True)
    return int(summaries[0].units_written)


@pytest.fixture
def harmed(whole: Whole) -> Path:
    """A whole output, sharded, that each example harms and must mend."""
    return whole("sharded.zarr")[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shard=st.integers(0, 7), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_changes_is_found_wherever_it_changes_a_value(
    harmed: Path, shard: int, place: float, bit: int
) -> None:
    file = chunk(harmed, *np.unravel_index(shard, (2, 2, 2)))
    whole = file.read_bytes()
    content = bytearray(whole)
    content[int(place * len(content))] ^= 1 << bit
    file.write_bytes(content)
    try:
        proof = verify_room.verify_run(open_run([harmed], None), 1, 0, lambda seen: None)
        source = penstock.open_source(harmed)
        try:
            same = (source.read(source.domain)[0, 0] == DATA).all()
        except ValueError:  # it cannot be decoded
            same = False
        assert proof.proven == (8 if same else 7)
        assert len(proof.findings) == 8 - proof.proven
    finally:
        file.write_bytes(whole)


def test_a_chunk_of_zeros_may_be_away_and_no_other_chunk_may_be_in_its_place(
    out: Path,
) -> None:
    assert not chunk(out, 0, 0, 0).exists()
    assert verify(out) == 0
    chunk(out, 0, 0).mkdir(parents=True, exist_ok=True)
    shutil.copy(chunk(out, 3, 0, 0), chunk(out, 0, 0, 0))
    assert verify(out) == 1


def test_a_lock_that_is_gone_is_said(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{out}.penstock-lock").unlink()
    assert verify(out) == 0
    assert "Not locked: " in capsys.readouterr().out


def test_another_fill_value_is_found(out: Path) -> None:
    metadata = out / "0/zarr.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"fill_value": 7}))
    assert verify(out) == 1


def test_a_whole_store_that_was_emptied_is_missing(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(out / "0/c")
    assert verify(out) == 3
    assert "none of its chunks is stored" in capsys.readouterr().out


def test_the_output_of_another_run_is_not_this_runs(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_an_array_of_another_shape_is_not_this_runs(
    shape: tuple[int, ...], out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = KNOBS | {"patch": (8, 8)} if len(shape) == 2 else KNOBS
    penstock.run_inference(arange(shape), tmp_path / "other.zarr", **other)
    run_dir = ["--run-dir", f"{out}.penstock"]
    assert verify(tmp_path / "other.zarr", *run_dir) == 1
    assert "wrote: that was uint16 of (32, 32, 32) voxels" in capsys.readouterr().err


# --- runs that were killed, and those of older versions ------------------------------------------


def test_a_killed_run_is_incomplete_and_the_command_that_is_named_makes_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("in put.npy", DATA)
    log = Path("out.zarr.penstock/done.log")
    Path("hold").touch()  # it cannot end before it is killed, however busy the machine
    Path("slow.py").write_text(
        "import time, torch\n"
        "from pathlib import Path\n"
        f"hold, log = Path('hold'), Path({str(log)!r})\n"
        "class Slow(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        while hold.exists() and log.exists() and len(log.read_text().splitlines()) > 1:\n"
        "            time.sleep(0.005)\n"
        "        return x + 1\n"
    )
    words = ["infer", "--in-spec", "in put.npy", "--out-spec",
             "out.zarr", "--model-type", "slow.py:Slow", "--patch", "8", "--overlap", "2",
             "--block", "16", "--chunks", "8", "--devices", "cpu", "--clip-norm", "-1", "2",
             "--no-output-denormalize"]  # fmt: skip
    victim = started(tmp_path, words)
    while not (log.exists() and len(log.read_text().splitlines()) >= 2):
        assert victim.is_alive(), "the run ended before it could be killed"
        time.sleep(0.005)
    victim.kill()
    victim.join()
    Path("hold").unlink()
    assert verify("out.zarr", "--json", "found.json") == 3
    said = capsys.readouterr().out
    assert "was never written" in said
    command = said.splitlines()[-1].partition("This makes them: ")[2]
    assert command.startswith("penstock infer ") and command.endswith(" --resume")
    done = json.loads(Path("found.json").read_text())["proven"]
    assert 2 <= done < 8
    assert main(shlex.split(command)[1:]) == 0
    again = capsys.readouterr().out
    assert f"Blocks written: {8 - done} of 8 planned, {done} by an earlier run" in again
    assert verify("out.zarr") == 0


def test_a_run_that_an_array_shared_is_proven_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element has a log of its own."""
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", DATA)
    words = [
        *"infer --in-spec in.npy --out-spec out.zarr --model-type identity --patch 16".split(),
        *"--overlap 2 --block 16 --chunks 16 --devices cpu --threads 1 --normalize none".split(),
    ]
    for step in ("--prepare --workers 2", "--part 2/2", "--part 1/2", "--finish"):
        assert verify("out.zarr") == {"--prepare": 2, "--finish": 0}.get(step.split()[0], 3)
        assert main([*words, *step.split()]) == 0
    assert verify("out.zarr", "--recompute", "10%") == 0
    assert "1 of 8 blocks (--seed 0): 1 have the same bits" in capsys.readouterr().out
    for index in ((0, 0, 1), (1, 1, 1)):
        flip(chunk(Path("out.zarr"), *index))
    assert verify("out.zarr", "--forget") == 1
    command = capsys.readouterr().out.splitlines()[-1].partition("This makes them: ")[2]
    assert main(shlex.split(command)[1:]) == 0
    assert "Blocks written: 2 of 8 planned" in capsys.readouterr().out
    assert verify("out.zarr") == 0


def test_blocks_of_an_older_version_are_counted_as_not_provable(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path(f"{out}.penstock/done.log")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*(f"{line.rpartition(' ')[0]}\n" for line in lines[:3]), *lines[3:]]))
    assert verify(out) == 4
    said = capsys.readouterr().out
    assert "5 of 8 blocks are proven" in said and "Not provable: 3 blocks decode" in said
    truncate(chunk(out, 3, 0, 0))
    assert verify(out) == 1


def test_checks_of_another_kind_are_not_provable(out: Path) -> None:
    noted = Path(f"{out}.penstock/run.json")
    content = json.loads(noted.read_text())
    content["makers"][0]["checksum"] = "of tomorrow"
    noted.write_text(json.dumps(content))
    assert verify(out) == 4


# --- a store that is remote, or away -------------------------------------------------------------


def test_an_output_on_s3_is_proven_and_a_store_that_is_away_is_not_called_damaged(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    door = Door(s3_endpoint)
    door.open()
    monkeypatch.setenv("AWS_ENDPOINT_URL", door.url)
    once = {"s3_request_retries": {"max_retries": 0}}
    monkeypatch.setattr("penstock.data.stores.kvstore.IMPATIENT", once)
    out = "s3://test-bucket/some/out.zarr"
    penstock.run_inference(DATA[16:], out, **KNOBS | {"chunks": (16, 8, 16)})
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
    assert verify(out) == 1
    said = capsys.readouterr()
    assert "2 of 4 blocks are proven" in said.out and "not stored: 1 of its 2" in said.out
    door.close()


# --- what is refused -----------------------------------------------------------------------------


def test_what_is_no_run_is_refused(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    refused([out, "--json", tmp_path / "no/found.json"], "is not a folder")
    refused([out, "--json", folder / "done.log", "--replace"], "which is an input")
    refused([out, "--json", out / "found.json"], "found.json lies")
    refused([out, "--run-dir", "http://host/run"], "or a prefix such as s3://BUCKET/PREFIX")
    refused([out, out], "wrote 1 output, not 2; name one of them")
    for share in ("0", "200%", "many"):
        refused([out, "--recompute", share], "is not a share such as 1% or 0.01")
    for text, said in (("{", "run.json is damaged"), ("[]", "is not a run folder"),
                       ('{"settings": {}, "fingerprint": {}}', "of an older version and lacks"),
                       (noted.replace('"domain"', '"doman"'), "lacks domain")):  # fmt: skip
        (folder / "run.json").write_text(text)
        refused([out], said)
    (folder / "run.json").unlink()
    refused([out], "if it has another place, give --run-dir")


def test_a_run_under_way_is_not_forgotten_in(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.inference.run_folder.journal import Journal

    flip(chunk(out, 3, 0, 0))
    log = Path(f"{out}.penstock/done.log")
    before = log.read_bytes()
    with_lock = Journal(Path(f"{out}.penstock"), {})
    with_lock.lock()
    assert verify(out, "--forget") == 2
    assert "--forget: another process is writing the run in" in capsys.readouterr().err
    with_lock.close()
    assert log.read_bytes() == before


def test_a_file_that_is_not_ours_is_not_replaced(out: Path, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    report.write_text("mine")
    assert verify(out, "--json", report) == 2
    assert report.read_text() == "mine"
