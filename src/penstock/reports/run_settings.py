"""The settings of runs: some tell cases apart, and some are the change that is compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..instruments import Record, case_key

RUN_SCENARIOS = ("infer", "training", "preprocess", "predict")
"""The scenarios of runs, whose settings are no case: those of run folders, and of the ledgers that
preprocess and predict leave."""
_PLACES = frozenset(
    "in_spec out_spec run_dir metrics_json trace output_dir output overwrite resume "
    "take_over config name experiment_name project tag tags track penstock "
    "launch torch debug profile_steps track_every "
    "data_root train_data_root val_data_root train_label_file val_label_file "
    "train_chips_path val_chips_path target_spec weights profile".split()
)
"""Settings for paths, names and trackers. They do not tell cases apart."""


def settings_of_launch(record: Record) -> dict[str, Any]:
    """The settings of a launch: the knobs of its case, or those of its run."""
    return telling(record.facts.get("settings", record.case))


def telling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those for paths, names and trackers."""
    return {name: value for name, value in settings.items() if name not in _PLACES}


def cases_of_sides(*sides: Sequence[Record]) -> list[list[Record]]:
    """Give the launches of all sides cases by which they can be paired.

    A setting that varies within a side becomes part of the case. A setting that is constant within
    each side and differs between sides is the change that is compared, and no part of the case.
    Launches of a benchmark keep their case.

    Args:
        sides: The launches of each side.

    Returns:
        The sides. Launches of run folders have new cases and keys.
    """
    runs = [[r for r in side if r.scenario in RUN_SCENARIOS] for side in sides]
    telling: dict[str, set[str]] = {}
    for side in runs:
        for scenario in RUN_SCENARIOS:
            same = [settings_of_launch(r) for r in side if r.scenario == scenario]
            telling.setdefault(scenario, set()).update(_varying(same))

    def with_case(record: Record) -> Record:
        if record.scenario not in RUN_SCENARIOS:
            return record
        settings = settings_of_launch(record)
        names = sorted(telling[record.scenario])
        case = dict(record.case) | {name: settings.get(name) for name in names}
        return record.model_copy(update={"case": case, "key": case_key(record.scenario, case)})

    return [[with_case(record) for record in side] for side in sides]


def _varying(settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of settings that are not the same in all."""
    names = {name for each in settings for name in each}
    return {n for n in names if len({repr(each.get(n)) for each in settings}) > 1}


def differing_knobs(records: Iterable[Record]) -> list[str]:
    """The knobs whose values differ among the cases of records, in the order of the cases."""
    cases = [record.case for record in records]
    names = dict.fromkeys(name for case in cases for name in case)
    return [n for n in names if len({str(case[n]) for case in cases if n in case}) > 1]


def settings_that_differ(a: Sequence[Record], b: Sequence[Record]) -> list[tuple[str, str, str]]:
    """The settings in which two sides differ, each with its values on both.

    Args:
        a: The launches of one side of a case.
        b: The launches of the other side.

    Returns:
        A line for each such setting, by name; ``-`` if a side lacks it.
    """
    sides = [[settings_of_launch(record) for record in side] for side in (a, b)]
    names = sorted({name for side in sides for each in side for name in each})
    one, other = (
        {name: " or ".join(sorted({_words(each.get(name)) for each in side})) for name in names}
        for side in sides
    )
    return [(n.replace("_", "-"), one[n], other[n]) for n in names if one[n] != other[n]]


def _words(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
