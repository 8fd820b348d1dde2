"""Steps of many devices: published efficiencies, and what the model does not know."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.scaling.runs import Rank
from penstock.scaling.simulate import (
    DeviceStep,
    Network,
    Prediction,
    all_reduce,
    assumptions_of,
    device_of_run,
    predict_step,
    with_several,
)

from ..places import ROOT
from .kit import run


def a100(per_node: int = 8) -> Network:
    """NVLink 3: 600 GB/s for each GPU in both directions together (NVIDIA A100 data sheet), HDR200
    between nodes. What NCCL takes for a turn is some microseconds."""
    return Network(per_node, 300e9, 25e9, 3e-6, 10e-6, 0.5)


def v100(per_node: int = 8) -> Network:
    """NVLink 2: 300 GB/s for each GPU in both directions together (NVIDIA V100 data sheet)."""
    return replace(a100(per_node), inside=150e9)


def device(batch: int, rate: float, parameters: float) -> DeviceStep:
    """From samples a second on one device; the backward pass is two thirds of a step, as twice as
    many multiplications are in it, and gradients are float32."""
    return DeviceStep(batch / rate, 2 / 3 * batch / rate, batch, 4 * parameters)


# Parameters: SSD300 on ResNet-50's first stages 22.9 M (8.5 M, 3.8 M in layers of its own, 10.6 M
# in its heads); ResNet-152 60.2 M and ViT-B/16 86.6 M (torchvision). Rates of one device and
# efficiencies as they were published: NVIDIA DeepLearningExamples, PyTorch/Detection/SSD/README.md,
# "Training performance" (AMP, TF32, FP32) and "Time to train"; willgpaik, pytorch-ddp-bench, weak
# scaling, fp16.
PUBLISHED = [
    ("SSD A100 AMP batch 64", a100(), device(64, 662.91, 22.9e6), 4, 2581.24 / 4 / 662.91),
    ("SSD A100 AMP batch 64", a100(), device(64, 662.91, 22.9e6), 8, 5252.84 / 8 / 662.91),
    ("SSD A100 AMP batch 128", a100(), device(128, 724.41, 22.9e6), 8, 5733.98 / 8 / 724.41),
    ("SSD A100 TF32, time to train", a100(), device(64, 364.27, 22.9e6), 8, 0.955),
    ("SSD V100 AMP batch 64", v100(), device(64, 322.81, 22.9e6), 8, 2520.50 / 8 / 322.81),
    ("SSD V100 FP32 batch 32", v100(), device(32, 107.22, 22.9e6), 8, 840.35 / 8 / 107.22),
    ("ResNet-152 A100", a100(), device(512, 1190, 60.2e6), 8, 0.974),
    ("ResNet-152 V100", v100(), device(128, 503, 60.2e6), 8, 0.954),
    ("ViT-B A100", a100(), device(1024, 1030, 86.6e6), 8, 0.980),
    ("ViT-B V100", v100(), device(128, 381, 86.6e6), 8, 0.959),
]


# Of the same README, on 1, 4 and 8 devices.
SEEN = [
    ("SSD A100 AMP batch 64", a100(), 64, 662.91, 2581.24, 5252.84),
    ("SSD A100 AMP batch 128", a100(), 128, 724.41, 2885.55, 5733.98),
    ("SSD A100 TF32 batch 64", a100(), 64, 364.27, 1432.73, 2838.76),
    ("SSD A100 TF32 batch 128", a100(), 128, 377.18, 1493.13, 2967.23),
    ("SSD V100 AMP batch 32", v100(), 32, 296.80, 1115.59, 2153.96),
    ("SSD V100 AMP batch 64", v100(), 64, 322.81, 1238.27, 2520.50),
    ("SSD V100 FP32 batch 32", v100(), 32, 107.22, 419.54, 840.35),
]


@pytest.mark.parametrize("name, network, batch, alone, four, eight", SEEN)
def test_with_a_step_of_four_every_published_one_of_eight_is_within_five_points(
    name: str, network: Network, batch: int, alone: float, four: float, eight: float
) -> None:
    one = replace(device(batch, alone, 22.9e6), seen=(4, batch / (four / 4)))
    made = [predict_step(one, network, n) for n in (1, 4, 8)]
    assert made[0].efficiency == pytest.approx(1)
    assert made[1].efficiency == pytest.approx(four / 4 / alone)
    assert made[2].efficiency == pytest.approx(eight / 8 / alone, abs=0.05), name
    assert any(line.startswith("A step of 4 devices took") for line in assumptions_of(one, network))


def test_a_step_of_several_below_what_one_computes_is_contradicted() -> None:
    one = device(32, 296.80, 22.9e6)
    text = " ".join(assumptions_of(replace(one, seen=(4, 0.5 * one.compute_s)), a100()))
    assert "A step of 4 devices took 53.9 ms, and all of this needs 108 ms: one of the" in text
    assert "the measured step is not used" in text
    explained = predict_step(one, a100(), 4)
    text = " ".join(assumptions_of(replace(one, seen=(4, explained.step_s)), a100()))
    assert "took 108 ms, which all of this explains." in text
    assert "wrong" not in text


def test_a_run_of_several_tells_what_its_steps_took() -> None:
    took = {"forward": 9.0, "backward": 15.0, "optimizer": 3.0, "communication": 3.0, "step": 40.0}
    ranks = (Rank(0, took | {"data_wait": 0.1}), Rank(1, took | {"data_wait": 6.1}))
    one = DeviceStep(0.1, 0.06, 32, 100e6)
    several = run(2, 40.0, epochs=1, steps=100, batch=32, ranks=ranks)
    assert with_several(one, several).seen == (2, pytest.approx(0.30 + 0.031))
    with pytest.raises(UsageError, match="is a run of one device, too"):
        with_several(one, replace(several, devices=1))
    with pytest.raises(
        UsageError, match="has batches of 16 on each device, and the run of one has"
    ):
        with_several(one, replace(several, batch=16))
    with pytest.raises(UsageError, match="lacks phases or steps"):
        with_several(one, run(2))


# MLPerf Training 3.0, ResNet-50 on DGX H100 (mlcommons/training_results_v3.0, NVIDIA, the first
# results): 56,080 images a second on 8 devices with batches of 408, 294,700 on 64 with 50 each; 36
# epochs of 1,281,167 images on both, 50 on 512. Minutes to train: 13.466, 2.664 and 0.509.
DGX_H100 = Network(8, 450e9, 400e9, 3e-6, 10e-6, 0.5)


def published_table() -> str:
    """Every published point, what is predicted of it, and which steps were told."""
    ssd = replace(device(32, 296.80, 22.9e6), seen=(4, 32 / (1115.59 / 4)))
    resnet = device(50, 56_080 / 8, 25.6e6)  # a sample takes as long as in batches of 408
    of_64 = replace(resnet, seen=(64, 50 * 64 / 294_700))
    to_train = 50 * 1_281_167 / 60 / 0.509 / 64 / 56_080
    name = "ResNet-50 H100 batch 50"
    steps = "**of 1 and of 64 devices{}**"
    points = [(*point, "of 1 device") for point in PUBLISHED]
    points += [
        (SEEN[4][0], v100(), ssd, 8, 2153.96 / 8 / 296.80, "**of 1 and of 4 devices**"),
        (name, DGX_H100, of_64, 64, 294_700 / 8 / 56_080, steps.format(": told, not predicted")),
        (name, DGX_H100, of_64, 512, to_train, steps.format("")),
    ]
    lines = [
        "| point | devices | published | simulated | measured steps that were told |",
        "|---|---:|---:|---:|---|",
    ]
    for name, network, one, n, published, steps_of in points:
        made = predict_step(one, network, n)
        assert made.efficiency == pytest.approx(published, abs=0.05), (name, n)
        lines.append(f"| {name} | {n} | {published:.1%} | {made.efficiency:.1%} | {steps_of} |")
    return "\n".join(lines)


def test_the_page_names_which_published_points_were_told_with_a_step_of_several() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    between = page.partition("<!-- simulate: begin -->")[2].partition("<!-- simulate: end -->")[0]
    assert between.strip() == published_table()


def test_horovod_on_512_gpus_within_five_points() -> None:
    """Horovod's own figures: 90 % for Inception-v3 and ResNet-101, 68 % for VGG-16, on 128 servers
    of 4 P100 with 25 GbE (3.125 GB/s). One P100 does 142, about 132 and 154 images a second in
    TensorFlow's benchmarks (batch 64; ResNet-101 lies between 219 of ResNet-50 and 91.8 of
    ResNet-152 by its operations); 23.8, 44.5 and 138.4 M parameters; PCIe 3 within a server."""
    network = Network(4, 12e9, 3.125e9, 5e-6, 20e-6, 0.5)
    for rate, parameters, published in (
        (142, 23.8e6, 0.90), (132, 44.5e6, 0.90), (154, 138.4e6, 0.68),
    ):  # fmt: skip
        made = predict_step(device(64, rate, parameters), network, 512)
        assert made.efficiency == pytest.approx(published, abs=0.05), rate


def test_a_ring_moves_its_bytes_round_twice() -> None:
    assert all_reduce(8e9, 4, 1e9, 0) == pytest.approx(12)
    assert all_reduce(0, 1024, 1e9, 1e-5) == pytest.approx(2 * 1023e-5)


def simple(**fields: Any) -> list[Prediction]:
    given = {"overlap": 0.0} | fields
    one = DeviceStep(0.1, 0.06, 32, given.pop("gradient_bytes", 100e6))
    one = replace(one, jitter=given.pop("jitter", 0.0))
    return [predict_step(one, replace(a100(4), **given), n) for n in (1, 4, 8, 64, 512, 4096)]


def test_more_devices_are_never_more_efficient() -> None:
    for made in (simple(), simple(jitter=0.05)):
        shares = [one.efficiency for one in made]
        assert shares[0] == pytest.approx(1)
        assert shares == sorted(shares, reverse=True)


def test_the_backward_pass_hides_no_more_than_it_lasts() -> None:
    made = simple(between=1e9, overlap=1.0)[-1]
    assert made.exposed_s == pytest.approx(made.sum_s - 0.06)
    assert made.bound_by == "the sum"
    assert simple(overlap=1.0)[1].exposed_s == 0


def test_a_loader_that_was_too_slow_stays_so_on_every_device() -> None:
    one = DeviceStep(0.1, 0.06, 32, 100e6, data_s=0.16)
    alone, *_, many = [predict_step(one, replace(a100(4), overlap=0.0), n) for n in (1, 4096)]
    assert alone.samples_per_s == pytest.approx(32 / 0.16)
    assert many.efficiency == pytest.approx(1)  # the sum lasts no longer than the wait
    assert many.bound_by == "data"


@pytest.mark.parametrize(
    ("fields", "devices", "bound"),
    [
        ({}, 4096, "computing"),
        ({"jitter": 0.4}, 4, "computing"),
        ({"jitter": 0.4}, 4096, "the slowest device"),
        ({"reads_s": 0.2}, 8, "data"),
        ({"reads_s": 0.05, "jitter": 1.0}, 64, "the slowest device"),
        ({"data_s": 0.3}, 8, "data"),
        ({"gradient_bytes": 1e10}, 64, "the sum"),
        ({"seen": (2, 0.5)}, 64, "what is not in the model"),
    ],
)
def test_what_takes_most_is_named(fields: dict[str, Any], devices: int, bound: str) -> None:
    one = replace(DeviceStep(0.1, 0.06, 32, 1e6), **fields)
    made = predict_step(one, replace(a100(4), overlap=0.0), devices)
    assert made.bound_by == bound
    assert sum(made.parts.values()) == pytest.approx(made.step_s)
    assert made.parts[bound] == max(made.parts.values())


def test_a_run_without_workers_reads_before_each_step() -> None:
    totals = {"data_wait": 5.0, "forward": 4.0, "backward": 6.0}
    serial = run(
        1, 20.0, epochs=1, steps=100, settings={"number of workers": "0"},
        ranks=(Rank(0, totals),), gradient_bytes=10**8,
    )  # fmt: skip
    one = device_of_run(serial)
    assert (one.data_s, one.reads_s) == (0, pytest.approx(0.05))
    slow = replace(a100(4), between=1e9, overlap=0.0)
    alone, many = [predict_step(one, slow, n) for n in (1, 64)]
    assert alone.step_s == pytest.approx(0.15)
    assert many.step_s == pytest.approx(0.15 + many.exposed_s)
    text = " ".join(assumptions_of(one, slow))
    assert "no workers and makes a batch in 50.0 ms before it computes" in text
    assert "prefetches" not in text


def test_jitter_costs_what_the_slowest_of_many_takes() -> None:
    one, *_, many = simple(jitter=0.05, gradient_bytes=0, inside_latency=0, between_latency=0)
    assert one.efficiency == pytest.approx(1)
    drawn = np.random.default_rng(0).normal(1, 0.05, (200, 4096)).max(axis=1).mean()
    assert many.efficiency == pytest.approx(1 / drawn, rel=0.005)


def test_a_run_of_one_device_gives_its_device() -> None:
    totals = {"step": 30.0, "data_wait": 3.0, "forward": 9.0, "backward": 15.0, "optimizer": 3.0}
    one = run(
        1, 40.0, epochs=3, steps=100, gradient_bytes=500,
        ranks=(Rank(0, totals, (0.1, 0.1, 0.11, 0.09)),),
    )  # fmt: skip
    step = device_of_run(one)
    assert step.compute_s == pytest.approx(0.09)
    assert step.backward_s == pytest.approx(0.05)
    assert step.gradient_bytes == 500
    assert step.jitter == pytest.approx(1.4826 * 0.05, rel=0.01)
    assert step.data_s == pytest.approx(0.1)  # what its loader takes: it waited for 3 of 30 s
    fed = replace(one, ranks=(Rank(0, totals | {"data_wait": 0.1}, one.ranks[0].local),))
    assert device_of_run(fed).data_s == 0
    with pytest.raises(UsageError, match="is a run of 2 devices; give one of 1"):
        device_of_run(run(2))
    with pytest.raises(UsageError, match="lacks phases"):
        device_of_run(run(1))
