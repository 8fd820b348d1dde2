"""By default tiles leave no seam: tiled and untiled runs agree, and what is decided is obeyed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.data import Box, Grid
from penstock.data.box import reflect
from penstock.inference import Job, run_job
from penstock.inference.opening import seam_error, seams
from penstock.inference.opening.seam_error import SeamTrial
from penstock.inference.opening.seam_numbers import label_f1, seam_error_of
from penstock.inference.opening.selection import Volume
from penstock.inference.tiling.exact import chunk_and_halo, is_exact, least_overlap
from penstock.models import REGISTRY, Model, Reach, Reduction, find_reach, load_model
from tests.networks import LOCAL, Made, conv, seeded

from .kit import opened

SMALL = ((25, 30, 21), (32, 32, 32), (17, 35, 45))


@pytest.fixture
def measured_soon(monkeypatch) -> None:
    """Differences at seams are measured in jobs of fewer patches, too, which take less time."""
    monkeypatch.setattr(seam_error, "_SHARE", 0.05)


def _untiled(net: nn.Module, volume: NDArray[Any], reach: Reach) -> NDArray[Any]:
    """The network on the whole volume, reflected at its edges. Its grid begins with the volume."""
    axes = len(reach.step)
    places, low = [], []
    each = zip(volume.shape[-axes:], least_overlap(reach), reach.step, reach.period, strict=True)
    for n, o, step, period in each:
        grid = math.lcm(step, period)
        before = grid * (-(-o // grid) + 1)
        length = step * -(-(before + n + o + 2 * step) // step)
        places.append(reflect(np.arange(-before, length - before), 0, n))
        low.append(slice(before, before + n))
    planes = volume if axes == 2 else volume[None]
    with torch.no_grad():
        each = [
            net(torch.from_numpy(plane[np.ix_(*places)])[None, None])[0, 0].numpy()[tuple(low)]
            for plane in planes
        ]
    return np.stack(each) if axes == 2 else each[0]


def _check_exact(name: str, shape: tuple[int, ...], *tilings: int) -> None:
    """In the patches that are chosen by default, and in some of so many eights of voxels of their
    own."""
    make, _ = LOCAL[name]
    net = seeded(make).double()
    model = load_model(net)
    reach = find_reach(model, model.spatial_axes or 3)
    volume = np.random.default_rng(len(shape)).random(shape)
    expected = _untiled(net, volume, reach)
    overlap = least_overlap(reach)
    for tiling in (0, *tilings):
        knobs: dict[str, Any] = {}
        if tiling:
            sides = zip(overlap, reach.step, strict=True)
            knobs["patch"] = tuple(-(-(o + 8 * tiling) // s) * s for o, s in sides)
        out = np.zeros_like(volume)
        job = opened(
            out, in_spec=volume, model_type=net, normalize="none", head_kind="intensity",
            **{"patch": None, "overlap": None, **knobs},
        )  # fmt: skip
        assert job.plan.facts.seams.startswith("exact")
        cut = max(shape[-len(overlap) :]) > {2: 1024, 3: 192}[len(overlap)]
        assert job.plan.num_patches > (1 if len(overlap) == 3 else len(volume)) or not (
            tiling or cut
        )
        run_job(job)
        assert np.abs(out - expected).max() <= 1e-10 * np.ptp(expected)


@pytest.mark.parametrize("name", ["strided"])
def test_tiles_equal_the_whole(name: str) -> None:
    _check_exact(name, (20, 30, 25), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_tiles_of_all_networks_equal_the_whole(name: str) -> None:
    for tiling, shape in enumerate(SMALL, 1):
        _check_exact(name, shape, tiling)


def _far() -> nn.Module:
    return nn.Sequential(conv(1, 2), nn.InstanceNorm3d(2), conv(2, 1))


def test_what_the_user_says_is_kept() -> None:
    out = np.zeros((20, 20, 20), "uint8")
    said = opened(out, patch=(12,), overlap=(4,))
    assert (said.geometry.patch, said.geometry.overlap) == ((12,) * 3, (4,) * 3)
    assert said.plan.facts.seams.startswith("exact")
    assert opened(out, patch=(12,), overlap="auto").geometry.overlap == (0, 0, 0)
    assert opened(out, patch=None, overlap=(10,)).geometry.patch == (64,) * 3
    far = opened(out, patch=None, overlap=None, model_type=_far(), head_kind="intensity")
    assert (far.geometry.patch, far.geometry.overlap) == ((64,) * 3, (10,) * 3)
    assert "InstanceNorm3d" in dict(far.plan.lines())["seams"]
    blended = opened(out, patch=None, overlap=None, seam_mode="blend")
    assert blended.geometry.overlap == (10,) * 3


def test_trim_voxels_and_a_halo_are_context_too() -> None:
    out = np.zeros((20, 20, 20), "uint8")
    assert opened(out, overlap=None, patch=None, trim_voxels=5).geometry.overlap == (10,) * 3
    assert opened(out, overlap=None, patch=None, halo=3).geometry.overlap == (6,) * 3


@pytest.mark.slow
def test_an_automatic_patch_computes_less_and_is_recorded(tmp_path, monkeypatch) -> None:
    volume, out = np.zeros((8, 200, 200), np.uint8), tmp_path / "out.zarr"
    knobs: dict[str, Any] = {"in_spec": volume, "model_type": conv(1, 1), "overlap": None,
                             "head_kind": "intensity"}  # fmt: skip
    plain = opened(out, patch=None, **knobs)
    best = opened(out, patch="auto", batch="auto", **knobs)
    assert isinstance(best.config.patch, tuple) and best.config.batch is None  # on a CPU
    assert best.plan.patch_amplification < 0.95 * plain.plan.patch_amplification
    assert best.plan.facts.seams.startswith("exact")
    run_job(best)
    monkeypatch.setattr(seams, "_MOST_CUTS", 0)  # another machine would choose another
    again = opened(out, patch="auto", batch="auto", resume=True, **knobs)
    assert again.geometry.patch == best.geometry.patch
    assert run_job(again).blocks_written == 0


@pytest.mark.slow
def test_what_is_found_is_kept_by_weights_and_code(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, searched = load_model(conv(1, 1)), list[Reach]()

    def find(*given: Any) -> Reach:
        searched.append(find_reach(*given))
        return searched[-1]

    def anew(model: Model) -> bool:
        """Whether a new process looks for what a model sees."""
        monkeypatch.setattr(seams, "_HERE", {})
        before = len(searched)
        assert seams.reach_of(model, 3) == searched[-1]
        return len(searched) > before

    monkeypatch.setattr(seams, "find_reach", find)
    assert anew(model) and not anew(model)
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text("{")
    assert anew(model) and not anew(model)
    assert anew(load_model(conv(1, 1)))  # has other weights
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert anew(model) and anew(model)


@pytest.mark.parametrize(
    ("extent", "overlap", "step", "patch"),
    [
        ((256, 256, 256), 16, 4, (144, 144, 144)),
        ((1000, 512, 20), 16, 4, (144, 144, 48)),
        ((256, 256, 256), 0, 4, (128, 128, 128)),
        ((256, 256, 600), 0, 1, (128, 128, 128)),
        ((3, 600), 0, 1, (3, 512)),
        ((4000, 300), 10, 2, (520, 320)),
        ((256, 256, 256), 96, 8, None),
    ],
)
def test_a_patch_is_a_chunk_and_its_halo(extent, overlap, step, patch) -> None:
    axes = len(extent)
    assert chunk_and_halo(extent, (overlap,) * axes, (step,) * axes, (128,) * axes) == patch


@pytest.mark.parametrize(
    ("extent", "chunk", "patch"),
    [
        ((256, 256, 600), (64, 64, 64), (128, 128, 128)),
        ((100, 90, 600), (128, 128, 128), (100, 90, 128)),
        ((100, 90, 60), (32, 32, 32), (100, 90, 60)),
        ((256, 2048, 2048), (32, 512, 512), (32, 256, 256)),
        ((200, 2048, 2048), (1, 2048, 2048), (8, 512, 512)),
        ((200, 2048, 2048), (1, 1, 1), (8, 512, 512)),
    ],
)
def test_a_network_that_sees_one_voxel_takes_whole_chunks(extent, chunk, patch) -> None:
    assert chunk_and_halo(extent, (0,) * 3, (1,) * 3, chunk) == patch


def test_exact_is_said_of_patches_on_the_grid_alone() -> None:
    reach = REGISTRY["denoise-tiny"].reach
    assert is_exact(reach, (64,) * 3, (16,) * 3)
    assert not is_exact(reach, (64,) * 3, (12,) * 3)
    assert not is_exact(reach, (66,) * 3, (18,) * 3)
    assert not is_exact(Reach("it sees far"), (64,) * 3, (16,) * 3)


class _Halved(nn.Module):
    """It sees five voxels, on a grid of two that begins with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.down = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 2, stride=2)
        self.coarse, self.up = nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.joined = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x).relu()
        coarse = self.coarse(self.down(fine)).relu()
        return self.joined(torch.cat([fine, self.up(coarse)], 1))


def test_the_grid_of_a_network_begins_with_the_volume() -> None:
    net, volume = seeded(_Halved).double(), np.random.default_rng(3).random((1, 72, 72))
    reach = find_reach(load_model(net), 2)
    assert (reach.before, reach.after, reach.period) == ((5, 5), (5, 5), (2, 2))
    assert least_overlap(reach) == (12, 12)
    assert is_exact(reach, (40, 40), (12, 12)) and not is_exact(reach, (40, 40), (10, 10))
    out = np.zeros_like(volume)
    job = opened(out, in_spec=volume, model_type=net, normalize="none", head_kind="intensity",
                 patch=(32, 32), overlap=None)  # fmt: skip
    run_job(job)
    with torch.no_grad():
        whole = net(torch.from_numpy(volume)[None])[0].numpy()
    inner = np.s_[:, 8:-8, 8:-8]
    assert job.plan.num_patches > 4 and job.plan.facts.seams.startswith("exact")
    assert np.abs(out - whole)[inner].max() <= 1e-10 * np.ptp(whole)


def _trial(job: Job, **more: Any) -> SeamTrial:
    more = {"head": job.head_facts[0]} | more
    return SeamTrial(job.net, job.values, job.source, job.volumes[0], job.devices[0], **more)


@pytest.mark.usefixtures("measured_soon")
def test_the_difference_at_seams_is_measured_on_the_data() -> None:
    volume = np.random.default_rng(0).random((60, 60, 60)) * np.linspace(0, 9, 60)
    job = opened(
        np.zeros_like(volume), in_spec=volume, patch=(16,), overlap=(4,), model_type=_far(),
        head_kind="intensity",
    )  # fmt: skip
    trial = _trial(job)
    error = trial.error(999, 2**30)
    assert error is not None and (error.places, error.window) == (5, 2)
    assert len(error.by_distance) == 6 and 0 < error.low[0] < error.by_distance[0] < error.high[0]
    assert "at seams" in error.line() and "5 places of the data against a side 2" in error.line()
    assert (
        replace(error, by_distance=(0.0,) * 6).line().startswith("no difference at seams, measured")
    )
    measured = trial.measured(job.plan)
    assert "at seams" in measured.facts.seams and measured.facts.seam_error
    few = trial.error(101, 2**30)
    assert few is not None and (few.places, few.window, few.low) == (2, 1.25, ())
    assert " % of the local range at seams, measured on 2 places" in few.line()
    for patches, room in ((20, 2**30), (999, 1000)):  # costs more than it may, or needs more memory
        assert trial.error(patches, room) is None
    for patches, limit, why in (
        (20, 2**40, "for 20 patches that would take more than 5 % of the job"),
        (999, 0, "no larger input fits into memory"), (1, 2**40, ""),
    ):  # fmt: skip
        facts = replace(job.plan.facts, seams="no overlap is exact")
        plan = replace(job.plan, facts=facts, num_patches=patches, memory_limit=limit)
        said = trial.measured(plan).facts
        assert said.seams.partition("not measured: ")[2] == why and said.seam_error is None


@pytest.mark.usefixtures("measured_soon")
def test_what_is_measured_on_is_read_in_as_few_chunks_as_can_be(here, monkeypatch) -> None:
    volume = np.random.default_rng(0).random((120, 120, 120)).astype(np.float32)
    zarr.create_array("in.zarr", data=volume, chunks=(40, 40, 60))
    job = opened(
        np.zeros_like(volume), in_spec="in.zarr", patch=(24,), overlap=(4,), model_type=_far(),
        head_kind="intensity",
    )  # fmt: skip
    boxes, read = list[Box](), Volume.array
    monkeypatch.setattr(Volume, "array", lambda *at: boxes.append(at[2]) or read(*at))
    error = _trial(job).error(999, 2**30)
    assert error.places == len(boxes) > 2 and {box.shape for box in boxes} == {(48, 48, 48)}
    chunks = Grid(Box.of((0, 0, 0), volume.shape), (40, 40, 60))
    assert [chunks.touching(box).size for box in boxes] == [4] * len(boxes)


@pytest.mark.usefixtures("measured_soon")
def test_changed_labels_and_their_f1_are_measured() -> None:
    volume = np.random.default_rng(0).random((50, 50, 50)).astype(np.float32)
    net = seeded(lambda: nn.Sequential(conv(1, 2), nn.InstanceNorm3d(2), conv(2, 3)))
    labels, scores = np.zeros(volume.shape, np.uint8), np.zeros((3, *volume.shape), np.float32)
    knobs: dict[str, Any] = {"in_spec": volume, "patch": (16,), "overlap": (4,), "model_type": net}
    job = opened(labels, reduce="argmax", **knobs)
    error = _trial(job).error(200, 2**30)
    assert 0 < error.by_distance[0] < 0.1 and 0.9 < error.f1 < 1
    assert "of the labels change at seams" in error.line() and "F1 0.9" in error.line()
    job = opened(scores, head_kind="scores", **knobs)  # what blends scores reduces them later
    head = replace(job.head_facts[0], kind="labels", reduction=Reduction.parse("argmax"))
    assert _trial(job, head=head).error(200, 2**30) == error


@pytest.mark.usefixtures("measured_soon")
def test_the_difference_at_blended_seams_is_that_of_the_mean_of_two() -> None:
    def place(x: torch.Tensor) -> torch.Tensor:  # where a voxel lies along x, in its input
        return x * 0 + torch.arange(x.shape[-1]).to(x)

    volume = np.random.default_rng(0).random((40, 40, 40)).astype(np.float32)
    job = opened(
        np.zeros_like(volume), in_spec=volume, patch=(8, 8, 16), overlap=(4, 4, 6),
        model_type=Made(place), head_kind="intensity", seam_mode="blend", window="constant",
    )  # fmt: skip
    assert job.plan.facts.seams.startswith("blended, so not exact; about ")
    error = _trial(job, sliding=job.sliding).error(999, 2**30)
    assert error is not None and error.blended
    # Patches begin at voxels 1 and 11 of 32: both give half where they overlap, for three voxels.
    # The range is that of the window's middle, voxels 8 to 23.
    expected = [6 / 15] * 3 + [(1 + 11) / 2 / 15] * 2
    assert error.by_distance == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("measured_soon")
def test_what_the_user_names_is_measured_too() -> None:
    volume = np.random.default_rng(0).random((60, 60, 60))
    job = opened(
        np.zeros_like(volume), in_spec=volume, patch=(16,), overlap=(4,), model_type=seeded(_far),
        head_kind="intensity",
    )  # fmt: skip
    assert job.plan.facts.seam_error and job.plan.facts.seams.startswith("about ")


def test_f1_is_a_mean_over_labels_and_intervals_cover_the_mean() -> None:
    one, other = np.array([0, 1, 1, 2, 2, 0]), np.array([0, 1, 2, 2, 2, 0])
    assert label_f1(one, other) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert label_f1(one * 0, other * 0) is None
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        places = [random.gamma(4, 0.01, 1) for _ in range(4)]
        error = seam_error_of(places, [0.0], [], (48, 64, 128), labels=False)
        covered += error.low[0] <= 0.04 <= error.high[0]
    assert covered >= 0.88 * 200  # a bootstrap's cover it in 160
    for power in (1.0, 1.5):  # differences that fall with a power of the side name its doubling
        falls = [np.sqrt(n ** (-2 * power) - 128 ** (-2 * power)) for n in (48, 64)]
        error = seam_error_of([np.array([falls[1]])], [falls[0]], [], (48, 64, 128), labels=False)
        assert error.halving == -(-64 * 2 ** (1 / power) // 16) * 16
    assert seam_error_of([np.ones(1)], [1.05], [], (48, 64, 128), labels=False).halving is None


def test_a_job_on_trial_measures_nothing_of_its_seams() -> None:
    volume = np.random.default_rng(0).random((60, 60, 60))
    net = seeded(lambda: nn.Sequential(conv(1, 2), nn.InstanceNorm3d(2), conv(2, 1)))
    job = opened(
        np.zeros_like(volume), in_spec=volume, patch=(16,), overlap=None, model_type=net,
        head_kind="intensity",
    )  # fmt: skip
    assert job.plan.facts.seam_error and "InstanceNorm3d" in job.plan.facts.seams
    trial = Job(job.config.model_copy(update={"overlap": None}), trial=True)
    assert not trial.plan.facts.seam_error and "InstanceNorm3d" in trial.plan.facts.seams


@pytest.mark.usefixtures("measured_soon")
@pytest.mark.parametrize(
    ("device", "amp"), [("cpu", torch.bfloat16), pytest.param("cuda", None, marks=pytest.mark.gpu)]
)
def test_device_and_dtype_measure_about_the_same(device: str, amp: torch.dtype | None) -> None:
    if not (device == "cpu" or torch.cuda.is_available()):
        pytest.skip("no CUDA device")
    volume = np.random.default_rng(0).random((40, 40, 40)) * np.linspace(0, 9, 40)
    job = opened(
        np.zeros_like(volume), in_spec=volume.astype(np.float32), patch=(16,), overlap=(4,),
        model_type=seeded(_far), head_kind="intensity",
    )  # fmt: skip
    there = replace(_trial(job), net=replace(job.net, amp=amp), device=torch.device(device))
    one, other = _trial(job).error(200, 2**30), there.error(200, 2**30)
    assert one is not None and other is not None and one != other
    assert other.by_distance[0] == pytest.approx(one.by_distance[0], rel=0.2)


class _Gated(nn.Module):
    """Channels weighted by their means over all that is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = conv(1, 4), nn.Linear(4, 4), conv(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        gates = torch.sigmoid(4 * self.gate(y.mean((2, 3, 4))))
        return self.last(y * gates[:, :, None, None, None])


def _dilated() -> nn.Module:
    return nn.Sequential(conv(1, 4), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=6, dilation=6))


def _grouped() -> nn.Module:
    return nn.Sequential(conv(1, 4), nn.GroupNorm(2, 4), nn.ReLU(), conv(4, 1))


@pytest.mark.slow
def test_the_interval_of_the_difference_at_seams_holds_tiled_and_untiled(monkeypatch) -> None:
    """At seams, or where patches are blended at the worst distance from them."""
    monkeypatch.setattr(seam_error, "_SHARE", 1.0)
    ndimage = pytest.importorskip("scipy.ndimage")
    random, around = np.random.default_rng(0).normal(size=(2, 72, 72, 72)), 16
    volume = 4 * ndimage.gaussian_filter(random[0], 1) + 60 * ndimage.gaussian_filter(random[1], 6)
    volume = volume.astype("float32")
    padded = torch.from_numpy(np.pad(volume, around, mode="symmetric"))[None, None]
    inner = (slice(around, -around),) * 3
    trimmed: dict[str, Any] = {"seam_mode": "trim"}
    constant, gaussian = ({"seam_mode": "blend", "window": w} for w in ("constant", "gaussian"))
    missed = []
    for make, ways in ((_Gated, [constant, trimmed]), (_grouped, [constant, gaussian]),
                       (_dilated, [trimmed])):  # fmt: skip
        net = seeded(make)
        with torch.no_grad():
            whole = net(padded)[0, 0].numpy()[inner]
        for knobs in ways:
            out = np.zeros_like(volume)
            job = opened(out, in_spec=volume, patch=(24,), overlap=(8,), model_type=net,
                         head_kind="intensity", normalize="none", **knobs)  # fmt: skip
            run_job(job)
            measured = job.plan.facts.seam_error
            assert measured is not None and measured["low"]
            apart = np.abs(out - whole) / np.ptp(whole)
            places, edges = np.arange(72), job.geometry.row(0).edges[1:-1]
            away = np.abs(places[:, None] + 0.5 - edges).min(1).astype(int)
            far_in = slice(edges[0] - 4, edges[-1] + 4)
            curve = [apart[far_in][away[far_in] == distance][:, far_in, far_in].mean()
                     for distance in range(measured["worst"] + 1)]  # fmt: skip
            truth, end = max(curve), measured["worst"]
            if not measured["low"][end] <= truth <= measured["high"][end]:
                missed.append((make.__name__, knobs, truth, measured["low"], measured["high"]))
    assert missed == []
