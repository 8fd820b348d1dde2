"""Times as people, programs and SLURM write them, in seconds."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.units import leading_seconds, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5 hours", 5400),
        ("25.0 minutes", 1500),
        ("12 minutes and 30 seconds", 750),
        ("2h 3m 4s", 7384),
        ("1h30m", 5400),
        ("3 min, 4.5 sec", 184.5),
        ("500ms", 0.5),
        ("16:10:15", 58215),
        ("0:09:15.5", 555.5),
        ("1 day, 2:03:04", 93784),
        ("1-02:03:04", 93784),
        ("1-02", 93600),
        ("1,295", 1295),
        ("1,295.23 seconds", 1295.23),
        ("362,45", 362.45),
        ("7.4e+02", 740),
        (".5 h", 1800),
    ],
)
def test_a_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)
    read, rest = leading_seconds(f"{text} (rank 0)")
    assert (read, rest.strip()) == (pytest.approx(seconds), "(rank 0)")


@pytest.mark.parametrize(
    "text", ["09:15", "3 fortnights", "1.295,23 s", "1:2:3", "12:34:56:78", "soon", "-5", "nan", ""]
)
def test_a_time_of_several_meanings_or_of_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        leading_seconds(text)


def test_two_times_beside_each_other_are_not_added_up() -> None:
    assert leading_seconds("8.1 seconds 7.5 seconds")[0] == 8.1


@given(st.integers(0, 10**7))
def test_what_datetime_and_slurm_print_is_read_back(seconds: int) -> None:
    days, rest = divmod(seconds, 86400)
    clock = str(timedelta(seconds=rest))
    for text in (str(timedelta(seconds=seconds)), f"{days}-{clock.zfill(8)}", f"{seconds} s"):
        assert parse_seconds(text) == seconds
