"""Bytes, counts and times: parsed from what people type, printed for people.

MB is 10^6 bytes and MiB is 2^20 bytes in all that is printed. Columns and keys that other tools
named ``_mb`` count in 2^20 bytes, as theirs do.
"""

from __future__ import annotations

import math
import re

_FACTORS = {"": 1}
_FACTORS |= {f"{p}b": 1000**i for i, p in enumerate(("", "k", "m", "g", "t", "p"))}
_FACTORS |= {f"{p}ib": 1024**i for i, p in enumerate(("", "k", "m", "g", "t", "p")) if p}
_FACTORS |= {p: 1024**i for i, p in enumerate(("", "k", "m", "g", "t", "p")) if p}


def parse_bytes(text: str | int) -> int:
    """Bytes of ``16GiB``, ``1.5 GB``, ``512M`` (binary, as SLURM means it) or 4096.

    >>> parse_bytes("1.5 GB"), parse_bytes("2GiB")
    (1500000000, 2147483648)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", str(text).lower())
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{text!r} is not a size such as 16GiB, 1.5GB or 4096")
    return int(float(match[1]) * _FACTORS[match[2]])


def parse_share(text: object) -> float:
    """The share that ``1%`` or ``0.01`` says, which is above 0.

    >>> parse_share("1%"), parse_share(0.5)
    (0.01, 0.5)
    """
    number, percent, rest = str(text).strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf or rest:
        raise ValueError(f"{str(text)!r} is not a share such as 1% or 0.01")
    return share


_N = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?(?:e[-+]?\d{1,3})?|\.\d+)"
"""A number: 1,295.23 has thousands, 362,45 a decimal comma."""
_NEXT = r"(?:,? +and +|, *| *)"
_END = r"(?![a-z:\d]|[.,]\d)"
_NO_LETTER = r"(?![^\W\d_])"
_DAYS = rf"{_N} *d(?:ays?)?{_NO_LETTER}"
# A killed job may leave half of the word seconds.
_SECONDS = r"s(?:e(?:cs?|co(?:n(?:ds?)?)?)?)?"
_LENGTH = re.compile(
    rf"(?!,)(?:{_DAYS})?{_NEXT}(?:{_N} *h(?:(?:ou)?rs?)?{_NO_LETTER})?{_NEXT}"
    rf"(?:{_N} *m(?:in(?:ute)?s?)?{_NO_LETTER})?{_NEXT}"
    rf"(?:{_N} *{_SECONDS}{_NO_LETTER})?{_NEXT}(?:{_N} *m(?:illi)?s(?:econds?)?{_NO_LETTER})?"
)
"""Numbers with units, the longest unit first, so two times beside each other are not added up."""
_CLOCK = re.compile(rf"(?:{_DAYS},? *)?(\d+):([0-5]\d):([0-5]\d(?:[.,]\d+)?){_END}")
_OF_SLURM = re.compile(rf"(\d+)-([01]?\d|2[0-3])(?:(?! *[^\W\d_])|:([0-5]\d)(?::([0-5]\d))?){_END}")
"""Days, hours, minutes and seconds as SLURM prints them; 5-6 min is none."""
_BARE = re.compile(_N + _END)
_UNITS = (86400.0, 3600.0, 60.0, 1.0, 1e-3)


def parse_seconds(text: str | float) -> float:
    """Seconds of ``15min``, ``1.5 h``, ``2d``, ``12 minutes and 30 seconds``, ``1 day, 2:03:04``,
    SLURM's ``1-02:03:04``, or 30.

    Raises:
        ValueError: The ``text`` is no time, or one of several meanings.

    >>> parse_seconds("15min"), parse_seconds("1.5 hours"), parse_seconds("0:09:15")
    (900.0, 5400.0, 555.0)
    """
    try:
        seconds, rest = leading_seconds(str(text).strip())
    except ValueError:
        rest = "?"
    if rest:
        raise ValueError(f"{text!r} is not a time such as 30s, 15min, 2h, 1d or 1:30:00")
    return seconds


def leading_seconds(text: str, beside: str = "") -> tuple[float, str]:
    """The time that a text begins with, in seconds, and the rest of the text.

    Args:
        text: The text; a number without a unit is in seconds.
        beside: The words beside its name, which may be a unit of such a number.

    Returns:
        The seconds, and the rest.

    Raises:
        ValueError: The text begins with no time, with a time of several meanings (``09:15``), or
            with a unit that is not known.

    >>> leading_seconds("362,45 seconds (rank 0)")
    (362.45, '(rank 0)')
    """
    text = text.replace("(s)", "s")  # hour(s)
    lower = text.lower()
    for pattern in (_CLOCK, _OF_SLURM, _LENGTH, _BARE):
        said = pattern.match(lower)
        if said is None or not any(said.groups()):
            continue
        units: tuple[float, ...] = _UNITS
        rest = text[said.end() :]
        if pattern is _BARE:
            units = (_seconds_of_one(beside),)
            if re.match(r" *[^\W\d_]|['’′]", rest):
                raise ValueError(f"{text!r} has a unit of time that is not known")
        # 1 295, 1'295 and 1_295 may be thousands; 1 hour 30, 1h:30m and 2d-03:04:05 go on.
        whole = pattern is _LENGTH and any(said.groups()[3:])
        goes_on = r"\s*[x*×]\s*\d" if whole else r"[\s'’′_.:;&/٫x*×-]*\d"
        if re.match(goes_on, rest):
            raise ValueError(f"{text!r} is no time, or one of several meanings")
        numbers = list(said.groups())
        if pattern is _CLOCK:  # whose comma is no thousands'
            numbers[3] = numbers[3].replace(",", ".")
        counts = zip(numbers, units, strict=False)  # not all patterns have all units
        return sum(_decimal(number) * unit for number, unit in counts if number), rest
    raise ValueError(f"{text!r} begins with no time such as 30s, 15min, 2h or 1:30:00")


def _seconds_of_one(unit: str) -> float:
    """The seconds of a unit such as "in hours"; 1 for other words."""
    said = _LENGTH.fullmatch(f"1 {unit.strip().lower().removeprefix('in ')}")
    counts = zip(said.groups() if said else (), _UNITS, strict=False)
    return sum(count for number, count in counts if number) or 1.0


def _decimal(number: str) -> float:
    thousands = re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", number)
    return float(number.replace(",", "" if thousands else "."))


def significant(value: float, digits: int = 3) -> str:
    """A number for people.

    Args:
        value: The number.
        digits: Significant digits.

    Returns:
        Its text, with an exponent only where it is very small or very large.

    >>> significant(1234.5), significant(0.012345), significant(0)
    ('1,234', '0.0123', '0')
    """
    if value == 0:
        return "0"
    text = f"{value:#.{digits}g}"
    if "e" in text:
        return f"{value:,.0f}" if 1 <= abs(value) < 1e15 else f"{value:.{digits - 1}e}"
    number = float(text)
    if abs(number) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return text.rstrip(".")


def plural(count: int, thing: str) -> str:
    """A count of things in words.

    Args:
        count: How many there are.
        thing: The word for one of them.

    Returns:
        The number and the word, in the plural unless it is 1.

    >>> plural(1, "case"), plural(5000, "launch"), plural(2, "epoch"), plural(3, "axis")
    ('1 case', '5,000 launches', '2 epochs', '3 axes')
    """
    return f"{count:,} {noun(count, thing)}"


def noun(count: int, thing: str) -> str:
    """The word of `plural` alone.

    Args:
        count: The number.
        thing: The word for one of them.

    Returns:
        The word, in the plural unless the number is 1.
    """
    many = re.sub("(s|x|[^o]ch)$", r"\1e", thing.removesuffix("is")) + "s"  # batches, and epochs
    return thing if count == 1 else many


def format_bytes(count: float) -> str:
    """Bytes for people, in powers of 1,024.

    >>> format_bytes(3 * 2**30), format_bytes(512)
    ('3.00 GiB', '512 B')
    """
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power:
            return f"{significant(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """A count for people, in powers of 1,000 above 10,000.

    >>> format_count(134217728), format_count(27)
    ('134 M', '27')
    """
    for power, unit in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if abs(count) >= 1000**power and abs(count) >= 10_000:
            return f"{significant(count / 1000**power)} {unit}"
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """Seconds for people.

    >>> format_seconds(0.0123), format_seconds(75), format_seconds(28864)
    ('12.3 ms', '1 min 15 s', '8 h 1 min')
    """
    if seconds < 1:
        return f"{significant(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{significant(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
