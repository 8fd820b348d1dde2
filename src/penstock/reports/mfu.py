"""The arithmetic of a training beside what its devices can do, as ``penstock doctor`` measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base import format_count, plural
from ..bench import known_roof

UNKNOWN = "The limits of this machine are not known: run penstock doctor once on each machine."
_COUNTED = (
    "products, convolutions and attention, forward and backward, over all the time of its epochs"
)


def mfu_lines(results: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Say what share of its devices' peak arithmetic a training reached: its MFU.

    Args:
        results: Its results.
        settings: Its settings.

    Returns:
        A sentence on the share, or on why it is not known; none if no epoch has ended.
    """
    each, rate = results.get("flops_per_sample"), results.get("samples_per_s")
    if not rate:
        return []
    if not each:
        return ["Its MFU (model FLOPs utilisation) is not known: its operations were not counted."]
    device, devices = _device(results), _devices(results)
    dtype = product_dtype(settings, device)
    does = f"it computed {format_count(each * rate)}flop/s ({_COUNTED})"
    roof = known_roof(str(results.get("machine_key")), device, dtype)
    if roof is None:
        start = f"Its MFU (model FLOPs utilisation) is not known, for want of a peak of {dtype}"
        return [f"{start}: {does}. {UNKNOWN}"]
    rates = [
        row["samples"] / row["train_s"]
        for row in results.get("history") or ()
        if row.get("samples") and row.get("train_s")
    ]
    most = roof * devices
    shares = [f"{each * of / most:.1%}" for of in (min(rates), max(rates))] if rates else []
    ends = f"{'-'.join(shares)}, " if len(rates) > 1 else ""
    epochs = plural(len(results.get("epoch_times_s") or ()), "epoch")
    share = f"MFU (model FLOPs utilisation) {each * rate / most:.1%} [{ends}{epochs} of one run]"
    reach = f"the {format_count(most)}flop/s that matrix products of {dtype} reach here"
    return [f"{share}: {does}, of {reach}."]


def _device(results: Mapping[str, Any]) -> str:
    """The device as doctor names it."""
    name = str(results.get("device"))
    return name if name in ("cpu", "mps") else "cuda:0"


def _devices(results: Mapping[str, Any]) -> int:
    """The number of devices like that one: ranks on processors of one machine share them."""
    if _device(results) == "cpu":
        return int((results.get("launch") or {}).get("nodes") or 1)
    return int(results.get("world_size") or 1)


def product_dtype(settings: Mapping[str, Any], device: str) -> str:
    """The dtype of matrix products, as ``penstock doctor`` names it.

    Args:
        settings: The settings of a training or the case of a model: ``amp``, ``dtype``, ``tf32``.
        device: The device, such as ``cuda:0``.

    Returns:
        The name of a dtype of torch, or ``tf32``.
    """
    on_gpu = device.startswith("cuda")
    if settings.get("amp"):
        return "float16" if on_gpu else "bfloat16"
    dtype = str(settings.get("dtype") or "float32")
    return "tf32" if dtype == "float32" and on_gpu and settings.get("tf32") else dtype
