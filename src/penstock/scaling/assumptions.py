"""A simulation as a table, and its assumptions as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..base import format_bytes, format_seconds, significant
from .simulate import DeviceStep, Network, Prediction, beyond_the_model

_ROUNDED = 0.005
"""The relative difference up to which a measured step agrees with the model's: logs have few
digits."""


def assumptions_of(device: DeviceStep, network: Network) -> list[str]:
    """The assumptions of a simulation, a sentence each.

    Args:
        device: The step of one device.
        network: The network that joins the devices.

    Returns:
        Sentences, with the figures that were measured or given.
    """
    compute, backward = format_seconds(device.compute_s), format_seconds(device.backward_s)
    inside, between = (
        f"{significant(rate / 1e9)} GB/s" for rate in (network.inside, network.between)
    )
    inside_wait, between_wait = (
        f"{significant(wait * 1e6)} µs"
        for wait in (network.inside_latency, network.between_latency)
    )
    lines = [
        f"A device computes {compute} a step, {backward} of it backward, on {device.batch} samples",
        (
            f"{format_bytes(device.gradient_bytes)} of gradients are summed by a ring, first "
            "within each node"
        ),
        f"within a node of {network.per_node} devices each has {inside}, {inside_wait} a message",
        f"between nodes each node has {between}, {between_wait} a message",
        f"{network.overlap:.0%} of the sum may hide behind that; the range is for none and all",
    ]
    lines.append(
        f"steps vary by {device.jitter:.1%}, and each waits for the slowest device"
        if device.jitter
        else "every step takes the same time on every device"
    )
    lines += _of_data(device)
    if device.seen is not None:
        lines.append(_of_seen(device, network, *device.seen))
    if device.seen is None:
        lines.append(
            "the sum does not slow computing, no other job shares the network, and hosts are as "
            "fast with all devices at work as with one: the figures are upper bounds"
        )
    return [f"{line[:1].upper()}{line[1:]}." for line in lines]


def _of_data(device: DeviceStep) -> Iterator[str]:
    """Sentences on how the devices read their batches."""
    if device.data_s:
        yield (
            "each device has its own loader, which makes "
            f"{significant(device.batch / device.data_s)} samples/s as in the run, and prefetches "
            "while the device waits for the sum"
        )
    if device.reads_s:
        yield (
            f"each device has no workers and makes a batch in {format_seconds(device.reads_s)} "
            "before it computes, as the run did; the store keeps up with all of them"
        )
    elif device.data_s:
        yield "the store keeps up with all of them"
    else:
        yield "batches are always ready in time"


def _of_seen(device: DeviceStep, network: Network, n: int, seconds: float) -> str:
    """A sentence on how the measured step of several devices fits the model."""
    took = f"a step of {n} devices took {format_seconds(seconds)}"
    more = beyond_the_model(device, network)
    if abs(more) <= _ROUNDED * seconds:
        return f"{took}, which all of this explains"
    if more < 0:
        return (
            f"{took}, and all of this needs {format_seconds(seconds - more)}: one of the two is "
            "wrong, so the measured step is not used, and the figures are the model's alone"
        )
    return (
        f"{took}, which is {format_seconds(more)} more than all of this: that time (hosts, "
        f"contention) is added at every number of devices, so the step of {n} is not predicted"
    )


def prediction_table(predictions: Iterable[Prediction]) -> list[tuple[str, ...]]:
    """The header and a row for each number of devices."""
    head = ("devices", "nodes", "sum", "exposed", "step", "samples/s", "efficiency", "none - all")
    rows = (
        (
            f"{made.devices:,}",
            f"{made.nodes:,}",
            format_seconds(made.sum_s),
            format_seconds(made.exposed_s),
            format_seconds(made.step_s),
            significant(made.samples_per_s),
            f"{made.efficiency:.1%}",
            f"{made.worst:.1%} - {made.best:.1%}",
            made.bound_by,
        )
        for made in predictions
    )
    return [(*head, "bound by"), *rows]
