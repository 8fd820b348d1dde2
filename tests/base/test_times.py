"""Times as people, programs and SLURM write them, in seconds."""

import re
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.units import leading_seconds, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5 hours", 5400), ("12 minutes and 30 seconds", 750), ("2h 3m 4s", 7384),
        ("3 min, 4.5 sec", 184.5), ("500ms", 0.5), ("0:09:15.5", 555.5),
        ("1 day, 2:03:04", 93784), ("1-02:03:04", 93784), ("1-02", 93600),
        ("1,295.23 seconds", 1295.23), ("362,45", 362.45), ("7.4e+02", 740), (".5 h", 1800),
        ("0 days 00:06:02.450000", 362.45), ("12,345,678 ms", 12345.678), ("1.5e-3h", 5.4),
        ("2 hour(s) and 3 minute(s)", 7380), ("6.5 min(s)", 390),
        ("01:02:03,456", 3723.456),
    ],
)  # fmt: skip
def test_a_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)
    read, rest = leading_seconds(f"{text} (rank 0)")
    assert (read, rest.strip()) == (pytest.approx(seconds), "(rank 0)")


@pytest.mark.parametrize(
    "text",
    [
        "09:15", "3 fortnights", "1.295,23 s", "1:2:3", "12:34:56:78", "soon", "-5", "nan", "",
        "1:60:00", "1-30:00", "1 hour 30", "2d-03:04:05", "1 295,5 s", "1'295 s", "1_000 s",
        "250 us", "PT1H30M", "~362 s", "1:30 h", "1 hr. 2 min.", "1h:30m:20s", "12 hrs; 5 mins",
        "1 hour & 5 minutes", "5\u2032 3\u2033", "362\u066b45 s", "1/2 h", ",5 s",
        "4 d\u00edas", "5-6 min", "90 s x 4", "5'",
    ],
)  # fmt: skip
def test_a_time_of_several_meanings_or_of_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        leading_seconds(text)


UNITS = {"d": 86400, "h": 3600, "min": 60, "s": 1, "ms": 0.001}


@given(
    st.lists(st.sampled_from(list(UNITS)), min_size=1, unique=True),
    st.lists(st.integers(0, 5000), min_size=5, max_size=5),
    st.sampled_from(["", " "]),
    st.sampled_from(["", " ", ", ", " and "]),
)
def test_numbers_with_units_are_what_timedelta_makes_of_them(units, counts, space, between) -> None:
    parts = dict(zip(sorted(units, key=lambda unit: -UNITS[unit]), counts, strict=False))
    names = {"d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds"}
    text = between.join(f"{count}{space}{unit}" for unit, count in parts.items())
    whole = timedelta(**{names[unit]: count for unit, count in parts.items()})
    assert parse_seconds(text) == pytest.approx(whole.total_seconds())


@given(st.text("0123456789:.,-dhms ' _", max_size=14))
def test_what_is_read_of_any_text_is_in_it(text: str) -> None:
    """Each number of the text counts, or stands behind a time that is whole; else it is refused."""
    try:
        seconds, rest = leading_seconds(text)
    except ValueError as error:
        assert "time" in str(error)
        return
    taken = text[: len(text) - len(rest)]
    assert seconds >= 0 and re.search(r"\d", taken)
    assert not re.match(r"[\s'_-]*\d", rest) or re.search("s[, ]*$", taken)


def test_two_times_beside_each_other_are_not_added_up() -> None:
    assert leading_seconds("8.1 seconds 7.5 seconds")[0] == 8.1


@given(st.integers(0, 10**7))
def test_what_datetime_and_slurm_print_is_read_back(seconds: int) -> None:
    days, rest = divmod(seconds, 86400)
    clock = str(timedelta(seconds=rest))
    for text in (str(timedelta(seconds=seconds)), f"{days}-{clock.zfill(8)}", f"{seconds} s"):
        assert parse_seconds(text) == seconds
