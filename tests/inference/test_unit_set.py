"""Units that are written, a bit each: a set like any other, and the memory of a large job."""

from __future__ import annotations

import tracemalloc
from itertools import product
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.data.box import Box
from penstock.data.grid import indices
from penstock.inference.planning.plan import make_plan
from penstock.inference.run_folder.journal import Journal
from penstock.inference.run_folder.log_file import LogFiles
from penstock.inference.run_folder.unit_log import Key, line_of, lost_line, maker_line
from penstock.inference.run_folder.unit_set import UnitSet
from penstock.inference.sharing.completeness import missing_parts, voxels_of

from .kit import SEED, config, facts

PLACES = st.sampled_from([-1025, -513, -512, -1, 0, 1, 511, 512, 1024])
KEYS = st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 1), st.just(0), PLACES), max_size=12)


@given(KEYS, KEYS, KEYS)
def test_it_is_a_set(first: list[Key], second: list[Key], third: list[Key]) -> None:
    units, plain = UnitSet(first), {*first}
    units.update(UnitSet(second))
    plain |= {*second}
    units -= {*third}
    plain -= {*third}
    units.discard((0, 5, 5, 5))
    assert {*units} == plain and len([*units]) == len(units) == len(plain)
    assert [key for key in (*first, *third) if key in units] == [
        key for key in (*first, *third) if key in plain
    ]
    for volume, low, high in product((0, 1), (-1025, -1, 0, 511), (1, 512, 1025)):
        box = Box((-1, 0, min(low, high)), (1, 1, high))
        inside = [key for key in plain if key[0] == volume and key[1] < 1 and low <= key[3] < high]
        assert units.count(volume, box) == len(inside)


def test_units_count_for_their_makers(tmp_path: Path) -> None:
    a, b, c, d = ((0, 0, 0, number) for number in range(4))
    logs = {
        "done.log": [line_of(a), line_of(b), lost_line(b), maker_line({"code": "new"}), line_of(c)],
        "done-b.log": [maker_line({"code": "new"}), line_of(b), line_of(c), line_of(d)],
    }
    for name, lines in logs.items():
        (tmp_path / name).write_text("".join(lines))
    makers = [{"code": "old"}]
    assert LogFiles(tmp_path, "", makers).counts() == {0: 1, 1: 3}
    assert makers == [{"code": "old"}, {"code": "new"}]
    assert {*LogFiles(tmp_path, "", []).units()} == {a, b, c, d}


def test_who_shares_a_large_job_holds_less_than_a_byte_for_each_unit(tmp_path: Path) -> None:
    """A petabyte has rows as long, and a hundred million units. What one reading of a log leaves
    behind, whatever its size, is there before memory is counted."""
    plan = make_plan(config(parts=40), facts((1_500, 1_500, 107_000)), SEED)
    checks, units = ["v0123456789abcdef"], plan.geometry.units.cells
    (tmp_path / "run.json").write_text('{"settings": {}, "fingerprint": {}}')
    with (tmp_path / "done-a.log").open("w") as log:
        log.writelines(line_of((0, *index), checks) for index in indices(units))
    lost = (0, *units.start)
    with (tmp_path / "done-a.log").open("a") as log:
        log.write(lost_line(lost))
    assert len(Journal.open(tmp_path, {}, resume=True, anyway=True).done) == plan.num_units - 1
    tracemalloc.start()
    journal = Journal.open(tmp_path, {}, resume=True, anyway=True)
    lacking = missing_parts(plan, journal.done)
    voxels = voxels_of(plan, journal.done)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lacking == {0: 1} and lost not in journal.done
    assert voxels == plan.voxels - plan.geometry.units.cell(lost[1:]).size
    assert len(journal.done) == plan.num_units - 1 > 15_000
    assert peak < plan.num_units + 2**14, "and what a log of any size takes"
