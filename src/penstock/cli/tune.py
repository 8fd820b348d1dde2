"""``penstock tune``: settings that pay.

loader  settings that keep the accelerator fed:
        memory -> queues that fit -> short launches that only read, by threads -> settings as YAML
infer   the patch, batch, threads and block that pay:
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
    TuneLoaderConfig,
    UsageError,
    add_flags,
    add_kinds,
    format_bytes,
    format_seconds,
    from_flags,
    plural,
    usable_cores,
)
from ..bench import (
    Launch,
    ask_worker,
    case_namer,
    halved,
    infer_case,
    infer_case_name,
    job_settings,
    other_cases,
    patch_cases,
    reading_alone,
    run_launch,
    series_rules,
)
from ..instruments import Ledger, Record, available_memory
from ..models import check_model_name
from ..reports import (
    Goal,
    ReadAlone,
    TriedSettings,
    best_trial,
    flags_of,
    prediction,
    readings_of,
    recommend_loader,
    whole_seconds,
    write_settings_yaml,
)
from .bench import queue_outcome
from .benchmarks import ended, ledger_of, print_written, sweep
from .progress import say

UTILISATION = 0.9
"""Share of the time that the accelerator must be computing: MLPerf Storage asks for 0.9 of most
workloads."""
QUEUES = (1, 2, 4, 8)
"""Queue sizes to choose from, if they fit into memory. Launches that only read use the largest that
leaves enough batches to time."""

_PATCHES_SHARE = 0.6
"""Share of the time in which patches are tried, before other settings are."""

EXAMPLES = """
penstock tune loader data/ufs --step-time 0.2 --batch-size 8
penstock tune infer noisy.ome.zarr denoised.ome.zarr --model denoise-tiny --output fast.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = {
        "loader": "workers and queue of a loader for steps of a given time",
        "infer": "patch, batch, threads and block of an inference",
    }
    kinds = add_kinds(parser, about)
    add_flags(kinds["infer"], TuneInferConfig, config_file=True)
    loader = kinds["loader"]
    loader.add_argument("data", metavar="DATA", help="a packed data set, or an array")
    add_flags(loader, TuneLoaderConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    """Run the verb. Returns exit code 0 with settings, 1 if none keep the accelerator fed."""
    if args.kind == "infer":
        return _infer(from_flags(TuneInferConfig, args, args.config))
    config = from_flags(TuneLoaderConfig, args, args.config)

    what, overwrite = f"tune-loader-{Path(args.data).stem}", config.overwrite
    ledger = ledger_of(config, what, [Path(args.data)], replace=overwrite)
    goal = Goal(config.step_time, config.batch_size, UTILISATION)
    size, held = fitting(args.data, config, max(threads_of(config)))
    print(f"Batches of {goal.batch}, steps of {format_seconds(goal.step_s)}:")
    reads = _readings(args.data, config, max(held), ledger)
    advice = recommend_loader(reads, goal, list(held), size)
    settings = advice.settings
    if settings is None:
        threads = min(reads, key=lambda reading: reading.interval.value).workers
        limit = f"penstock bench loader {shlex.quote(args.data)} --loaders penstock"
        limit += f" --batch-sizes {goal.batch} --threads {threads} --shuffle {config.shuffle}"
        if config.patch:
            limit += f" --patch {' '.join(map(str, config.patch))}"
        print("", *advice.sentences, "", "Which step of reading limits it:", f"  {limit}", sep="\n")
        print_written([ledger.path])
        return 1
    if config.missing != "error":  # the default of a loader
        settings = {**settings, "missing": config.missing}
    memory = format_bytes(held[settings["queue"]])
    sentences = (*advice.sentences, f"In all the loader takes {memory} of memory.")
    write_settings_yaml("--output", settings, sentences, config.output, overwrite)
    flags = flags_of(settings, goal.step_s, args.data)
    print("", *sentences, "", "As flags:", *(f"  {line}" for line in flags), sep="\n")
    print_written([config.output, ledger.path])
    return 0


def _readings(data: str, config: TuneLoaderConfig, deepest: int, ledger: Ledger) -> list[ReadAlone]:
    """Measure how fast batches come while nothing computes, for each number of threads."""
    queue = min(deepest, config.batches // 3)
    iterations = config.batches + queue + 1
    cases = [
        reading_alone(
            data,
            workers=workers,
            queue=queue,
            batch=config.batch_size,
            iterations=iterations,
            shuffle=config.shuffle,
            seed=config.seed,
            missing=config.missing,
            patch=config.patch,
        )
        for workers in threads_of(config)
    ]
    records = sweep(
        "queue", cases, config, ledger, rules=series_rules(iterations),
        name=case_namer(cases, "workers"), outcome=queue_outcome, launches=config.launches,
    )  # fmt: skip
    if not (reads := readings_of(records)):
        failure = next((record.error for record in records if record.error is not None), None)
        raise UsageError(f"{data}: {failure.message if failure else 'nothing was measured'}")
    return reads


def threads_of(config: TuneLoaderConfig) -> list[int]:
    """The numbers of threads to try: 1, 2, 4, ... and the largest allowed.

    >>> threads_of(TuneLoaderConfig(step_time=1, threads_up_to=6))
    [1, 2, 4, 6]
    """
    most = config.threads_up_to or usable_cores()
    powers = [2**n for n in range(most.bit_length())]
    return [*(count for count in powers if count < most), most]


def fitting(data: str, config: TuneLoaderConfig, threads: int) -> tuple[int, dict[int, int]]:
    """The bytes of a batch, and by size of the queues that fit into memory the bytes of a loader.
    Raises `UsageError` if none does, or if the data has fewer samples."""
    from ..loading import Loader

    batch, memory = config.batch_size, config.max_memory or available_memory() // 2
    with Loader(
        data, batch_size=batch, workers=threads, shuffle=config.shuffle, patch=config.patch
    ) as loader:
        size, samples, engine = loader.batch_bytes, loader.order.num_items, loader.engine
        if batch > samples:
            raise UsageError(
                f"--batch-size {batch} is more than the {plural(samples, 'sample')} of {data}"
            )
        taken = {
            n: (n + 1) * size + engine.scratch_bytes + engine.bytes_in_flight(batch, n)
            for n in QUEUES
        }
    fits = {n: total for n, total in taken.items() if total <= memory}
    if not fits:
        raise UsageError(
            f"--max-memory {format_bytes(memory)} holds no two batches of "
            f"{plural(batch, 'sample')}, {format_bytes(size)} each, and what reading them takes: "
            "give a smaller --batch-size"
        )
    return size, fits


def _infer(config: TuneInferConfig) -> int:
    """Returns exit code 0; the settings may be those of the job as it is."""
    check_model_name(config.model_type, "--model-type")
    case = infer_case(config)
    ledger = ledger_of(config, "tune-infer", replace=config.overwrite)
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
        outcome = ended(record, lambda of: f"the whole would take {format_seconds(_cost(of))}")
        say(f"{infer_case_name(case)}, launch {number}: {outcome}")
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


def _command(places: Mapping[str, Any], settings: Path) -> str:
    """The command that runs the job with the settings."""
    specs = [places["in_spec"], *places["out_spec"]]
    source, *sinks = (json.dumps(spec) if isinstance(spec, dict) else str(spec) for spec in specs)
    words = ["--in-spec", source, "--out-spec", *sinks, "--config", str(settings)]
    return shlex.join(["penstock", "infer", *words])
