"""What `find_reach` finds of a network from outside is what arithmetic says of its layers."""

import pytest
from torch import nn

from penstock.models import REGISTRY, bits_that_vary, find_reach, load_model, probes
from tests.networks import FAR, LOCAL, Sight, conv, seeded

QUICK = ("plain", "strided", "2-D", "fifths")
QUICK_FAR = (
    *("instance norm", "position", "farther where bright", "mask at a far index"),
    *("tiles of its own", "centred in a multiple", "edges left out", "size in voxels"),
    *("normalised in float32", "begun by data"),
)
"""Networks that the default tests look at."""


def _cases(table: dict[str, object], quick: tuple[str, ...]) -> list[object]:
    slow, long = pytest.mark.slow, pytest.mark.long
    marks = {"MONAI SwinUNETR": long, **dict.fromkeys(quick, ())}  # the largest: ten seconds
    return [pytest.param(name, marks=marks.get(name, slow)) for name in table]


@pytest.mark.parametrize("name", _cases({**LOCAL}, QUICK))
def test_the_reach_is_that_of_the_layers(name: str) -> None:
    make, sight = LOCAL[name]
    model = load_model(seeded(make))
    axes = model.spatial_axes or 3
    reach = find_reach(model, axes)
    assert reach.exact and reach.places >= 2 * axes
    for axis in range(axes):
        assert Sight(reach.period[axis], reach.before[axis], reach.after[axis]) == sight


@pytest.mark.slow
def test_a_context_of_more_than_a_hundred_voxels_is_found() -> None:
    net = seeded(lambda: nn.Sequential(*(conv(1, 1, 5, 20) for _ in range(3)), conv(1, 1)))
    reach = find_reach(load_model(net), 3)
    assert reach.exact and reach.before == reach.after == (121,) * 3


@pytest.mark.parametrize("name", _cases({**FAR}, QUICK_FAR))
def test_what_no_overlap_makes_exact_is_told_with_its_reason(name: str) -> None:
    if name.startswith("MONAI"):
        pytest.importorskip("monai")
    make, reason = FAR[name]
    model = load_model(seeded(make))
    reach = find_reach(model, model.spatial_axes or 3)
    assert not reach.exact and reason in reach.blame


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "identity" else [pytest.mark.slow]) for n in REGISTRY]
)
def test_the_registry_ships_what_is_found(name: str) -> None:
    if name in ("prithvi-refiner-300m", "prithvi-refiner-600m"):
        pytest.skip("too large for a test; the same code as the smaller ones")
    model = load_model(name, untrained=True)
    assert find_reach(model, model.spatial_axes or 3) == REGISTRY[name].reach


def test_a_network_is_not_changed_and_bits_are_compared() -> None:
    net = conv(1, 1)
    before = net.weight.clone()
    model = load_model(net)
    assert find_reach(model, 3).before == (1, 1, 1)
    assert {*bits_that_vary(model, 3)} == {"batch", "threads"}
    assert net.weight.equal(before) and not net._forward_hooks


def test_a_side_is_looked_for_that_is_enough_along_all_axes() -> None:
    wide = nn.Conv3d(1, 1, (1, 1, 5), padding=(0, 0, 4), dilation=2, padding_mode="reflect")
    net = nn.Sequential(nn.Conv3d(1, 1, 2, 2), wide, nn.Upsample(scale_factor=2))
    reach = find_reach(load_model(seeded(lambda: net)), 3)  # of 8 voxels along x, 4 reach the layer
    assert reach.exact and reach.step == (2, 2, 2) and reach.before == (0, 0, 8)


def test_a_network_of_another_shape_is_not_searched_and_not_blamed() -> None:
    net = nn.ConvTranspose2d(1, 1, 2, stride=2)
    line = find_reach(load_model(seeded(lambda: net)), 2).line()
    assert line == "no overlap is known to be exact: its output has another shape than its input"


@pytest.mark.slow
def test_a_search_ends_at_its_bound_and_says_what_it_did_not_look_at(monkeypatch) -> None:
    make, _ = LOCAL["plain"]
    monkeypatch.setattr(probes, "_MOST_WORK", 2e8)
    reach = find_reach(load_model(seeded(make)), 3)
    assert not reach.exact and reach.partly and not reach.before
    assert "more than 200 M operations" in reach.line() and "along" in reach.line()
    assert reach.line().startswith("no overlap is known to be exact")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_bits_of_a_compiled_network_are_compared_where_it_is_asked_for() -> None:
    assert bits_that_vary(load_model(conv(1, 1)), 3, compiled=True)["compile"] is not None
