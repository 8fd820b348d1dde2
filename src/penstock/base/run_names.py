"""Names of the files by which several wings know a folder: of a run of ``infer``, of a training,
and of a suite of trainings; and the traceback of an error, kept in it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from .errors import Incomplete, UsageError
from .files import replacing
from .safe_text import scrub

RUN_FILE, SUMMARY_FILE = "run.json", "summary.json"
"""Files in the folder of a run of ``infer``: its settings, and what was done, written last."""
STEPS = "steps"
"""The folder of a run in which each rank keeps the times of its steps."""
RESULTS, ARGS = "training_results.json", "args.json"
"""Files in a run's folder: its results, and the settings that it was started with."""
BEST, CHECKPOINTS = "best_model.pth", "checkpoints"
"""The weights of a training's best epoch, and the folder of its checkpoints."""
PICTURES = "pictures.npz"
"""The file in a run's folder with some samples and the best model's predictions of them."""
SUITE_LEDGER = "suite.ledger"
"""The folder in a suite's folder that holds the records of its trainings."""
TRACEBACK_FILE = "error.txt"


@contextlib.contextmanager
def keep_traceback_in(folder: Path | None) -> Iterator[None]:
    """Write the traceback of an error that ends a run to `TRACEBACK_FILE` in its folder.

    Nothing is written for `UsageError` and `Incomplete`, or if the folder is None or missing.
    """
    try:
        yield
    except (UsageError, Incomplete):
        raise
    except Exception as error:
        if folder is not None and folder.is_dir():
            with contextlib.suppress(OSError), replacing(folder / TRACEBACK_FILE) as draft:
                draft.write_text(traceback_of(error))
        raise


def traceback_of(error: BaseException) -> str:
    """The traceback of an error and its causes, without keys and logins."""
    return scrub("".join(traceback.format_exception(error)))
