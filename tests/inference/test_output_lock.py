"""Two jobs and one output: who may write it, who lost it, and what a resumed run believes."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import penstock
from penstock.base import InferConfig, StageError, UsageError, build
from penstock.cli import main
from penstock.data.stores import lock as output_lock
from penstock.data.stores import lock_place
from penstock.data.stores.tensorstore import TensorStoreSink
from penstock.inference import Job
from penstock.inference import run as infer
from penstock.inference.run_folder import journal

from ..parameters import mainly, paired
from ..preloaded import started
from .kit import SMALL, arange, values

DATA = np.arange(8 * 8 * 16, dtype="uint16").reshape(8, 8, 16)
OTHER = DATA[::-1].copy()
KNOBS: dict[str, Any] = {
    "patch": 8, "overlap": 0, "block": 8, "normalize": "none", "devices": "cpu", "batch": 1,
    "threads": 1, "prep_workers": 1, "writer_workers": 1,
}  # fmt: skip
"""Two blocks of one patch each."""
NET = '''
import time
from pathlib import Path
import torch

HERE = Path(__file__).parent

class Held(torch.nn.Module):
    """The identity, which waits once its job has begun while there is a file "hold"."""
    def forward(self, x):
        while (HERE / "first" / "run.json").exists() and (HERE / "hold").exists():
            (HERE / "holding").touch()
            time.sleep(0.01)
        return x
'''


class Waiting(nn.Module):
    """The identity, which waits in its first forward of a job that has begun."""

    def __init__(self, begun: Path) -> None:
        super().__init__()
        self.begun = begun
        self.reached, self.go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.begun.exists():
            self.reached.set()
            assert self.go.wait(300)
        return x


@contextlib.contextmanager
def living(out: Any, folder: Path, **knobs: Any) -> Iterator[None]:
    """A job of this process that has begun and does not end before the block does."""
    net = Waiting(folder / "run.json")
    job = Job(build(InferConfig, {"in_spec": DATA, "out_spec": out, "model_type": net,
                                  "run_dir": folder, **KNOBS, **knobs}))  # fmt: skip
    failed: list[BaseException] = []

    def work() -> None:
        try:
            infer.run_job(job)
        except BaseException as error:
            failed.append(error)
            net.reached.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert net.reached.wait(300) and not failed, failed
        yield
    finally:
        net.go.set()
        thread.join()
    if failed:
        raise failed[0]


def write(out: Any, data: Any = OTHER, **knobs: Any) -> Any:
    return penstock.run_inference(data, out, model="identity", **KNOBS | knobs)


@contextlib.contextmanager
def process(folder: Path, out: str) -> Iterator[BaseProcess]:
    """A job of another process that has begun and is held before it writes."""
    (folder / "net.py").write_text(NET)
    (folder / "hold").touch()
    np.save(folder / "in.npy", DATA)
    knobs = [word for name, value in KNOBS.items()
             for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    words = ["infer", "--in-spec", str(folder / "in.npy"), "--out-spec", out,
             "--model-type", f"{folder / 'net.py'}:Held",
             "--run-dir", str(folder / "first"), *knobs]  # fmt: skip
    run = started(folder, words)
    try:
        for _ in range(15_000):
            if (folder / "holding").exists():
                break
            assert run.is_alive(), (folder / "said").read_text()
            time.sleep(0.02)
        else:
            raise AssertionError("it did not come so far")
        yield run
    finally:
        (folder / "hold").unlink(missing_ok=True)
        run.kill()
        run.join()


def send(signal_: signal.Signals, run: BaseProcess) -> None:
    os.kill(run.pid, signal_)


def has_lost(run: BaseProcess, folder: Path) -> bool:
    """Whether it ends because its output is another's."""
    run.join()
    return run.exitcode == 1 and "this run has lost" in (folder / "said").read_text()


def names(folder: Path) -> Iterator[Any]:
    """Other names of ``folder / "out.zarr"``, and outputs that hold it or lie in it."""
    (folder / "link").symlink_to(folder)
    (folder / "sub").mkdir()
    metadata = {"shape": DATA.shape, "chunks": [8, 8, 8], "dtype": "<u2"}
    file = {"driver": "file", "path": str(folder / "out.zarr")}
    yield folder / "link" / "out.zarr"
    yield folder / "sub" / ".." / "out.zarr"
    yield f"file://{folder}/out.zarr"
    yield {"driver": "zarr", "kvstore": file, "path": "other", "metadata": metadata, "create": True}
    yield {"driver": "zarr", "kvstore": {**file, "path": f"{folder}/link/out.zarr/other/"},
           "metadata": metadata, "create": True}  # fmt: skip


@pytest.mark.slow
def test_by_whatever_name_it_is_one_output(tmp_path) -> None:
    out = tmp_path / "out.zarr"
    with living(out, tmp_path / "first"):
        for number, name in enumerate(names(tmp_path)):
            with pytest.raises(UsageError, match=rf"process {os.getpid()} on .* is writing it for"):
                write(name, run_dir=tmp_path / str(number), overwrite=isinstance(name, Path | str))
    assert (values(out) == DATA).all()


def test_arrays_of_one_group_are_written_side_by_side(tmp_path) -> None:
    metadata = {"shape": DATA.shape, "chunks": [8, 8, 8], "dtype": "<u2"}
    one, two = (
        {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/group.zarr"},
         "path": name, "metadata": metadata, "create": True}
        for name in ("1", "12")
    )  # fmt: skip
    with living(one, tmp_path / "first"):
        write(two, run_dir=tmp_path / "second")
        with pytest.raises(UsageError, match=r"is writing it for"):
            write(two | {"path": "1/2"}, run_dir=tmp_path / "third")
    lock = json.loads((tmp_path / "group.zarr.penstock-lock").read_text())
    assert {k: v["holder"] for k, v in lock["outputs"].items()} == {"1": None, "12": None}
    assert {path.name for path in (tmp_path / "group.zarr").iterdir()} == {"1", "12"}


def test_the_lock_of_an_n5_lies_beside_its_root(tmp_path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "attributes.json").write_text('{"n5": "4.0.0"}')
    metadata = {"dimensions": DATA.T.shape, "blockSize": [8, 8, 8], "dataType": "uint16",
                "compression": {"type": "gzip"}}  # fmt: skip
    file = {"driver": "file", "path": f"{tmp_path}/root/group/volume/"}
    write({"driver": "n5", "kvstore": file, "metadata": metadata, "create": True},
          run_dir=tmp_path / "run")  # fmt: skip
    lock = json.loads((tmp_path / "root.penstock-lock").read_text())
    assert list(lock["outputs"]) == ["group/volume"]
    assert not list((tmp_path / "root").rglob("*lock*"))


@pytest.mark.slow
def test_every_output_of_a_job_is_locked(tmp_path) -> None:
    class Two(Waiting):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    net = Two(tmp_path / "none")
    outs = (tmp_path / "a.zarr", tmp_path / "b.zarr")
    refused = pytest.raises(UsageError, match=r"b\.zarr: process .* is writing it for")
    both: dict[str, Any] = {"run_dir": tmp_path / "both", "overwrite": True}
    with living(outs[1], tmp_path / "first"), refused:
        penstock.run_inference(DATA, outs, model=net, **KNOBS | both)
    write(outs[0])  # nothing of the refused job holds it
    penstock.run_inference(DATA, outs, model=net, overwrite=True, **KNOBS)
    runs = [json.loads(Path(f"{out}.penstock-lock").read_text())["outputs"][""] for out in outs]
    assert runs[0]["made_by"] == runs[1]["made_by"]


def test_generate_leaves_a_living_output_alone_and_takes_a_finished_one(tmp_path) -> None:
    out = tmp_path / "out.zarr"
    command = ["generate", "volume", str(out), "--shape", "8", "8", "8", "--overwrite"]
    with living(out, tmp_path / "first"):
        assert main(command) == 2
    assert (values(out) == DATA).all()
    assert main(command) == 0
    (locked,) = json.loads(Path(f"{out}.penstock-lock").read_text())["outputs"].values()
    noted = json.loads((tmp_path / "first" / "run.json").read_text())
    assert locked["holder"] is None and locked["made_by"] != noted["run"]


def test_a_stopped_job_holds_its_output_and_writes_nothing_into_a_new_one(tmp_path) -> None:
    out = tmp_path / "out.zarr"
    with process(tmp_path, str(out)) as first:
        send(signal.SIGSTOP, first)
        with pytest.raises(UsageError, match=f"process {first.pid} on "):
            write(out, overwrite=True, run_dir=tmp_path / "second")
        for path in (out, Path(f"{out}.penstock-lock")):  # as its user might, who thinks it dead
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        write(out, run_dir=tmp_path / "second")
        send(signal.SIGCONT, first)
        (tmp_path / "hold").unlink()
        assert has_lost(first, tmp_path)
    assert (values(out) == OTHER).all()
    assert not (tmp_path / "first" / "summary.json").exists()
    with pytest.raises(UsageError, match="made anew by another run than that in"):
        penstock.run_inference(tmp_path / "in.npy", out, model=f"{tmp_path / 'net.py'}:Held",
                               resume=True, run_dir=tmp_path / "first", **KNOBS)  # fmt: skip


KILLED = """
import os, numpy as np, penstock
from {module} import {owner}
{owner}.{step} = lambda *args, **knobs: os._exit(9)
data = np.load("other.npy")
penstock.run_inference(data, "out.zarr", model="identity", overwrite=True, **{knobs})
"""


@pytest.mark.parametrize(
    ("step", "before"),
    paired(
        [
            "inference.run_folder.folder.LogFile.begin",  # the first that changes anything
            "data.stores.lock.OutputLock.name",
            "data.stores.tensorstore.TensorStoreSink.create",
        ],
        [True, False],
    ),
)
def test_a_run_killed_early_strands_nobody(step: str, before: bool, tmp_path, here) -> None:
    np.save("other.npy", OTHER)
    module, owner, method = step.rsplit(".", 2)
    code = KILLED.format(module=f"penstock.{module}", owner=owner, step=method, knobs=KNOBS)
    if before:
        write("out.zarr", DATA, overwrite=True)
    killed = started(tmp_path, code=code)
    killed.join()
    assert killed.exitcode == 9
    if before and owner == "LogFile":  # the earlier run is untouched
        assert write("out.zarr", DATA, resume=True).blocks_written == 0
        assert (values("out.zarr") == DATA).all()
    else:
        assert write("out.zarr", OTHER, resume=True).blocks_written == 2
        assert (values("out.zarr") == OTHER).all()


def test_an_end_that_was_interrupted_holds_nothing(tmp_path, monkeypatch) -> None:
    """By a second Ctrl-C, in a notebook whose process lives on."""

    out, change = tmp_path / "out.zarr", output_lock._LockFile.change

    def interrupted(file: Any, **fields: Any) -> None:
        if fields == {"holder": None}:
            raise KeyboardInterrupt
        change(file, **fields)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output_lock._LockFile, "change", interrupted)
        write(out, DATA)
    assert write(out, DATA, resume=True).blocks_written == 0
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output_lock._LockFile, "change", interrupted)
        write(out, DATA, resume=True)
    assert write(out, OTHER, overwrite=True, run_dir=tmp_path / "second").blocks_written == 2


def test_a_lock_that_is_gone_is_said(tmp_path) -> None:
    out = tmp_path / "out.zarr"
    write(out)
    Path(f"{out}.penstock-lock").unlink()
    with pytest.raises(UsageError, match=r"no lock beside .* `take_over=True` goes on"):
        write(out, resume=True)
    assert write(out, resume=True, take_over=True).blocks_written == 0
    assert write(out, resume=True).blocks_written == 0


def test_a_prepared_run_whose_folder_was_deleted_holds_nothing(here) -> None:
    np.save("in.npy", DATA)
    words = "infer in.npy out.zarr --model identity --head-kind intensity --run-dir run".split()
    assert main([*words, "--prepare", "--workers", "2"]) == 0
    for folder in ("out.zarr", "run"):
        shutil.rmtree(folder)
    assert main(words) == 0


def test_what_a_killed_writer_left_does_no_harm_to_the_lock(tmp_path) -> None:
    """TensorStore writes over it, and leaves the end of what was longer."""
    (tmp_path / "out.zarr.penstock-lock.__lock").write_text("}" * 5000)
    write(tmp_path / "out.zarr")
    write(tmp_path / "out.zarr", overwrite=True)


def test_what_is_no_lock_of_ours_stays(tmp_path) -> None:
    lock = tmp_path / "out.zarr.penstock-lock"
    lock.write_text("mine")
    with pytest.raises(
        UsageError, match=r"penstock-lock is not a lock of Penstock's; move it away"
    ):
        write(tmp_path / "out.zarr")
    assert lock.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    return "s3://test-bucket/some"


@pytest.mark.slow
def test_on_s3_a_living_job_is_seen_by_any_endpoint_and_from_another_machine(
    bucket: str, s3_endpoint: str, tmp_path, monkeypatch
) -> None:
    """The endpoint is named by the environment, and in a spec."""
    out = f"{bucket}/out.zarr"
    place = {"driver": "s3", "bucket": "test-bucket", "path": "some/out.zarr/",
             "endpoint": s3_endpoint}  # fmt: skip
    metadata = {"shape": DATA.shape, "chunks": [8, 8, 8], "dtype": "<u2"}
    spec = {"driver": "zarr", "kvstore": place, "path": "0", "metadata": metadata, "create": True}
    with living(out, tmp_path / "first"):
        for named, knobs in ((out, {"overwrite": True}), (spec, {})):
            with pytest.raises(UsageError, match=rf"process {os.getpid()} on .* is writing it for"):
                write(named, run_dir=tmp_path / "second", **knobs)
        monkeypatch.setattr(lock_place, "_machine", lambda: "another")
        said = r"holds it since 20.*cannot be seen from here whether that run has ended; if it has"
        with pytest.raises(UsageError, match=said):
            write(out, overwrite=True, run_dir=tmp_path / "second")
    assert (values(out) == DATA).all()
    assert write(out, overwrite=True, run_dir=tmp_path / "second").blocks_written == 2


@pytest.fixture
def heedless(s3_endpoint: str, monkeypatch) -> Iterator[str]:
    """An S3 server that takes every write, whatever its condition."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], start: Any) -> Any:
        for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
            environ.pop(name, None)
        return moto(environ, start)

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield "s3://test-bucket/some"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_server_without_locks_is_found_out(heedless: str, tmp_path) -> None:
    out, knobs = f"{heedless}/out.zarr", {"run_dir": tmp_path / "run"}
    with pytest.warns(RuntimeWarning, match="has no lock: its server takes every write"):
        summary = write(out, **knobs)
    assert any(line.startswith("Not locked: ") for line in summary.lines())
    with pytest.warns(RuntimeWarning, match="has no lock"):
        assert write(out, resume=True, **knobs).blocks_written == 0


def test_a_lock_that_the_spec_turns_off_is_in_the_plan(tmp_path) -> None:
    metadata = {"shape": DATA.shape, "chunks": [8, 8, 8], "dtype": "<u2"}
    file = {"driver": "file", "path": f"{tmp_path}/out.zarr", "file_io_locking": {"mode": "none"}}
    spec = {"driver": "zarr", "kvstore": file, "metadata": metadata, "create": True}
    plan = penstock.plan_inference(OTHER, spec, model="identity", **KNOBS)
    assert any("turns file_io_locking off" in line for _, line in plan.lines())
    with pytest.warns(RuntimeWarning, match="turns file_io_locking off"):
        write(spec)


def test_arrays_in_memory_need_no_lock_and_mapped_ones_have_none(tmp_path) -> None:
    result = np.zeros_like(OTHER)
    assert write(result).unlocked == ()
    mapped = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", OTHER.dtype, OTHER.shape)
    with pytest.warns(RuntimeWarning, match="in a file that others may map"):
        write(mapped)
    assert (result == OTHER).all() and (mapped == OTHER).all()


def test_a_run_folder_without_locks_is_said(tmp_path, monkeypatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    out = tmp_path / "out.zarr"
    with pytest.warns(RuntimeWarning, match="has no lock: its file system"):
        assert len(write(out).unlocked) == 1


def test_a_lock_that_may_not_be_written_is_said_in_one_sentence(tmp_path) -> None:
    (tmp_path / "out.zarr.penstock-lock").mkdir()
    with pytest.warns(RuntimeWarning, match=r"^[^\n]*out.zarr has no lock: [^\n]+$"):
        write(tmp_path / "out.zarr")


@pytest.mark.parametrize(
    "name", mainly(["summary.json", "run.json", "done.log", "notes.txt"], 1, 3)
)
def test_a_folder_of_other_files_is_no_run_folder(name: str, tmp_path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text('{"mine": 1}\n')
    for knobs in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match=rf"mine: holds {name} and is not a run folder"):
            write(tmp_path / "out.zarr", run_dir=folder, **knobs)
    assert (folder / name).read_text() == '{"mine": 1}\n'
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["mine", name])


@pytest.mark.parametrize(
    "name", mainly(["done.log", "error.txt", ".penstock-0123456789abcdef.part"], 0, 2)
)
def test_what_a_run_left_that_ended_before_it_began_is_ours(name: str, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).touch()
    assert write(tmp_path / "out.zarr", run_dir=folder).blocks_written == 2
    assert not (folder / "error.txt").exists()
    (folder / "notes.txt").write_text("a good one")
    assert write(tmp_path / "out.zarr", run_dir=folder, resume=True).blocks_written == 0


def test_a_lost_output_is_an_error_of_the_write(tmp_path) -> None:
    out = tmp_path / "out.zarr"
    lost = pytest.raises(StageError, match=r"write failed at .*: this run has lost .* was removed")
    with lost, living(out, tmp_path / "first"):
        Path(f"{out}.penstock-lock").unlink()


def test_a_second_process_on_the_same_output_is_refused_and_harms_nothing(tmp_path) -> None:
    source, out = arange((10, 10, 10)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    first = journal.Journal.open(Path(f"{out}.penstock"), {}, resume=False)
    first.begin({"settings": {}, "blocks": 0})
    with pytest.raises(UsageError, match="another process is writing this output"):
        penstock.run_inference(source + 1, out, overwrite=True, **SMALL)
    first.close()
    assert (values(out) == source).all()
    penstock.run_inference(source + 1, out, overwrite=True, **SMALL)
    assert (values(out) == source + 1).all()


def test_what_may_not_be_replaced_is_refused_before_its_list_is_lost(tmp_path, monkeypatch) -> None:
    source, out = arange((10, 10, 10)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def denied(self: TensorStoreSink) -> None:
        raise UsageError(f"{self.where}: Permission denied")

    monkeypatch.setattr(TensorStoreSink, "check", denied)
    with pytest.raises(UsageError, match="Permission denied"):
        penstock.run_inference(source, out, overwrite=True, **SMALL)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
