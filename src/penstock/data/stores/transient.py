"""Which errors of a store may be over when it is asked again, and which will stay."""

from __future__ import annotations

import errno
import re
import sys

_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("ESTALE", "EIO", "EREMOTEIO", "ETIMEDOUT", "EAGAIN", "EINTR", "ENOLCK", "EPIPE"),
        *("ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN"),
        *("EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH", "ENETDOWN", "ENETRESET"),
    )
    if hasattr(errno, name)
)
"""Errors of the system that a network, a file server or a disk may get over."""
_PASSING_HTTP = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_CODE = re.compile(r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): ")
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
_HTTP = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)'?\]")


def is_transient(error: BaseException) -> bool:
    """Whether an error of a store may be over when it is asked again.

    A full disk, a quota, a permission, an expired token, a bucket that is not there and a chunk
    that cannot be decoded are not.
    """
    link: BaseException | None = error
    while link is not None:
        if (passing := _judged(link)) is not None:
            return passing
        link = link.__cause__
    return False


def _judged(error: BaseException) -> bool | None:
    """The same of one error alone; None if it does not tell."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    # TensorStore raises `ValueError`; all that it knows stands in the text.
    text = str(error)
    if (system := _OS_ERROR.search(text)) is not None:
        return int(system[1]) in _PASSING
    if _PASSING_CODE.match(text):
        return True
    if (answer := _HTTP.search(text)) is not None:
        return int(answer[1]) in _PASSING_HTTP
    return None


def requests_repeated() -> int:
    """How many requests TensorStore has sent again by itself in this process. It counts those to S3
    and Google Cloud Storage."""
    ts = sys.modules.get("tensorstore")
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/") if ts else []
    counts = [metric["values"] for metric in metrics if metric["name"].endswith("/retries")]
    return sum(int(value["value"]) for values in counts for value in values)
