"""Synthetic weather: any sample alone, in the geometry of the seed."""

import numpy as np
import pytest

from penstock.data.weather import PRESETS, World

GRID = (8, 16)


@pytest.mark.parametrize(
    ("preset", "array", "channels", "chunk"),
    [
        ("ufs-p1", "inputs", 187, 13),
        ("ufs-p1", "targets", 83, 13),
        ("ufs-p2", "inputs", 187, 17),
        ("ufs-p2", "targets", 85, 17),
    ],
)
def test_presets_have_the_channels_and_chunks_of_the_seed(preset, array, channels, chunk) -> None:
    layout = PRESETS[preset].layouts((192, 384))[array]
    assert layout.shape == (192, 384, channels)
    assert layout.chunks == (192, 384, chunk)
    assert len(set(layout.channels)) == channels
    if preset == "ufs-p1" and array == "inputs":
        assert layout.num_bytes == 55_148_544  # the seed's "inputs 55 MB"


def test_a_sample_made_alone_by_a_new_world_is_the_same() -> None:
    preset = PRESETS["ufs-p1"]
    first, again = World(GRID, 3), World(GRID, 3)
    for time in (2, 0, 1):
        first.sample(preset, time)
    for name, array in first.sample(preset, 7).items():
        np.testing.assert_array_equal(array, again.sample(preset, 7)[name])
    other = World(GRID, 4).sample(preset, 7)
    assert not np.array_equal(first.sample(preset, 7)["inputs"], other["inputs"])


@pytest.mark.slow
def test_samples_follow_from_one_another_in_time() -> None:
    """What is the step before in one sample was the step in the sample before."""
    world, preset = World(GRID, 0), PRESETS["ufs-p1"]
    names = preset.layouts(GRID)["inputs"].channels
    now = {name: world.sample(preset, 5)["inputs"][..., i] for i, name in enumerate(names)}
    then = {name: world.sample(preset, 4)["inputs"][..., i] for i, name in enumerate(names)}
    targets = preset.layouts(GRID)["targets"].channels
    np.testing.assert_array_equal(now["tmp_500_t-1"], then["tmp_500_t+0"])
    target = world.sample(preset, 4)["targets"][..., targets.index("tmp_500_t+1")]
    np.testing.assert_array_equal(now["tmp_500_t+0"], target)
    np.testing.assert_array_equal(now["land_static_t+0"], then["land_static_t+1"])
    assert set(np.unique(now["land_static_t+0"])) <= {0.0, 1.0}
    assert not np.array_equal(now["tmp_500_t+0"], now["tmp_500_t-1"])
    for clock in ("year_progress_sin", "year_progress_cos"):
        assert np.ptp(now[f"{clock}_t+0"]) == 0
    assert now["dswrf_avetoa_t+0"].min() == 0
    assert now["dswrf_avetoa_t+0"].max() > 900
