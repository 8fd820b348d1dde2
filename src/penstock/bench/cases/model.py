"""The cases of ``penstock bench model``, which are checked in a fresh process for each tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...base import BenchModelConfig, Refused, UsageError, canonical, format_bytes
from ...data import is_file
from ...instruments import Ledger, Record, case_key
from ..launch.sweep import Launcher, ask_worker, in_turn

Case = dict[str, Any]
Facts = dict[str, Any]
"""Facts of a case that need no measurement: see `check` of scenario ``model``."""


def model_cases(config: BenchModelConfig) -> list[Case]:
    """The product of all axes, each point once.

    Args:
        config: the knobs of the benchmark.

    Returns:
        A case of scenario ``model`` for each point.

    Raises:
        UsageError: knobs exclude each other.
    """
    weights = config.weights
    if weights is not None and not is_file(weights, f"--weights {weights}"):
        raise UsageError(f"--weights {weights}: there is no such file")
    axes: dict[str, Sequence[Any]] = {
        "model": config.model,
        "mode": (config.mode,),
        "tile": config.tile_sizes,
        "batch": config.batch_sizes,
        "channels": config.channels or (None,),
        "dtype": config.dtype,
        "amp": config.amp,
        "compile": config.compile,
        "channels_last": config.channels_last,
        "tf32": config.tf32,
        "checkpointing": config.checkpointing,
        "halo": config.halo,
        "device": (config.device,),
        "weights": (weights and str(weights),),
        "threads": (config.threads,),
        "seed": (config.seed,),
        "budget": (config.budget,),
        # Absent if it is not given: the same file without it gives the same measurement.
        **({"trust_model": (True,)} if config.trust_model else {}),
    }
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for case in points:
        side = min(int(side) for side in case["tile"].split("x"))
        if side <= 2 * case["halo"]:
            raise UsageError(
                f"--halo {case['halo']} leaves nothing of --tile-sizes {case['tile']}: a side must "
                f"be more than {2 * case['halo']}"
            )
        if case["amp"] and case["dtype"] != "float32":
            raise UsageError(f"--amp casts float32 as it goes; it needs no --dtype {case['dtype']}")
        if case["checkpointing"] and config.mode != "train":
            raise UsageError("--checkpointing works in the backward pass; it needs --mode train")
    return list({canonical(case): case for case in points}.values())


def checked_model_cases(
    cases: Sequence[Case], timeout_s: float, launcher: Launcher = in_turn
) -> tuple[list[Case], list[Facts], str | None]:
    """Fill in the device and channels of the cases, and get the facts of each.

    A process is started for each model and tile, not for each batch. If it fails for another reason
    than the settings, the case is left as it is, and the sweep makes a row of its failure.

    Args:
        cases: the cases, as `model_cases` made them.
        timeout_s: the seconds that a process may take.
        launcher: runs the processes.

    Returns:
        The cases and their facts, in the same order, and the key of the machine that answered.

    Raises:
        UsageError: a case is not valid; the message is that of the first such case.
    """
    answers: dict[str, Record] = {}
    resolved, facts, here = [], [], None
    for case in cases:
        point = canonical(
            [case[n] for n in ("model", "tile", "channels", "dtype", "checkpointing")]
        )
        if point not in answers:
            answers[point] = ask_worker("model", case, timeout_s, launcher, may_fail=True)
        answer = answers[point]
        here = answer.environment.get("machine_key", here)
        filled = {name: answer.case[name] for name in ("device", "channels")} if answer.ok else {}
        resolved.append(case | filled)
        facts.append(dict(answer.facts))
    return resolved, facts, here


def check_budget(budget: int, cases: Sequence[Case], facts: Sequence[Facts]) -> None:
    """Refuse a budget that every case exceeds before its first sample.

    Args:
        budget: the bytes that a launch may use.
        cases: the cases, on one device.
        facts: the facts of each case.

    Raises:
        Refused: the budget is too small for every case.
    """
    on_cpu = cases[0]["device"] == "cpu"
    counted = ("model_bytes", "process_bytes") if on_cpu else ("model_bytes",)
    least = min(sum(each.get(name) or 0 for name in counted) for each in facts)
    if budget < least:
        what = "Python, torch and the weights take" if on_cpu else "the weights take"
        raise Refused(
            f"--budget {format_bytes(budget)} holds no launch: {what} {format_bytes(least)} before "
            "the first sample"
        )


def check_same_work(
    ledger: Ledger, cases: Sequence[Case], facts: Sequence[Facts], here: str | None
) -> None:
    """Check that new launches can be compared with those of a ledger.

    Args:
        ledger: the ledger that ``--resume`` continues.
        cases: the cases.
        facts: the facts of each case.
        here: the key of the machine that measures, if it is known.

    Raises:
        UsageError: the ledger has launches of these cases on another machine, or with another model
            of the same name.
    """
    structures = {
        case_key("model", case): each.get("structure")
        for case, each in zip(cases, facts, strict=True)
    }
    for record in ledger.records():
        if record.key not in structures or not record.ok:
            continue
        for what, was, now in (
            ("on another machine", record.environment.get("machine_key"), here),
            ("of another model", record.facts.get("structure"), structures[record.key]),
        ):
            if was and now and was != now:
                raise UsageError(
                    f"--resume: {ledger.path} holds launches {what} ({was}, not {now}); give "
                    "another --ledger, or leave --resume out"
                )


def case_namer(cases: Sequence[Case], *always: str) -> Callable[[Mapping[str, Any]], str]:
    """Make a function that names a case among others.

    Args:
        cases: The cases.
        always: Knobs that every name has.

    Returns:
        The function: ``always``, and the knobs in which the cases differ, each with its value.
    """
    knobs = {name: None for case in cases for name in case if name not in always}
    differ = [name for name in knobs if len({canonical(case.get(name)) for case in cases}) > 1]

    def name(case: Mapping[str, Any]) -> str:
        parts = []
        for knob in (*always, *differ):
            value = case.get(knob)
            switch = ("" if value else "no ") + knob
            parts.append(switch if isinstance(value, bool) else f"{knob} {value}")
        return ", ".join(parts)

    return name
