"""``penstock track``: send the events of a run to trackers when there is a network and a key.

Events that a tracker already has are not sent again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ..base import PenstockError, SafeStream, UsageError
from ..training import TRACKERS, upload_to_comet
from .progress import say

NAMES = tuple(TRACKERS)
PLACES = {"comet": "a key of Comet's", "mlflow": "MLFLOW_TRACKING_URI"}
"""The setting that is needed to reach a tracker outside the run's folder."""


EXAMPLES = """
penstock track sync outputs               # to the trackers that the run was started with
penstock track sync outputs --to mlflow   # to $MLFLOW_TRACKING_URI, or the user's own store
penstock track sync outputs --to comet    # to comet.com with a key, else into an archive
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["sync"], metavar="sync")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of a run, its --output-dir")
    parser.add_argument(
        "--to",
        nargs="+",
        metavar="TRACKER",
        help=f"{', '.join(NAMES)} (default: the trackers that the run was started with)",
    )
    parser.add_argument(
        "--track-dir",
        type=Path,
        metavar="FOLDER",
        help="folder of the store that runs share (default: that of the run)",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="send events while the run goes on, until standard input ends; penstock train uses it",
    )


def run(args: argparse.Namespace) -> int:
    from ..training import trackers_of

    names = [name for word in args.to or () for name in word.split(",") if name]
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--to {name}: the trackers are {', '.join(NAMES)}")
    if args.follow:
        if len(names) != 1:
            raise UsageError(f"--follow goes with one tracker, such as --to {NAMES[0]}")
        return _follow(args.out, names[0])
    sent = [_send(args.out, name, args.track_dir) for name in names or trackers_of(args.out)]
    if failures := list(filter(None, sent)):
        raise PenstockError("; ".join(failures))
    return 0


def _send(out: Path, name: str, store: Path | None) -> str | None:
    """Send a tracker the events that it lacks, and print that. Returns the error if that failed."""
    from ..training import TrackerProgress, deliver_events

    delivery = deliver_events(out, name, store=store)
    for other in TrackerProgress.load(out, name):
        if other.where != delivery.where and "://" in other.where:
            cure = f"; set {PLACES[name]} to reach it" if name in PLACES else ""
            sentence = f"{name}: the run was sent to {other.where} before, but not this time"
            say(f"penstock track: {sentence}{cure}")
    if delivery.error:
        return f"{name} at {delivery.where} did not take the events: {delivery.error}"
    place = f"{delivery.where}, run {delivery.run}" if delivery.run else delivery.where
    print(f"{name}: {place} has all events of {out}")
    for archive in upload_to_comet(out) if name == "comet" else ():
        print(f"comet: {archive} is uploaded")
    return None


def _follow(out: Path, name: str) -> int:
    """Send events while a training runs. Library output is dropped; signals are the training's."""
    from ..training import deliver_events

    for name_of in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        if hasattr(signal, name_of):  # Windows lacks some
            signal.signal(getattr(signal, name_of), signal.SIG_IGN)
    words = SafeStream(os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1))
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # libraries print much, some of it from C code
        os.dup2(silence, descriptor)

    ended = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(ended, out, name), daemon=True).start()
    asked = itertools.count()

    def goes_on(seconds: float) -> bool:
        if next(asked) == 1 and hasattr(os, "nice"):
            # The first delivery shows that the run is alive, so it is not delayed. Later ones
            # get a low priority, so that they take no time from the training.
            os.nice(10)
        return not ended.wait(seconds)

    def tell(sentence: str) -> None:
        again = f"penstock track sync {out} --to {name}"
        words.write(
            f"penstock train: {sentence} (the run goes on; {again} sends what is missing)\n"
        )

    return int(deliver_events(out, name, goes_on, tell).error is not None)


def _wait_for_the_end(ended: threading.Event, out: Path, name: str) -> None:
    """Wait for the end of the run, then end this process when deliveries make no more progress."""
    from ..training import LOOK_EVERY_S, TRACKING_FOLDER, Stalled

    os.read(0, 1)
    ended.set()
    stalled = Stalled(os.getpid(), out / TRACKING_FOLDER / f"{name}.json")
    while not stalled():
        time.sleep(LOOK_EVERY_S)
    os._exit(1)
