"""Pieces of units that parts spill: joined they are what one process makes, to the bit."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.data.box import Box
from penstock.data.grid import indices
from penstock.inference.opening.heads import HeadPlan
from penstock.inference.planning import spill_room
from penstock.inference.planning.spill_room import CHECK_BYTES, SpillRoom, SpillTable, lying
from penstock.inference.sharing.turns import Turn, Turns, turn_of
from penstock.inference.stages.spill import Pieces
from penstock.inference.tiling.geometry import Block, Geometry
from penstock.inference.tiling.parts import Parts, fit_parts
from penstock.inference.tiling.stitch import Assembly, Unit, share_of

from ..geometries import geometries
from .kit import Array, facts
from .test_parts import CUBE


@st.composite
def spilling(draw: st.DrawFn, patches: int = 10**6) -> Parts:
    """Any small job of so many patches at most, in parts that spill, of any whole units."""
    geometry = draw(geometries())
    assume(geometry.cores.cells.size <= patches)
    step = tuple(u * draw(st.integers(1, 3)) for u in geometry.unit)
    return Parts(replace(geometry, region=step, spills=True), step, draw(st.integers(1, 2)))


def alone(parts: Parts) -> Geometry:
    """The cut of one process that has the whole volume in one region."""
    geometry = parts.geometry
    region = tuple(
        (n // u + 2) * u for n, u in zip(geometry.domain.shape, geometry.unit, strict=True)
    )
    return replace(geometry, region=region, spills=False)


def heads_of(geometry: Geometry) -> list[HeadPlan]:
    """Two channels of sums and labels where seams are blended, else two dtypes as written."""
    blend = geometry.seam == "blend"
    f32, u16, i64 = (np.dtype(name) for name in ("float32", "uint16", "int64"))
    return [
        HeadPlan("values", 2, "scores", "said", f32 if blend else u16, f32, blend, False),
        HeadPlan("labels", 1, "labels", "said", i64, i64, False, False),
    ]


def computed(geometry: Geometry, block: Block) -> list[Array]:
    """What a block brings: of each patch other numbers, which add up in the order of patches."""
    arrays = []
    for number, head in enumerate(heads_of(geometry)):
        held = block.support if head.blended else block.core
        values = np.zeros((head.channels, *held.shape), head.kept)
        for index in indices(block.patches):
            seed = np.random.default_rng([number, block.volume, *index])
            box = geometry.patch_read(index) if head.blended else geometry.cores.cell(index)
            drawn = seed.normal(900, 400, (head.channels, *box.shape)).astype(head.kept)
            part = box & held
            values[(slice(None), *part.within(held))] += drawn[(slice(None), *part.within(box))]
        arrays.append(values)
    return arrays


def empty(geometry: Geometry, head: int, shape: tuple[int, ...]) -> Array:
    plan = heads_of(geometry)[head]
    return np.zeros((plan.channels, *shape), plan.kept)


class Written:
    """The units that were written, each once."""

    def __init__(self) -> None:
        self.units: dict[tuple[int, ...], list[bytes]] = {}

    def take(self, units: Iterable[Unit]) -> None:
        for unit in units:
            key = (unit.volume, *unit.index)
            assert key not in self.units
            self.units[key] = [array.tobytes() for array in unit.arrays]


def in_process(parts: Parts) -> Written:
    geometry, written = alone(parts), Written()
    assembly = Assembly(
        geometry,
        lambda head, shape: empty(geometry, head, shape),
        [head.blended for head in heads_of(geometry)],
    )
    for volume in range(parts.num_volumes):
        for block in geometry.blocks(volume=volume):
            written.take(assembly.add(block, computed(geometry, block)))
    return written


def run_part(parts: Parts, number: int, pieces: Pieces) -> Iterator[Unit]:
    """Compute a part: its own units come whole, the others' share is spilled."""
    geometry = parts.geometry
    assembly = Assembly(
        geometry,
        lambda head, shape: empty(geometry, head, shape),
        [head.blended for head in heads_of(geometry)],
        lambda volume, index: not pieces.is_border(index),
    )
    for block in parts.blocks(parts[number]):
        heads = computed(geometry, block)
        for index in indices(geometry.units.touching(block.support)):
            if pieces.is_border(index):
                pieces.write(pieces.cut(block, index, heads))
        yield from assembly.add(block, heads)
    assert not assembly.open


@given(spilling(60), st.data())
def test_pieces_of_parts_in_any_order_and_twice_make_what_one_process_makes(
    parts: Parts, data: st.DataObject
) -> None:
    check_joined(parts, data)


@pytest.mark.slow
@settings(max_examples=20)
@given(spilling(600), st.data())
def test_pieces_of_many_jobs_make_what_one_process_makes(parts: Parts, data: st.DataObject) -> None:
    check_joined(parts, data)


def check_joined(parts: Parts, data: st.DataObject) -> None:
    """Parts in any order, some of them done twice, and then joined are what one process makes."""
    order = data.draw(st.permutations(range(len(parts))))
    again = data.draw(st.lists(st.sampled_from(order), max_size=2))
    geometry, written = parts.geometry, Written()
    with tempfile.TemporaryDirectory() as folder:
        pieces = Pieces(Path(folder), "run", "maker", geometry, heads_of(geometry))
        pieces.begin()
        for number in order:
            written.take(run_part(parts, number, pieces))
        for number in again:
            list(run_part(parts, number, pieces))
        for volume in range(parts.num_volumes):
            for index in indices(geometry.units.cells):
                if pieces.is_border(index):
                    unit = pieces.join(volume, index, lambda h, s: empty(geometry, h, s))
                    assert unit is not None
                    written.take([unit])
                    pieces.remove(volume, index)
        assert not [*pieces.folder.iterdir()]
    assert written.units == in_process(parts).units


@given(spilling())
def test_each_block_is_in_one_part_and_parts_know_whom_they_wait_for(parts: Parts) -> None:
    geometry, whole = parts.geometry, alone(parts)
    blocks = Counter((b.volume, b.patches) for part in parts for b in parts.blocks(part))
    once = {(v, b.patches) for v in range(parts.num_volumes) for b in whole.blocks(volume=v)}
    # Regions meet in the anchor, where one lies in the volume; blocks that spill do not.
    assert set(blocks.values()) == {1}
    assert sum(patches.size for _, patches in blocks) == (
        geometry.cores.cells.size * parts.num_volumes
    )
    if len(whole.regions) == 1:
        assert blocks.keys() == once
    assert geometry.count_patches() == geometry.cores.cells.size
    assert geometry.count_blocks() * parts.num_volumes == len(blocks)
    assert parts.extent(range(len(parts))).patches == sum(p.size for _, p in blocks)
    bringing: dict[int, set[int]] = {part.number: set() for part in parts}
    for part in parts:
        for block in parts.blocks(part):
            assert geometry.block_at(
                [
                    a // n
                    for a, n in zip(block.patches.start, geometry.patches_per_block, strict=True)
                ],
                block.volume,
            ) == replace(block, number=0)
            for index in indices(geometry.units.touching(block.support)):
                bringing[parts.number_of(part.volume, index)].add(part.number)
    for part in parts:
        assert set(parts.sources(part)) == bringing[part.number]
        assert all(part.number in bringing[each] for each in parts.targets(part))
        units = [*indices(parts.units(part))]
        others = bringing[part.number] != {part.number}
        assert others == any(geometry.is_border(geometry.units.cell(index)) for index in units)
    assert sum(len(parts.targets(part)) for part in parts) == sum(map(len, bringing.values()))


@pytest.mark.parametrize("seam", ["trim", "blend"])
@pytest.mark.parametrize("number", [2, 8, 64])
def test_patches_computed_stay_those_of_one_process(number: int, seam: str) -> None:
    alone = replace(CUBE, seam=seam)  # type: ignore[arg-type]
    cut = {
        spills: fit_parts(replace(alone, spills=spills), 1, number, number)
        for spills in (False, True)
    }
    patches = {
        spills: replace(parts.geometry, region=parts.step).count_patches()
        for spills, parts in cut.items()
    }
    assert len(cut[True]) >= number
    assert patches[True] <= 1.02 * alone.count_patches()
    if number == 8 and seam == "trim":
        assert patches[False] > 1.3 * alone.count_patches()


@pytest.fixture
def pieces(tmp_path: Path) -> tuple[Pieces, Block, tuple[int, ...], list[Array]]:
    """The pieces of a job, and one of them."""
    geometry = Geometry(
        domain=Box.of((0, 0, 0), (4, 4, 8)), patch=(2, 2, 3), overlap=(0, 0, 1), seam="blend",
        unit=(4, 4, 4), anchor=(0, 0, 0), region=(4, 4, 4), patches_per_block=(2, 2, 1),
        spills=True,
    )  # fmt: skip
    made = Pieces(tmp_path, "run", "maker", geometry, heads_of(geometry))
    made.begin()
    block, index = geometry.block_at((0, 0, 1)), (0, 0, 1)
    heads = computed(geometry, block)
    made.write(made.cut(block, index, heads))
    return made, block, index, heads


def test_a_piece_comes_back_with_the_bits_it_had(
    pieces: tuple[Pieces, Block, tuple[int, ...], list[Array]],
) -> None:
    made, block, index, heads = pieces
    cut, read = made.cut(block, index, heads), made.read(block, index)
    assert made.there(block, index) and read is not None
    for one, other in zip(cut.arrays, read, strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    made.remove(0, index)
    assert not made.there(block, index) and made.read(block, index) is None


@pytest.mark.parametrize("damage", ["bit", "short", "run", "maker", "place"])
def test_a_piece_that_is_damaged_or_of_something_else_counts_as_not_there(
    pieces: tuple[Pieces, Block, tuple[int, ...], list[Array]], damage: str
) -> None:
    made, block, index, _ = pieces
    (file,) = (path for path in made.folder.rglob("*") if path.is_file())
    content = file.read_bytes()
    if damage == "bit":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "short":
        file.write_bytes(content[:-1])
        assert not made.there(block, index)
    elif damage == "place":
        other = made.geometry.block_at((0, 0, 2))
        file.rename(file.with_name("0.0.2"))
        assert made.read(other, index) is None
        return
    else:
        maker = "another" if damage == "maker" else "maker"
        run = "another" if damage == "run" else "run"
        made = Pieces(made.folder.parents[1], run, maker, made.geometry, made.heads)
        if damage == "run":
            made.begin()
            file.parent.rename(made.folder / file.parent.name)
            file = made.folder / file.parent.name / file.name
    assert made.read(block, index) is None
    assert not file.exists(), "it would be looked at again"


def test_what_lies_there_is_counted_and_pieces_of_written_units_are_removed(
    pieces: tuple[Pieces, Block, tuple[int, ...], list[Array]],
) -> None:
    made, block, index, _ = pieces
    parts = Parts(made.geometry, made.geometry.region, 1)
    (file,) = (path for path in made.folder.rglob("*") if path.is_file())
    assert lying(made.folder, parts) == {(0, 1): file.stat().st_size}
    assert not lying(made.folder, parts, {(0, *index)})
    assert not made.there(block, index) and not lying(made.folder / "none", parts)


def test_nobody_writes_a_piece_once_the_folder_is_gone(
    pieces: tuple[Pieces, Block, tuple[int, ...], list[Array]],
) -> None:
    made, block, index, heads = pieces
    for path in sorted(made.folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    made.folder.rmdir()
    with pytest.raises(FileNotFoundError):
        made.write(made.cut(block, index, heads))


@given(spilling(60))
def test_what_is_spilled_is_what_the_plan_states(parts: Parts) -> None:
    table, brought = table_of(parts), bytes_brought(parts)
    for source, target in itertools.product(range(len(parts)), repeat=2):
        if target in parts.targets(parts[source]):
            assert table.brought(source, target) == brought[source, target]
        else:
            assert not brought[source, target]
    for target in range(len(parts)):
        assert table.total(target) == sum(brought[s, target] for s in range(len(parts)))
    assert table.spill.bytes == brought.total()


def table_of(parts: Parts) -> SpillTable:
    plans = heads_of(parts.geometry)
    return SpillTable(
        parts,
        facts(
            parts.geometry.domain.shape,
            out_channels=tuple(head.channels for head in plans),
            out_itemsizes=tuple(head.dtype.itemsize for head in plans),
            sum_itemsizes=(4 if parts.geometry.seam == "blend" else 0, 0),
        ),
    )


def bytes_brought(parts: Parts) -> Counter[tuple[int, int]]:
    """Bytes of what the blocks of a part bring to units of a part, counted piece by piece."""
    geometry, brought = parts.geometry, Counter[tuple[int, int]]()
    for part in parts:
        for block in parts.blocks(part):
            for index in indices(geometry.units.touching(block.support)):
                unit = geometry.units.cell(index)
                if geometry.is_border(unit):
                    target = parts.number_of(part.volume, index)
                    brought[part.number, target] += CHECK_BYTES
                    for head in heads_of(geometry):
                        share = share_of(geometry, block, unit, blended=head.blended)
                        size = head.channels * share.size * head.kept.itemsize
                        brought[part.number, target] += size
    return brought


@given(spilling(60), st.data())
def test_no_more_lies_spilled_than_the_plan_states_whatever_ends_first(
    parts: Parts, data: st.DataObject
) -> None:
    brought = bytes_brought(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill_room, "AHEAD", data.draw(st.sampled_from([0, 3])))
        table = table_of(parts)
        assert table.spill  # is worked out once
    lost = data.draw(st.none() | st.sampled_from(range(len(parts))))
    limit = data.draw(st.none() | st.just(table.spill.peak))
    there = Counter[tuple[int, int]]()
    room = SpillRoom(table, limit, lambda _: there)
    turns = Turns(parts, None, lambda: False, room)
    under_way: list[int] = []
    done: set[Turn] = set()
    while fresh := [*itertools.islice(turns, 4)] or under_way:
        under_way = [*dict.fromkeys([*under_way, *fresh])]
        task = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        turn = turn_of(task, parts)
        if turn.kind == "part":  # one that is given up has spilled all but its last piece
            for target in parts.targets(parts[turn.part]):
                there[turn.part, target] += brought[turn.part, target]
            if lost is None or limit is not None:
                assert there.total() <= room.now <= table.spill.peak <= table.spill.bytes
        elif turn.kind == "join":
            for source in range(len(parts)):
                del there[source, turn.part]
        if turn == ("part", lost):
            turns.given_up(task)
        else:
            turns.done(task)
            done.add(turn)
    spoilt = () if lost is None else parts.targets(parts[lost])
    assert {turn.part for turn in done if turn.kind == "salvage"} <= {*spoilt}
    assert limit is not None or not turns.is_stuck
    if not turns.is_stuck:
        joined = {
            number for number in range(len(parts)) if parts.sources(parts[number]) != [number]
        }
        assert {turn.part for turn in done if turn.kind != "part"} == joined
        assert {turn.part for turn in done if turn.kind == "part"} == {*range(len(parts))} - {lost}
    if lost is None:
        assert not turns.is_stuck and not there.total()


@given(spilling(60), st.data())
def test_a_part_is_joined_once_all_that_contribute_are_done_and_never_without_one(
    parts: Parts, data: st.DataObject
) -> None:
    count, numbers = len(parts), range(len(parts))
    lacking = data.draw(st.none() | st.sets(st.sampled_from(numbers)))
    lost = data.draw(st.none() | st.sampled_from(numbers))
    turns = Turns(parts, None if lacking is None else dict.fromkeys(lacking, 1), lambda: False)
    wanted = {*numbers} if lacking is None else lacking
    given_out: list[int] = []
    done: set[int] = set()
    under_way: list[int] = []
    while fresh := [*itertools.islice(turns, 3)] or under_way:
        under_way = [*dict.fromkeys([*under_way, *fresh])]
        given_out += [task for task in fresh if task not in given_out]
        task = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        if task != lost:
            done.add(task)
            turns.done(task)
    sources = {number: {*parts.sources(parts[number])} for number in numbers}
    computed = {part for number in wanted for part in sources[number]} | wanted
    assert {task for task in given_out if task < count} == computed
    joins = {number for number in wanted if sources[number] != {number}}
    assert {task - count for task in given_out if task >= count} == {
        number for number in joins if lost not in sources[number]
    }
    for place, task in enumerate(given_out):
        if task >= count:
            assert sources[task - count] <= done.intersection(given_out[:place])


def test_no_task_is_given_out_once_the_job_is_asked_to_end() -> None:
    parts = fit_parts(replace(CUBE, spills=True), 1, 8, 8)
    why: list[str] = []
    turns = Turns(parts, None, lambda: why)
    assert next(turns) == 0
    why.append("SIGTERM")
    assert [*turns] == []
    said = [str(turn_of(len(parts) * kind + 1, parts)) for kind in range(3)]
    assert said == ["part 1", "the borders of part 1", "the borders of part 1"]
