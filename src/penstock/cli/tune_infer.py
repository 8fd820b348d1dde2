"""``penstock tune infer IN OUT --model M``: the patch, batch, threads and block that pay.

the job as it is, other patches -> launches, by halves -> the best patch
that one, other batches, threads and blocks -> launches, by halves -> settings as YAML
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..base import (
    TuneInferConfig,
    UsageError,
    add_flags,
    check_outputs,
    format_seconds,
    from_flags,
)
from ..bench import (
    Launch,
    ask_worker,
    halved,
    infer_case,
    infer_case_name,
    job_settings,
    other_cases,
    patch_cases,
    run_launch,
    series_rules,
)
from ..instruments import Ledger, Record
from ..models import check_model_name
from ..reports import (
    TriedSettings,
    best_trial,
    prediction,
    whole_seconds,
    write_settings_yaml,
)
from .benchmarks import check_ledger, ended, labelled, print_written
from .progress import say

_PATCHES_SHARE = 0.6
"""Share of the time in which patches are tried, before other settings are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, TuneInferConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    """Run the kind. Returns exit code 0; the settings may be those of the job as it is."""
    config = from_flags(TuneInferConfig, args, args.config)
    check_model_name(config.model_type, "--model-type")
    case = infer_case(config)
    ledger = Ledger(config.ledger or config.output.with_suffix(".ledger"))
    check_ledger(ledger)
    labelled(ledger, config, "tune-infer")
    check_outputs(("--output", config.output), replace=config.overwrite, inputs=[ledger.path])
    began = time.monotonic()
    facts = ask_worker("infer", case, config.timeout).facts
    race = partial(_race, config=config, ledger=ledger)
    share = _PATCHES_SHARE * config.most_seconds
    best = race([case, *patch_cases(case, facts)], until=began + share)
    others = other_cases(best.case, best.records[0].facts)
    if others:
        best = race([best.case, *others], until=began + config.most_seconds)
    sentence = prediction(best)
    settings = job_settings(config) | best.case["settings"]
    places = {name: settings.pop(name) for name in ("in_spec", "out_spec")}
    write_settings_yaml("--output", settings, (sentence,), config.output, config.overwrite)
    print("", f"{sentence}.", "", "To run it:", sep="\n")
    print(f"  {_command(places, config.output)}")
    print_written([config.output, ledger.path])
    return 0


def _race(
    cases: Sequence[Mapping[str, Any]], config: TuneInferConfig, ledger: Ledger, until: float
) -> TriedSettings:
    """Launch cases until one has won, and print what each took. Returns the winner."""
    longest = 0.0

    def measure(case: Mapping[str, Any], number: int) -> Record:
        nonlocal longest
        began = time.monotonic()
        launch = Launch("infer", case, config.timeout, number, rules=series_rules(2))
        record = run_launch(launch)
        longest = max(longest, time.monotonic() - began)
        say(f"{infer_case_name(case)}, launch {number}: {ended(record, _outcome)}")
        return ledger.append(record)

    def is_over() -> bool:
        return longest > 0 and time.monotonic() + longest > until

    records = halved(cases, measure, _cost, is_over, config.seed)
    trials = [
        TriedSettings(infer_case_name(case), case, ran)
        for case, ran in zip(cases, records, strict=True)
    ]
    if not trials[0].launches:
        error = records[0][0].error
        raise UsageError(error.message if error else "the job as it is was not measured")
    best, sentences = best_trial(trials)
    print("", *sentences, sep="\n")
    return best


def _cost(record: Record) -> float:
    return float(whole_seconds(record).mean())


def _outcome(record: Record) -> str:
    return f"the whole would take {format_seconds(_cost(record))}"


def _command(places: Mapping[str, Any], settings: Path) -> str:
    """The command that runs the job with the settings."""
    specs = [places["in_spec"], *places["out_spec"]]
    source, *sinks = (json.dumps(spec) if isinstance(spec, dict) else str(spec) for spec in specs)
    words = ["--in-spec", source, "--out-spec", *sinks, "--config", str(settings)]
    return shlex.join(["penstock", "infer", *words])
