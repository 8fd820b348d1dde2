"""Tells whether an error of a store may pass, and whether the store is full."""

from __future__ import annotations

import errno
import re
import sys

from ...base import causes_of, error_number

_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("ESTALE", "EIO", "EREMOTEIO", "ETIMEDOUT", "EAGAIN", "EINTR", "ENOLCK", "EPIPE"),
        *("ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN"),
        *("EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH", "ENETDOWN", "ENETRESET"),
    )
    if hasattr(errno, name)
)
"""Errors of the system that may pass: of a network, a file server or a disk."""
_PASSING_HTTP = frozenset({408, 425, 429, 500, 502, 503, 504})
_FULL = frozenset(getattr(errno, n) for n in ("ENOSPC", "EDQUOT") if hasattr(errno, n))
_FULL_HTTP = 507
_PASSING_CODE = re.compile(r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): ")
_HTTP = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)'?\]")


def is_transient(error: BaseException) -> bool:
    """Whether an error of a store may pass, so that another try can succeed. A full disk, a quota,
    a permission, an expired token, a missing bucket and a chunk that cannot be decoded will not
    pass.
    """
    judged = (_judged(link) for link in causes_of(error))
    return next((passing for passing in judged if passing is not None), False)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a store, or a quota, has no room left."""
    return any(
        error_number(link) in _FULL or _answer(link) == _FULL_HTTP for link in causes_of(error)
    )


def _answer(error: BaseException) -> int | None:
    """The HTTP status in the text of an error."""
    answer = _HTTP.search(str(error))
    return None if answer is None else int(answer[1])


def _judged(error: BaseException) -> bool | None:
    """The answer for one error, without its causes; None if it does not tell."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if (number := error_number(error)) is not None:
        return number in _PASSING
    if _PASSING_CODE.match(str(error)):
        return True
    answer = _answer(error)
    return None if answer is None else answer in _PASSING_HTTP


def requests_repeated() -> int:
    """The number of requests that TensorStore has repeated by itself in this process. It counts
    those to S3 and Google Cloud Storage."""
    ts = sys.modules.get("tensorstore")
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/") if ts else []
    counts = [metric["values"] for metric in metrics if metric["name"].endswith("/retries")]
    return sum(int(value["value"]) for values in counts for value in values)
