"""What a resumed run computes: the patches of the units that are missing, each once, no others."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.cli import main
from penstock.data.grid import indices
from penstock.inference.opening.job import Job
from penstock.inference.planning import cuts
from penstock.inference.run_folder.journal import Journal
from penstock.inference.stages.pipeline import Pipeline
from penstock.inference.stages.reading import wanted_blocks
from penstock.inference.stages.spill import Piece, Pieces, Spilled
from penstock.inference.tiling.geometry import Block, Geometry
from penstock.inference.tiling.parts import Parts

from ..geometries import geometries
from ..laws import COSTLY
from ..preloaded import started
from .kit import Array, conv
from .test_elements import KILLED
from .test_spill import heads_of, spilling

Key = tuple[int, ...]


def least(geometry: Geometry, missing: Collection[Key]) -> Counter[tuple[int, Key]]:
    """The patches that a fresh plan of only the missing units would compute: in each region those
    that contribute to any of them, or in the whole volume where regions spill."""
    needed = set()
    for volume, *unit in missing:
        cell = geometry.units.cell(unit)
        region = None if geometry.spills else geometry.regions.touching(cell).start
        needed |= {(volume, region, index) for index in indices(geometry.patches_for(cell))}
    return Counter((volume, index) for volume, _, index in needed)


def patches_in(blocks: Iterable[Block]) -> Counter[tuple[int, Key]]:
    return Counter((block.volume, index) for block in blocks for index in block.each_patch())


def all_units(geometry: Geometry, volumes: int) -> list[Key]:
    return [(volume, *unit) for volume in range(volumes) for unit in indices(geometry.units.cells)]


def job_of(geometry: Geometry, volumes: int) -> Job:
    """All that `wanted_blocks` looks at."""
    return cast("Job", SimpleNamespace(geometry=geometry, volumes=range(volumes)))


@given(geometries(), st.integers(1, 2), st.data())
def test_any_units_that_are_missing_take_their_patches_and_no_others(
    geometry: Geometry, volumes: int, data: st.DataObject
) -> None:
    units = all_units(geometry, volumes)
    written = data.draw(st.sets(st.sampled_from(units)))
    blocks = [*wanted_blocks(job_of(geometry, volumes), written)]
    assert patches_in(blocks) == least(geometry, {*units} - written)
    assert [block.number for block in blocks] == [*range(len(blocks))]
    for block in blocks:
        assert block.num_patches == len([*block.each_patch()]) > 0
        assert block.read == geometry.read_of(block.patches)


@COSTLY
@given(spilling(60), st.data())
def test_parts_that_spill_compute_no_more_and_nothing_of_which_the_pieces_are_there(
    parts: Parts, data: st.DataObject
) -> None:
    geometry, units = parts.geometry, all_units(parts.geometry, parts.num_volumes)
    written = data.draw(st.sets(st.sampled_from(units)))
    lost = data.draw(st.sampled_from(units))
    with tempfile.TemporaryDirectory() as folder:
        pieces = Pieces(Path(folder), "run", "maker", geometry, heads_of(geometry))
        pieces.begin()
        job, spilled = job_of(geometry, parts.num_volumes), Spilled(pieces, written)
        assert patches_in(wanted_blocks(job, written, parts, spilled)) == least(
            geometry, {*units} - written
        )
        for volume, *index in units:
            if pieces.is_border(tuple(index)) and (volume, *index) != lost:
                for block in pieces.blocks_of(volume, tuple(index)):
                    shapes = zip(*pieces._layout(block, tuple(index)), strict=True)
                    heads = [np.zeros(shape, dtype) for shape, dtype in shapes]
                    pieces.write(Piece(block, tuple(index), heads))
        inner = {u for u in units if not pieces.is_border(u[1:])} | {lost}
        assert patches_in(wanted_blocks(job, written, parts, spilled)) == least(
            geometry, inner - written
        )


# --- real runs ------------------------------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The patches of each batch that is run."""
    count, before = list[int](), Pipeline._before_batch

    def counted(self: Pipeline, lane: int, patches: int) -> None:
        count.append(patches)
        before(self, lane, patches)

    monkeypatch.setattr(Pipeline, "_before_batch", counted)
    return count


@pytest.mark.parametrize("seam", ["trim", "blend"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_was_cut_off_anywhere_computes_what_is_missing_and_no_more(
    seam: str, seed: int, computed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "BLOCK_VOXELS", 20**3)
    draw = random.Random(seed)
    source = np.random.default_rng(0).normal(900, 200, (13, 13, 28)).astype("float32")
    knobs: dict[str, Any] = {"patch": 8, "overlap": 3, "block": 12, "chunks": 12, "devices": "cpu",
                             "seam_mode": seam, "head_kind": "intensity",
                             "normalize": "none", "threads": 1}  # fmt: skip

    def run(**more: Any) -> penstock.Summary:
        out = tmp_path / "out.zarr"
        return penstock.run_inference(source, out, model=conv(), **knobs, **more)

    alone = np.zeros_like(source)
    penstock.run_inference(source, alone, model=conv(), **{**knobs, "chunks": None})
    whole, note, last = sum(computed), Journal.note, draw.randrange(1, 12)

    def killed(self: Journal, *args: Any) -> None:
        note(self, *args)
        if self.written == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "note", killed)
        run(writer_workers=1)
    journal = Journal.open(tmp_path / "out.zarr.penstock", {}, resume=True)
    lost = draw.sample(sorted(journal.done), min(2, len(journal.done) - 1))
    journal.folder.forget(journal.run, lost)  # type: ignore[union-attr]
    computed.clear()
    summary = run(resume=True)
    written = penstock.open_source(tmp_path / "out.zarr")
    assert np.array_equal(written.read(written.domain)[0, 0], alone)
    geometry = geometry_of(tmp_path, source, **knobs)
    missing = {*all_units(geometry, 1)} - (journal.done - {*lost})
    assert summary.units_written == len(missing)
    assert sum(computed) == least(geometry, missing).total() <= whole


# The killed process is one of its own, and has blocks of the same size.
SMALL = "from penstock.inference.planning import cuts\ncuts.BLOCK_VOXELS = 20**3\n"


@pytest.mark.slow
@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_an_element_of_an_array_that_was_killed_computes_what_its_share_lacks_and_no_more(
    seam: str, computed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuts, "BLOCK_VOXELS", 20**3)
    np.save("in.npy", np.random.default_rng(0).normal(900, 200, (28, 40, 36)).astype("float32"))
    knobs = {"in_spec": "in.npy", "out_spec": "out.zarr", "model_type": "identity", "patch": 8,
             "overlap": 3, "block": 12, "chunks": 12, "devices": "cpu", "seam_mode": seam,
             "head_kind": "intensity", "normalize": "none", "threads": 1}  # fmt: skip
    words = [str(word) for name, value in knobs.items()
             for word in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
    assert main(["infer", *words, "--prepare", "--workers", "2"]) == 0
    killed = started(tmp_path, [*words, "--part", "1/2"], SMALL + KILLED)
    killed.join()
    assert killed.exitcode == -9
    before = units_noted()
    assert main(["infer", *words, "--part", "1/2"]) == 0
    missing = units_noted() - before
    assert len(before) == 2 and len(missing) > 3
    geometry = Job(build(InferConfig, knobs | {"part": "1/2", "workers": 2})).geometry
    assert sum(computed) == least(geometry, missing).total()
    assert main(["infer", *words, "--part", "2/2"]) == 0
    assert main(["infer", *words, "--finish"]) == 0, "the share was whole"


def units_noted() -> set[Key]:
    """The units that the first of two elements has written."""
    lines = Path("out.zarr.penstock/done-part-1-of-2.log").read_text().splitlines()
    keys = (line.rpartition(" ")[0].split() for line in lines if line[0].isdigit())
    return {tuple(map(int, key)) for key in keys}


def geometry_of(place: Path, source: Array, **knobs: Any) -> Geometry:
    given_ = {"in_spec": source, "out_spec": place / "planned.zarr", "model_type": conv()}
    return Job(build(InferConfig, given_ | knobs)).geometry
