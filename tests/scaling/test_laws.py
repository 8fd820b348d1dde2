"""Laws of scaling: known truths recovered, from runs and by way of logs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scaling.estimates import Amdahl, Usl, amdahl, karp_flatt, peak, usl

from ..parameters import mainly
from .kit import only, repeated, run, weak


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (1, 2, 4)])
def test_fits_are_refused_with_too_few_sizes(sizes: tuple[int, ...]) -> None:
    study = only(repeated(lambda n: n**0.9, sizes))
    assert isinstance(study.usl, str)
    count = f"{len(sizes)} size{'s' * (len(sizes) > 1)}"
    assert f"refused with {count}; it takes 4" in study.usl
    assert isinstance(study.amdahl, Amdahl) == (len(sizes) == 3)
    if len(sizes) < 3:
        assert f"refused with {count}; it takes 3" in str(study.amdahl)


@given(st.lists(st.floats(0.3, 1.3), min_size=3, max_size=6))
def test_bounded_usl_is_what_scipy_finds(efficiencies: list[float]) -> None:
    p = 2.0 ** np.arange(len(efficiencies) + 1)
    speedups = np.array([1.0, *efficiencies]) * p
    optimize = pytest.importorskip("scipy.optimize")
    expected, _ = optimize.nnls(np.stack([p - 1, p * (p - 1)], axis=1), p / speedups - 1)
    assert usl(p, speedups) == pytest.approx(expected, abs=1e-9)


@given(st.floats(0, 0.3), st.floats(0, 0.01))
def test_laws_find_what_they_were_given(sigma: float, kappa: float) -> None:
    p = np.array([1.0, 2, 4, 8, 16])
    speedups = p / (1 + sigma * (p - 1) + kappa * p * (p - 1))
    assert usl(p, speedups) == pytest.approx([sigma, kappa], abs=1e-9)
    serial = 1 / (sigma + (1 - sigma) / p)
    assert amdahl(p, serial) == pytest.approx(sigma, abs=1e-12)
    assert karp_flatt(serial[3], 8) == pytest.approx(sigma, abs=1e-12)


def test_known_usl_is_recovered_within_its_interval() -> None:
    sigma, kappa, hits = 0.03, 0.002, 0
    for seed in range(20):
        runs = repeated(
            lambda n: n / (1 + sigma * (n - 1) + kappa * n * (n - 1)), (1, 2, 4, 8, 16), seed=seed
        )
        study = only(runs)
        assert isinstance(study.usl, Usl)
        usl = study.usl
        assert usl.peak.value == pytest.approx(np.sqrt((1 - sigma) / kappa), rel=0.15)
        assert usl.peak.low < usl.peak.value < usl.peak.high
        for interval, truth in ((usl.sigma, sigma), (usl.kappa, kappa)):
            hits += interval.low <= truth <= interval.high
    assert hits >= 37  # of 40


@pytest.mark.parametrize("runs", mainly([2, 4], 0))
def test_efficiency_and_the_share_of_karp_and_flatt_are_covered(runs: int) -> None:
    hits = shares = 0
    for seed in range(60):
        point = only(repeated(lambda n: n**0.9, (1, 4), runs=runs, seed=seed)).points[1]
        hits += point.efficiency.low <= 4**-0.1 <= point.efficiency.high
        share = point.karp_flatt
        shares += share.low <= float(karp_flatt(4**0.9, 4)) <= share.high
    assert hits == shares >= 55


def test_a_weak_study_has_its_intervals_too() -> None:
    runs = [weak(n, t) for n, t in ((1, 100.0), (1, 101.0), (4, 110.0), (4, 112.0))]
    point = only(runs).points[1]
    assert point.speedup.value == pytest.approx(4 * 201 / 222)
    assert point.speedup.low < point.speedup.value < point.speedup.high
    assert point.efficiency.low == pytest.approx(point.speedup.low / 4)


def test_laws_never_turn_before_the_baseline() -> None:
    assert peak(0.5, 10.0) == 1.0
    assert peak(1.5, 0.1) == 1.0
    straight = only([run(n, 100 / n, job=str(n)) for n in (1, 2, 4, 8)])
    assert isinstance(straight.usl, Usl)
    assert straight.usl.peak is None


def test_a_peak_counts_devices_and_not_multiples_of_the_baseline() -> None:
    def times(n: float) -> float:
        return n / (1 + 0.01 * n * (n - 1))

    study = only([run(4 * n, 100 / times(n), nodes=n) for n in (1, 2, 4, 8)])
    assert isinstance(study.usl, Usl)
    assert study.usl.peak.value == pytest.approx(40)
    assert study.usl.peak.low is None
