"""The command line: one verb, one file.

A verb's module has ``EXAMPLES``, ``add_arguments(parser)`` and ``run(args) -> exit code``, and is
imported only when its verb is asked for.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import itertools
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from .. import __version__
from ..base import (
    BATCH_SIGNALS,
    THREAD_VARIABLES,
    PenstockError,
    SafeStream,
    Undecided,
    absent,
    as_usage_error,
    describe,
    environment_kept,
    error_number,
    importing,
    signals_handled,
    where_in_users_code,
)
from .verb_parser import VerbParser

VERBS = {
    "infer": "run a model over a volume larger than memory",
    "plan": "say what infer would do: counts, bytes, memory; touch nothing",
    "status": "show the progress of a run of infer: blocks, rate, time left, faults",
    "verify": "prove by checksums that an output is complete and was written by its run",
    "repair": "compute the lost and damaged blocks of an output again, and nothing else",
    "pyramid": "add the levels that an image lacks, in place or beside it",
    "mask": "make a mask of the sample in a volume or scene, for infer",
    "label": "number the objects of a volume, each once, and make a table of them",
    "convert": "write an array into another format, as it is, in bounded memory",
    "info": "say what an input holds: arrays, levels, axes, voxels, chunks",
    "inspect": "say how far a network sees, and which overlap leaves no seam",
    "view": "draw planes of an array or of two as a PNG, or serve them to Neuroglancer",
    "generate": "make data to measure with: fields, volumes, scenes, packed NetCDF",
    "preprocess": "cut satellite scenes into chips to train on",
    "train": "train a workload, with every step timed; stop and resume exactly",
    "suite": "benchmark a machine by trainings of a detector, from presets",
    "predict": "find ships in whole scenes with a trained detector",
    "launch": "start the ranks of a training, or another verb, in a job of SLURM",
    "slurm": "jobs of SLURM: render, submit, status, cancel",
    "bench": "measure a model, a loader or a queue",
    "tune": "find the settings that keep a loader or an inference fast",
    "score": "score detections by the rules of the xView3 challenge",
    "compare": "say whether B is faster or slower than A, and how certain that is",
    "explain": "say what limited a run, and what would help at most",
    "scaling": "report how runs scale with devices, from logs; predict more devices",
    "report": "make a page of a ledger: tables, sentences, figures",
    "dashboard": "compare runs in a browser, while they go on and after",
    "plot": "draw the figures of metrics or of a benchmark's CSV",
    "doctor": "say what this machine is, and what limits it",
}
EXTRAS = {
    "train": "train", "suite": "train", "predict": "train", "launch": "train", "dashboard": "plot",
}  # fmt: skip
"""The pip extra that a verb needs. A verb that is not listed needs ``infer``."""
AGAIN = {
    "infer": "; run again with --resume",
    "convert": "; run again with --resume",
    "label": "; run again with --resume",
    "pyramid": "; run again, with --resume if you named OUT",
    "predict": "; run again with --resume",
    "launch": "; run again with --resume",
    "train": "; run again with --resume, which goes on from the last checkpoint if there is one",
    "suite": "; run again with --resume",
    "bench": "; what was measured is in the ledger, and --resume measures the rest",
}
"""The words after "interrupted" that say how to continue, by verb."""
_TRACED = "PENSTOCK_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: The words after ``penstock`` on the command line; by default those of this process.

    Returns:
        The exit code: 0 done, 1 failed, 2 usage or refused, 3 incomplete, 4 not comparable.
    """
    handlers = {number: signal.getsignal(number) for number in BATCH_SIGNALS}
    with environment_kept(), signals_handled(handlers):
        return _run_safely(argv)


def _run_safely(argv: Sequence[str] | None) -> int:
    """Like `main`, but the signals of a batch system stay ignored after it returns."""
    try:
        with _safe_streams():
            with as_usage_error("the working folder cannot be used; cd to another", OSError):
                Path.cwd()  # libraries that ask for it end the process
            return _main(argv)
    except PenstockError as error:  # also of a stream that cannot be written
        print(f"penstock: {error.with_flags}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # while the verb is still imported
        print("penstock: interrupted; nothing was begun", file=sys.stderr)
        return 3


@contextlib.contextmanager
def _safe_streams() -> Iterator[None]:
    """Remove secrets and control characters from all printed text, also from library warnings."""
    # Of a stream that was closed the number is free, and the next file that is opened would get it
    # and whatever libraries print there.
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"pydicom\.")  # its reader notes them
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name) or stack.enter_context(Path(os.devnull).open("w"))
            redirect = getattr(contextlib, f"redirect_{name}")
            safe = stack.enter_context(redirect(SafeStream(stream)))
            stack.callback(safe.flush)  # a closed pipe raises nothing in here
        yield


def _main(argv: Sequence[str] | None) -> int:
    """Run one verb. Whatever it prints is safe already."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Words after -- may belong to another program, so they stay as they are.
    end = words.index("--") if "--" in words else len(words)
    words, others = spelled([dashed(word) for word in words[:end]]), words[end:]
    if "--debug" in words:  # for any verb, and for the processes that it starts
        words = [word for word in words if word != "--debug"]
        os.environ[_TRACED] = "1"
    parser = parser_of(words)
    args, unknown = parser.parse_known_args([*words, *others])
    if unknown:
        args.parser.refuse(unknown)
    # The SIGTERM of a batch system is treated like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            return args.run(args)
        finally:  # a further signal must not change the last lines or the exit code
            for number in BATCH_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
    except PenstockError as error:
        _trace(error)
        print(f"penstock {args.verb}: {error.with_flags}", file=sys.stderr)
        for answer in error.answers if isinstance(error, Undecided) else ():
            print(f"    {shlex.join(['penstock', *words])} {answer}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"penstock {args.verb}: interrupted{AGAIN.get(args.verb, '')}", file=sys.stderr)
        return 3
    except (Exception, SystemExit) as error:
        # Code of one's own that exits has not done the verb. The parser of a command within one
        # exits after its help, or its error.
        if isinstance(error, SystemExit) and not where_in_users_code(error):
            raise
        _trace(error)
        absence = absent(error, EXTRAS.get(args.verb, "infer"))
        print(f"penstock {args.verb}: {absence or _fault(error)}", file=sys.stderr)
        return absence.exit_code if absence else 1


def parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command line.

    Args:
        words: The words after ``penstock``. If the first is a verb, the parser knows only this
            verb; otherwise it knows all verbs, but not their flags.

    Returns:
        The parser.
    """
    asked = words[0] if words and words[0] in VERBS else None
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Deep learning on arrays larger than memory, every stage of it measured.",
        epilog="penstock VERB --help shows examples and the usual flags, --help-all all flags.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=VerbParser
    )
    for name in [asked] if asked else VERBS:
        summary = VERBS[name]
        verb = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if asked:
            with importing(f"{__name__}.{name}"):
                module = import_module(f"{__name__}.{name}")
            module.add_arguments(verb)
            verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
            verb.set_defaults(run=module.run)
    return parser


def _trace(error: BaseException) -> None:
    """Print the traceback if ``--debug`` was given."""
    if os.environ.get(_TRACED):
        from ..base import traceback_of

        print(traceback_of(error), end="", file=sys.stderr)


_OF_THE_MACHINE = frozenset(
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EMFILE ENFILE EIO ESTALE ENOMEM".split()
    if hasattr(errno, name)
)
"""Errors of the system that say what this machine lacks or forbids."""


def _fault(error: BaseException) -> str:
    """Describe an unexpected error in one sentence."""
    if error_number(error) in _OF_THE_MACHINE:
        return describe(error)
    if isinstance(error, MemoryError):
        return f"no memory is left: {describe(error)}"
    if place := where_in_users_code(error):
        return f"{type(error).__name__}: {describe(error)}{place}; --debug shows all of it"
    return f"{type(error).__name__}: {describe(error)} (a defect in Penstock; --debug shows where)"


_OF_LIBRARIES = {
    **THREAD_VARIABLES,
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}  # fmt: skip
"""Variables that libraries read once, and their values unless the user has set them.

TensorStore ends a request that has received no byte for a minute. By default it waits for ever.
"""


def set_up_libraries() -> None:
    """Set the variables of libraries. Call this before torch and TensorStore are loaded."""
    for name, value in _OF_LIBRARIES.items():
        os.environ.setdefault(name, value)


def entry() -> None:
    """The ``penstock`` command.

    The process ends at once with its exit code: to take torch's modules apart took 0.1 s, and the
    last garbage collection 0.3 s. What was registered for the end is run before, but not where that
    might wait or abort: a failed job may leave a thread in a call that never returns, and threads
    of gloo may still free tensors after a training.
    """
    set_up_libraries()
    code = _run_safely(None)
    if threading.active_count() == 1 and "train" not in sys.argv[1:3]:
        atexit._run_exitfuncs()
    os._exit(code)


def spelled(words: list[str]) -> list[str]:
    """``infer IN OUT --model M`` as ``infer --in-spec IN --out-spec OUT --model-type M``."""
    verb = 2 if words[:2] == ["tune", "infer"] else 1
    if words[:verb] not in (["infer"], ["plan"], ["convert"], ["tune", "infer"]):
        return words
    places = list(
        itertools.takewhile(lambda word: not word.startswith("-"), words[verb : verb + 2])
    )
    flags = zip(("--in-spec", "--out-spec"), places, strict=False)
    others = words[verb + len(places) :]
    named = (re.sub("^--model(?==|$)", "--model-type", word) for word in others)
    return [*words[:verb], *itertools.chain(*flags), *named]


def dashed(word: str) -> str:
    """``--tile-sizes=1_2`` for ``--tile_sizes=1_2``: a flag has both spellings."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value
