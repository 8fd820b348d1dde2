"""Predicts steps on many devices from the measured phases of one device and a given network.

    one device     │ data │ forward │ backward ······ │ optimizer │
    N devices      │ data │ forward │ backward ······ │ rest of the sum │ optimizer │
                                      └── part of the sum is hidden here

Each device keeps its batch (weak or hybrid scaling). The gradients, ``M`` bytes, are summed over
the devices of a node and then over the nodes, by k members each:

    2 (k - 1) / k M / B + 2 (k - 1) L        a ring: each member sends its part round twice

``B`` is the bandwidth, per device within a node and per node between nodes, and ``L`` the latency
of a message. The fraction ``overlap`` of the sum runs during the backward pass, if that lasts long
enough; devices wait for the rest. Data is read while a device computes, and a step takes as long as
the slower of the two. If the run waited for data, each device's loader is as slow as the run's.
Without workers, data is read before each step. Steps
vary by ``jitter``, their standard deviation over their mean, and each step waits for the slowest of
N devices.

The model leaves out contention of the sum with computing, congestion of a shared network, hosts
that are slower with all their devices at work, and other jobs. If a step of several devices was
measured, its time beyond the model is added to every step of several devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist, median

from ..base import UsageError, format_bytes, format_seconds, plural, significant
from ..instruments import mad
from .runs import TrainingRun, phases_of

NOTABLE_WAIT = 0.02
"""The fraction of a step from which a wait for data counts. Handing over a batch takes less."""
_ROUNDED = 0.005
"""The relative difference up to which a measured step agrees with the model's: logs have few
digits."""
_COMPUTE = ("transfer", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step of one device."""

    compute_s: float
    """Seconds of computing, the backward pass included."""
    backward_s: float
    batch: int
    """The number of samples of the step."""
    gradient_bytes: float
    jitter: float = 0.0
    """The standard deviation of the step time over its mean."""
    data_s: float = 0.0
    """Seconds in which its loader makes a batch; 0 if the device never waited for it."""
    reads_s: float = 0.0
    """Seconds of reading in a run without workers, where each step reads its batch first."""
    seen: tuple[int, float] | None = None
    """A number of devices above 1, and the measured seconds of a step on them, with this batch."""


@dataclass(frozen=True, slots=True)
class Network:
    """The network that joins the devices, in bytes and seconds."""

    per_node: int
    """The devices of a node."""
    inside: float
    """Bytes per second and device, in one direction, within a node."""
    between: float
    """Bytes per second and node, in one direction, between nodes."""
    inside_latency: float
    between_latency: float
    overlap: float
    """The fraction of the sum that may run during the backward pass, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step of N devices, in seconds."""

    devices: int
    nodes: int
    sum_s: float
    """Time of the all-reduce, hidden part included."""
    exposed_s: float
    """The part of the all-reduce that devices wait for."""
    parts: Mapping[str, float]
    """The seconds of a step by what they are spent on."""
    step_s: float
    samples_per_s: float
    efficiency: float

    @property
    def bound_by(self) -> str:
        """The part that takes most of a step."""
        return max(self.parts, key=self.parts.__getitem__)


def predict_step(device: DeviceStep, network: Network, n: int) -> Prediction:
    """The step on a number of devices.

    Args:
        device: The step of one device.
        network: The network that joins the devices.
        n: The number of devices.

    Returns:
        The prediction.
    """
    alone = device.batch / _step(device, network, 1)
    summed, exposed = _sum(device, network, n)
    step, each = _step(device, network, n), device.reads_s + device.compute_s
    more = step - _explained(device, network, n)
    parts = {
        "computing": device.compute_s,
        "data": device.reads_s,
        "the slowest device": each * device.jitter * _largest(n),
        "the sum": exposed,
        "what is not in the model": more,
    }
    if device.data_s >= step - more:  # a loader hides all of it
        parts = {"data": device.data_s, "what is not in the model": more}
    return Prediction(
        devices=n,
        nodes=-(-n // network.per_node),
        sum_s=summed,
        exposed_s=exposed,
        parts=parts,
        step_s=step,
        samples_per_s=device.batch * n / step,
        efficiency=device.batch / step / alone,
    )


def _step(device: DeviceStep, network: Network, n: int) -> float:
    more = max(0.0, beyond_the_model(device, network)) if n > 1 else 0.0
    return _explained(device, network, n) + more


def _explained(device: DeviceStep, network: Network, n: int) -> float:
    slowest = (device.reads_s + device.compute_s) * (1 + device.jitter * _largest(n))
    return max(slowest + _sum(device, network, n)[1], device.data_s)


def beyond_the_model(device: DeviceStep, network: Network) -> float:
    """Seconds of the measured step of several devices minus those of the model.

    It is below 0 if the step took less, and 0 if none was measured.
    """
    if device.seen is None:
        return 0.0
    n, seconds = device.seen
    return seconds - _explained(device, network, n)


def _sum(device: DeviceStep, network: Network, n: int) -> tuple[float, float]:
    """Seconds of the all-reduce, and the part of them that devices wait for."""
    inside, nodes = min(n, network.per_node), -(-n // network.per_node)
    summed = all_reduce(device.gradient_bytes, inside, network.inside, network.inside_latency)
    summed += all_reduce(device.gradient_bytes, nodes, network.between, network.between_latency)
    hidden = min(network.overlap * summed, device.backward_s)
    return summed, summed - hidden


def all_reduce(size: float, members: int, bandwidth: float, latency: float) -> float:
    """Seconds of an all-reduce.

    Args:
        size: The bytes to sum, on each member.
        members: The number of members.
        bandwidth: Bytes per second of a member, in one direction.
        latency: Seconds of a message.

    Returns:
        The seconds; 0 for one member.

    >>> all_reduce(1e9, 4, 1e9, 0.0), all_reduce(1e9, 1, 1e9, 1.0)
    (1.5, 0.0)
    """
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (size / members / bandwidth + latency)


def _largest(n: int) -> float:
    """The expected largest of n standard normal numbers, by Blom's formula."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def device_of_run(run: TrainingRun) -> DeviceStep:
    """The step of one device, from a run on one device: the totals of its phases over its steps.

    Raises:
        UsageError: The run is of several devices, or lacks phases, steps, batch or gradients.
    """
    if run.devices != 1:
        raise UsageError(f"{run.source} is a run of {run.devices} devices; give one of 1")
    phases = phases_of([run])
    if not phases or not run.steps or not run.batch or run.gradient_bytes is None:
        raise UsageError(f"{run.source} lacks phases, steps, batch or the bytes of its gradients")
    each = {name: total / run.steps for name, total in phases.items()}
    compute = sum(each.get(name, 0.0) for name in _COMPUTE)
    waited = _notable(each.get("data_wait", 0.0), compute)
    in_turn = run.settings.get("number of workers") == "0"
    local = run.ranks[0].local
    # The median absolute deviation, so that first steps and checkpoints do not count as jitter.
    jitter = 1.4826 * mad(local) / median(local) if len(local) > 1 else 0.0
    return DeviceStep(
        compute_s=compute,
        backward_s=each.get("backward", 0.0),
        batch=run.batch,
        gradient_bytes=run.gradient_bytes,
        jitter=jitter,
        data_s=compute + waited if waited and not in_turn else 0.0,
        reads_s=waited if in_turn else 0.0,
    )


def _notable(waited: float, compute: float) -> float:
    return waited if waited >= NOTABLE_WAIT * (compute + waited) else 0.0


def with_several(device: DeviceStep, run: TrainingRun) -> DeviceStep:
    """The step of one device, with the measured step of a run on several.

    Args:
        device: The step of one device.
        run: A run on several devices, with the same batch on each.

    Returns:
        The same step with `seen` filled in.

    Raises:
        UsageError: The run is of one device, of another batch, or lacks phases or steps.
    """
    phases = phases_of([run])
    if run.devices < 2:
        raise UsageError(f"{run.source} is a run of one device, too; give a second run of several")
    if not phases or not run.steps:
        raise UsageError(f"{run.source} lacks phases or steps")
    if run.batch != device.batch:
        raise UsageError(
            f"{run.source} has batches of {run.batch} on each device, and the run of one has "
            f"{device.batch}"
        )
    seconds = sum(phases.get(name, 0.0) for name in (*_COMPUTE, "communication")) / run.steps
    waited = phases.get("data_wait", 0.0) / run.steps
    return replace(device, seen=(run.devices, seconds + _notable(waited, seconds)))


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
        (
            f"A device computes {compute} a step, {backward} of it backward, on "
            f"{plural(device.batch, 'sample')}"
        ),
        (
            f"{format_bytes(device.gradient_bytes)} of gradients are summed by a ring, first "
            "within each node"
        ),
        (
            f"within a node of {plural(network.per_node, 'device')} each has {inside}, "
            f"{inside_wait} a message"
        ),
        f"between nodes each node has {between}, {between_wait} a message",
        f"{network.overlap:.0%} of the sum may hide behind that",
        f"steps vary by {device.jitter:.1%}, and each waits for the slowest device"
        if device.jitter
        else "every step takes the same time on every device",
        *_of_data(device),
    ]
    if device.seen is None:
        lines.append(
            "the sum does not slow computing, no other job shares the network, and hosts are as "
            "fast with all devices at work as with one: the figures are upper bounds"
        )
    else:
        lines.append(_of_seen(device, network, *device.seen))
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
    took = f"a step of {plural(n, 'device')} took {format_seconds(seconds)}"
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
    head = ("devices", "nodes", "sum", "exposed", "step", "samples/s", "efficiency")
    rows = (
        (
            f"{made.devices:,}",
            f"{made.nodes:,}",
            format_seconds(made.sum_s),
            format_seconds(made.exposed_s),
            format_seconds(made.step_s),
            significant(made.samples_per_s),
            f"{made.efficiency:.1%}",
            made.bound_by,
        )
        for made in predictions
    )
    return [(*head, "bound by"), *rows]
