"""Processes of their own that need not load torch again: forks of one that has loaded it, and has
done nothing else."""

import ast
import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from .ports import held_port

PENSTOCK = "from penstock.cli import entry; entry()"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    "tests.unsearched penstock.cli.infer penstock.inference.run penstock.bench.launch.supervisor "
    "penstock.inference.sharing.on_worker penstock.inference.sharing.steps "
    "penstock.inference.opening.job penstock.data.stores.omezarr "
    "penstock.data.stores.tensorstore_open distributed.nanny distributed.http.worker rasterio "
    "contourpy numcodecs penstock.data.scenes.preprocess tests.looked_up".split()
)


def started(folder: Path, words: Sequence[str] = (), code: str = PENSTOCK) -> ForkServerProcess:
    """A process that runs ``code`` in this folder, by default the command ``penstock``.

    What it says goes to ``said`` there.
    """
    process = _CONTEXT.Process(target=_run, args=(folder, words, code, dict(os.environ)))
    _ready()
    process.start()
    return process


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Within it the nannies of Dask fork their workers, too. These know the variables of now."""
    import dask
    import distributed.utils as of_dask
    import pytest  # here, as each fork imports this file

    _ready()  # before Dask says what is to be loaded there
    knobs = {"worker.multiprocessing-method": "forkserver", "nanny.environ": dict(os.environ)}
    settings = {f"distributed.{name}": value for name, value in knobs.items()}
    with pytest.MonkeyPatch.context() as patch, dask.config.set(settings):
        patch.setattr(of_dask, "_forkserver_preload_set", True)
        yield


_TOOL = """\
#!{python} -ISE
import os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect({address!r})
asked.sendall(repr((sys.argv, os.getpid(), os.getcwd(), dict(os.environ))).encode())
asked.shutdown(socket.SHUT_WR)
sys.exit(int(asked.recv(9)))
"""


@contextlib.contextmanager
def forked_commands(folder: Path) -> Iterator[None]:
    """Within it a shell finds ``penstock``, ``torchrun`` and ``python`` in a folder, which fork
    each time, as a benchmark does for each launch."""
    with socket.socket(socket.AF_UNIX) as listener:
        address = str(folder / "socket")
        listener.bind(address)
        listener.listen()
        for name in ("penstock", "torchrun", "python", "launch"):
            tool = folder / name
            tool.write_text(_TOOL.format(python=sys.executable, address=address))
            tool.chmod(0o755)
        _ready()
        threading.Thread(target=_answer_all, args=(listener,), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def _answer_all(listener: socket.socket) -> None:
    """Until nobody listens. A command that measures asks while it is waited for."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(client,), daemon=True).start()


def _answer(client: socket.socket) -> None:
    """Fork for a client, and tell it how that ended."""
    with client, client.makefile() as asked, contextlib.closing(held_port()) as held:
        words, *where, environment = ast.literal_eval(asked.read())
        places: list[dict[str, str]] = [{}]
        if Path(words[0]).name == "torchrun":
            ranks = words[words.index("--nproc-per-node") + 1]
            words = [str(Path(words[0]).with_name("python")), *words[words.index("-m") :]]
            together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{held.getsockname()[1]}"}
            together |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            places = [{**together, "RANK": f"{n}", "LOCAL_RANK": f"{n}"} for n in range(int(ranks))]
        processes = [
            _CONTEXT.Process(target=_run_for, args=(words, *where, environment | place))
            for place in places
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        client.sendall(f"{max(each.exitcode or 0 for each in processes)}".encode())


_MODULES = {"penstock": "penstock", "launch": "penstock.bench.launch.worker"}


def _run_for(words: Sequence[str], client: int, folder: str, environment: dict[str, str]) -> None:
    """Run Python where a client was started, into its pipes."""
    from penstock.bench.launch import supervisor

    tool, *words = words
    name = Path(tool).name
    streams = [1, 2, int(words[1])] if name == "launch" else [1, 2]
    for stream in streams:
        os.dup2(os.open(f"/proc/{client}/fd/{stream}", os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    supervisor.WORKER = (str(Path(tool).with_name("launch")),)
    if name in _MODULES:
        words = ["-m", _MODULES[name], *words]
    if words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _ready() -> None:
    """Start the process that is forked, where it finds these tests."""
    with contextlib.chdir(Path(__file__).parents[1]):
        forkserver.ensure_running()


def _run(folder: Path, words: Sequence[str], code: str, environment: Mapping[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with Path("said").open("w") as said:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(said.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = ["penstock", *words]
    exec(code, {"__name__": "__main__"})
