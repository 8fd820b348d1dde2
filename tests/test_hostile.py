"""Files that claim, nest or wait without end, and streams that are closed or full."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.cli import main
from penstock.data import Box, open_sink

from .parameters import slowly
from .preloaded import PENSTOCK, started

pytestmark = pytest.mark.usefixtures("here")

HUGE = 2**62
DEEP = 100_000
KNOBS = "--out-spec out.zarr --model-type identity --patch 8 --overlap 2 --devices cpu".split()


@pytest.fixture
def few_addresses() -> Iterator[None]:
    """3 GiB of addresses beyond those that are taken."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def said(capsys, *words: str) -> str:
    """The sentence with which a command is refused."""
    assert main([*words]) == 2
    *others, sentence = capsys.readouterr().err.splitlines()
    assert others == [] and "defect" not in sentence and len(sentence) < 400
    return sentence


def v3(shape: tuple[int, ...], chunk: tuple[int, ...]) -> str:
    return json.dumps(
        {"zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "uint8",
         "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
         "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
         "fill_value": 0, "codecs": [{"name": "bytes"}]}
    )  # fmt: skip


V2 = {"zarr_format": 2, "chunks": [8, 8, 8], "dtype": "|u1", "compressor": None, "fill_value": 0,
      "order": "C", "filters": None}  # fmt: skip
N5 = {"blockSize": [8, 8], "dataType": "uint8", "compression": {"type": "raw"}}
NESTED = "[" * DEEP + "]" * DEEP
FILES = {
    "v3": ("zarr.json", v3((HUGE, 8, 8), (8, 8, 8)), "an axis has at most"),
    "v3 of one chunk": ("zarr.json", v3((2**40, 8, 8), (2**40, 8, 8)), "an axis has at most"),
    "v3 of a huge chunk": ("zarr.json", v3((HUGE, 8, 8), (HUGE, 8, 8)), "overflow|at most"),
    "v2": (".zarray", json.dumps({**V2, "shape": [8, HUGE, 8]}), "an axis has at most"),
    "n5": (
        "attributes.json",
        json.dumps({**N5, "dimensions": [8, 8, HUGE]}),
        "an axis has at most",
    ),
    "nested": ("zarr.json", NESTED, "nested too deeply|not JSON"),
    "nested attributes": (".zattrs", '{"multiscales":' * DEEP, "nested too deeply|neither"),
}


INFER, LOADER = ["infer", "--in-spec", "in.zarr", *KNOBS], ["bench", "loader", "in.zarr"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [*((kind, INFER) for kind in FILES), slowly(("v3", LOADER)), slowly(("nested", LOADER))],
)
@pytest.mark.usefixtures("few_addresses")
def test_what_metadata_claims_is_checked_at_first(kind: str, words: list[str], capsys) -> None:
    name, text, sentence = FILES[kind]
    Path("in.zarr").mkdir()
    Path("in.zarr", name).write_text(text)
    error = said(capsys, *words)
    assert any(part in error for part in sentence.split("|")) or "in.zarr" in error
    assert not Path("out.zarr").exists()


@pytest.mark.usefixtures("few_addresses")
def test_a_npy_that_claims_too_much(capsys) -> None:
    np.save("in.npy", np.zeros((9, 8, 8), "uint8"))
    content = Path("in.npy").read_bytes()
    header = content.replace(b"(9, 8, 8), }" + b" " * 18, b"(%d, 8, 8), }" % HUGE)
    Path("in.npy").write_bytes(header)
    assert "in.npy" in said(capsys, "infer", "--in-spec", "in.npy", *KNOBS)


LAUGHS = "".join(f"- &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize("text", ["patch: [" * 9999, f"tag:\n- &a0 [x]\n{LAUGHS}"])
@pytest.mark.usefixtures("few_addresses")
def test_settings_that_nest(text: str, capsys) -> None:
    """Aliases of aliases would be 9 to the power of 29 words."""
    Path("a.yaml").write_text(text)
    said(capsys, "infer", "--in-spec", "in.npy", *KNOBS, "--config", "a.yaml")
    assert "nested too deeply" in said(capsys, "infer", "--in-spec", '{"a":' * DEEP, *KNOBS)


@pytest.mark.parametrize("verb", ["infer", "status"])
def test_a_run_that_nests(verb: str, capsys) -> None:
    np.save("in.npy", np.zeros((8, 8, 8), "uint8"))
    Path("run").mkdir()
    Path("run/run.json").write_text(NESTED)
    words = ["--in-spec", "in.npy", *KNOBS, "--run-dir"] if verb == "infer" else []
    assert "run" in said(capsys, verb, *words, "run")
    assert Path("run/run.json").read_text() == NESTED


def ended(*words: str, before: str = "") -> tuple[int, list[str]]:
    """The exit code of a command in a process of its own, and what it said. Some code runs
    ``before`` it."""
    process = started(Path(), words, f"import os, sys\n{before}\n{PENSTOCK}")
    process.join(120)
    return process.exitcode, Path("said").read_text().splitlines()


def test_a_pipe_in_place_of_metadata_is_not_waited_for() -> None:
    Path("in.zarr").mkdir()
    os.mkfifo("in.zarr/zarr.json")
    for words in (INFER, LOADER):
        code, said = ended(*words)
        assert code == 2 and len(said) == 1 and "in.zarr" in said[0], words


@pytest.mark.slow
def test_a_pipe_in_place_of_a_chunk_is_waited_for_as_long_as_a_store_is() -> None:
    """TensorStore opens it in a thread that nothing ends. No thread but those that are watched may
    ask for a chunk."""
    sink = open_sink("in.zarr", domain=Box((0,) * 5, (1, 1, 8, 8, 8)), dtype=np.dtype("u1"))
    sink.create()
    sink.write(sink.domain, np.ones((1, 1, 8, 8, 8), "u1"))
    (chunk,) = (path for path in Path("in.zarr/0/c").rglob("*") if path.is_file())
    chunk.unlink()
    os.mkfifo(chunk)
    code, said = ended(*INFER, "--normalize", "none", "--stall-timeout", "3")
    assert code == 3 and "read failed at brick 0" in said[-1] and "--stall-timeout" in said[-1]


def test_a_pipe_in_place_of_settings_is_not_waited_for() -> None:
    os.mkfifo("a.yaml")
    code, said = ended("infer", "--in-spec", "in.npy", *KNOBS, "--config", "a.yaml")
    assert code == 2 and said == ["penstock infer: --config a.yaml is a pipe, which may never end"]
    code, said = ended("infer", "--config", "/dev/zero")
    assert code == 2 and said == [
        "penstock infer: --config /dev/zero is a device, which may never end"
    ]


SCORE = ("score", "xview3", "--label-file", "a.csv", "--inference-file")


@pytest.mark.parametrize("words", [["report"], ["explain"], ["plot"], ["slurm", "status"], SCORE])
def test_what_never_ends_is_not_read(words: Sequence[str], capsys) -> None:
    os.mkfifo("pipe.jsonl")
    for place, kind in (("/dev/zero", "device"), ("pipe.jsonl", "pipe")):
        assert f"{place} is a {kind}, which may never end" in said(capsys, *words, place)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "[Errno 28] No space left on"),
        (ValueError("PERMISSION_DENIED: Failed [os_error_code='30']"), "PERMISSION_DENIED: Failed"),
        (MemoryError("Unable to allocate 9 TiB"), "no memory is left: Unable to allocate 9 TiB"),
    ],
)
def test_what_the_machine_lacks_or_forbids_is_no_defect(
    error: Exception, sentence: str, monkeypatch, capsys: Any
) -> None:
    monkeypatch.setattr("penstock.cli.doctor.run", Mock(side_effect=error))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"penstock doctor: {sentence}") and "defect" not in said


def test_a_full_disk_under_stdout_is_said_in_one_sentence() -> None:
    np.save("in.npy", np.ones((8, 8, 8), "uint8"))
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    for words in (["infer", "--in-spec", "in.npy", *KNOBS], ["infer", "--help"], ["doctor"]):
        code, said = ended(*words, before=full)
        assert code == 1 and len(said) == 1 and "No space left" in said[0], (words, said)
        assert "defect" not in said[0]


def test_a_closed_stderr_changes_nothing() -> None:
    """Python has no stream for a descriptor that is closed."""
    np.save("in.npy", np.ones((8, 8, 8), "uint8"))
    for source, expected in (("in.npy", 0), ("no.npy", 2)):
        words = ["infer", "--in-spec", source, *KNOBS]
        code, said = ended(*words, before="os.close(2); sys.stderr = None")
        assert code == expected
        assert not any("penstock infer: " in line for line in said)


def test_a_folder_without_a_name(capsys) -> None:
    Path("a.ledger").mkdir()
    Path("a.ledger", "records.jsonl").touch()
    assert "a.ledger holds no records" in said(capsys, "report", ".")
    assert ". has no name" in said(capsys, "plot", ".")
    assert ". has no name" in said(capsys, "plot", "in.csv", "--output", ".")


def test_a_working_folder_that_was_deleted_is_named(monkeypatch, tmp_path) -> None:
    """MKL would end the process, and say that it cannot load libtorch."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    words = [sys.executable, "-m", "penstock", *INFER, "--devices", "cpu"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=120)
    said = "penstock: the working folder cannot be used; cd to another: No such file or directory\n"
    assert (process.returncode, process.stderr) == (2, said)
