"""The traceback of an error, kept in a run's folder."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from .errors import Incomplete, UsageError
from .files import replacing
from .secrets import scrub

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
