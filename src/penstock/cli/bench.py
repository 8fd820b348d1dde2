"""``penstock bench model``: memory and throughput of a model over tile size and batch size.

    flags -> cases -> check, in a process for each tile -> sweep -> CSV, table, recommendation

Nothing is created before every case is known to make sense. Torch is imported by the processes
that measure and never by this one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import (
    BenchModelConfig,
    Refused,
    UsageError,
    add_flags,
    check_outputs,
    format_bytes,
    from_flags,
)
from ..instruments import Record, canonical
from ..models import check_model_name as check_model
from .progress import say, shown_progress, tried

if TYPE_CHECKING:
    from ..instruments import Ledger

Case = dict[str, Any]
Facts = dict[str, Any]

KINDS = {
    "loader": "how fast batches come, by loader, threads and batch size, and what limits them",
    "queue": "how long a queue of batches keeps a step fed, beside what its model predicts",
}
"""Benchmarks that have a module of their own: ``queue`` is ``bench_queue``."""

NEEDS = ("tile_size", "batch_size")
"""Columns that a table of ``bench model`` has."""
MOST_BATCH = 2**16
"""No larger batch is tried by --find-limit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    about = "a model's memory and throughput over tile size and batch size"
    model = kinds.add_parser("model", help=about, description=about, allow_abbrev=False)
    model.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings; flags win")
    add_flags(model, BenchModelConfig)
    for kind, about in KINDS.items():
        parser = kinds.add_parser(kind, help=about, description=about, allow_abbrev=False)
        import_module(f"{__package__}.bench_{kind}").add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.kind in KINDS:
        code: int = import_module(f"{__package__}.bench_{args.kind}").run(args)
        return code
    config = from_flags(BenchModelConfig, args, args.config)
    for model in config.model:
        check_model(model, "--model")
    from ..instruments import Ledger
    from ..reports import settings_files

    if not config.output.name:
        raise UsageError(f"--output {config.output} cannot be written: it names no file")
    folder = config.ledger or config.output.with_suffix(".ledger")
    ledger = Ledger(folder)
    cases = cases_of(config)
    _writable(config, ledger)
    cases, facts = checked(cases, config.timeout)
    if config.budget is not None:
        _holds_a_launch(config.budget, cases, facts)
    if config.find_limit:
        # In a ledger of its own: a launch that only tries is no measurement.
        return _find_limit(config, cases, facts, Ledger(folder / "limits"))
    settings = settings_files(cases, _recommend_path(config))
    check_outputs(*(("--recommend", path) for path in settings), replace=config.replace)
    if config.resume:
        _same_work(ledger, cases, facts)
    return _sweep(config, cases, facts, ledger)


def cases_of(config: BenchModelConfig) -> list[Case]:
    """The product of all axes, without what is in it twice."""
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
        "weights": (config.weights and str(config.weights),),
        "threads": (config.threads,),
        "seed": (config.seed,),
        "budget": (config.budget,),
        # Absent where it is not given, so that records of before are of the same case.
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
            raise UsageError("--checkpointing is of the backward pass; it needs --mode train")
    return list({canonical(case): case for case in points}.values())


def _writable(config: BenchModelConfig, ledger: Ledger) -> None:
    """Raise `UsageError` for outputs that could not be written when all is measured."""
    check_csv(config.output, config.replace)
    check_outputs(("--recommend", _recommend_path(config)), replace=config.replace)
    check_ledger(ledger)


def check_csv(path: Path, replace: bool, needs: Iterable[str] = NEEDS) -> None:
    """Raise `UsageError` for a table that is no CSV of such a benchmark, to which rows are added:
    none of those that it has is lost, whoever wrote them."""
    from ..reports import (
        read_csv,
    )

    check_outputs(("--output", path), replace=True)
    if path.is_file() and path.stat().st_size and not replace:
        try:
            read_csv(path, needs)
        except UsageError as error:
            raise UsageError(f"--output: {error}; --replace replaces it") from error


def make_way(path: Path, replace: bool, needs: Iterable[str] = NEEDS) -> None:
    """Remove what `check_csv` would have refused, where the user said so, just before rows come."""
    if replace:
        try:
            check_csv(path, False, needs)
        except UsageError:
            path.unlink()


def check_ledger(ledger: Ledger) -> None:
    """Raise `UsageError` for a ledger that cannot be added to, or that is something else."""
    check_outputs(("--ledger", ledger.path), replace=True)
    ledger.records()


def _recommend_path(config: BenchModelConfig) -> Path:
    return config.recommend or config.output.with_suffix(f".{config.mode}.yaml")


def checked(cases: Sequence[Case], timeout_s: float) -> tuple[list[Case], list[Facts]]:
    """The cases with their device and channels filled in, and the facts of each.

    A process is started for each model and tile, not for each batch. Raises `UsageError` with the
    sentence of the first that does not make sense. What ends otherwise is left for the sweep, where
    it will be a row.
    """
    from ..bench import ask_worker

    answers: dict[str, Record] = {}
    resolved, facts = [], []
    for case in cases:
        point = canonical(
            [case[n] for n in ("model", "tile", "channels", "dtype", "checkpointing")]
        )
        if point not in answers:
            answers[point] = ask_worker("model", case, timeout_s)
        answer = answers[point]
        filled = {name: answer.case[name] for name in ("device", "channels")} if answer.ok else {}
        resolved.append(case | filled)
        own = dict(answer.facts)
        if own.get("flops") is not None:
            own["flops"] = own["flops"] * case["batch"] // answer.case["batch"]
        facts.append(own)
    return resolved, facts


def _holds_a_launch(budget: int, cases: Sequence[Case], facts: Sequence[Facts]) -> None:
    """Raise `Refused` for a budget that no case keeps to even before its first sample."""
    on_cpu = cases[0]["device"] == "cpu"
    counted = ("model_bytes", "process_bytes") if on_cpu else ("model_bytes",)
    least = min(sum(own.get(name) or 0 for name in counted) for own in facts)
    if budget < least:
        what = "Python, torch and the weights take" if on_cpu else "the weights take"
        raise Refused(
            f"--budget {format_bytes(budget)} holds no launch: {what} {format_bytes(least)} before "
            "the first sample"
        )


def _same_work(ledger: Ledger, cases: Sequence[Case], facts: Sequence[Facts]) -> None:
    """Raise `UsageError` where the ledger's launches of these cases ran elsewhere or ran another
    model of the same name: what is missing would be measured on unlike ground."""
    from ..instruments import case_key, collect_environment

    here = collect_environment()["machine_key"]
    structures = {
        case_key("model", case): own.get("structure")
        for case, own in zip(cases, facts, strict=True)
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


def _sweep(
    config: BenchModelConfig, cases: Sequence[Case], facts: Sequence[Facts], ledger: Ledger
) -> int:
    from ..bench import LaunchRequest, known_roof, launches_of, run_launch, run_sweep
    from ..reports import (
        append_model_csv,
        in_text,
        model_sections,
        recommend,
        roof_line,
        write_model_yaml,
    )

    counted = {canonical(case): own for case, own in zip(cases, facts, strict=True)}

    def run(request: LaunchRequest, **how: Any) -> Record:
        """A launch, and what was counted of its case apart from it."""
        record, own = run_launch(request, **how), counted[canonical(request.case)]
        if not record.ok or own.get("flops") is None:
            return record
        told = {"flops_uncounted": own["flops_uncounted"]}
        work = {**record.work, "flops": own["flops"]}
        return record.model_copy(update={"work": work, "facts": {**record.facts, **told}})

    launches = launches_of(config.effort)
    print(
        f"{len(cases)} case{'s' * (len(cases) != 1)} on {cases[0]['device']}, "
        f"{launches} launch{'es' * (launches != 1)} of each"
    )
    with shown_progress(namer(cases)) as progress:
        records = run_sweep(
            "model",
            cases,
            launches,
            ledger,
            rules={"seconds": config.launch_seconds, "precision": config.precision},
            timeout_s=config.timeout,
            memory_limit=_host_limit(cases[0], config.budget),
            seed=config.seed,
            resume=config.resume,
            run=run,
            progress=progress,
        )
    make_way(config.output, config.replace)
    append_model_csv(records, config.output)
    print("", *in_text(model_sections(records)), sep="\n")
    if line := roof_line(records, known_roof):
        print("", line, sep="\n")
    advice = recommend(records, config.budget)
    print("", *advice.lines, sep="\n")
    settings = write_model_yaml(advice, _recommend_path(config), config.replace)
    written = [config.output, ledger.path, *settings]
    print("", *(f"Written: {path}" for path in written), sep="\n")
    return int(any(record.status == "crash" for record in records))


def _host_limit(case: Case, budget: int | None) -> int | None:
    """What the kernel holds a launch to. On a GPU the budget is for torch's allocator to keep."""
    return budget if case["device"] == "cpu" else None


def _find_limit(
    config: BenchModelConfig, cases: Sequence[Case], facts: Sequence[Facts], ledger: Ledger
) -> int:
    """For each variant of the model, the largest batch of each tile."""
    from ..bench import budget_note, limits_table, model_limits
    from ..reports import append_limits

    variants: dict[str, list[tuple[Case, Facts]]] = {}
    for case, own in zip(cases, facts, strict=True):
        variants.setdefault(canonical({**case, "tile": 0, "batch": 0}), []).append((case, own))
    name = namer([same[0][0] for same in variants.values()])
    for same in variants.values():
        first, own = same[0]
        launched: list[Record] = []

        def tell(record: Record, launched: list[Record] = launched) -> None:
            launched.append(record)
            say(f"{name(record.case)}: {tried(record)}")

        print(f"{name(first | {'tile': 'any', 'batch': 'any'})}, on {first['device']}")
        limits = model_limits(
            first,
            list(dict.fromkeys(case["tile"] for case, _ in same)),
            len(own.get("tile_shape", (0, 0))),
            MOST_BATCH,
            config.budget,
            ledger,
            timeout_s=config.timeout,
            device_memory=own.get("device_memory"),
            report=tell,
            tolerance=config.limit_tolerance,
        )
        print("", *limits_table(limits), "", budget_note(first["device"]), sep="\n")
        sides = {
            (limit.tile, batch) for limit in limits for batch in (limit.batch, limit.failing_batch)
        }
        append_limits(
            [r for r in launched if (r.case["tile"], r.case["batch"]) in sides], config.output
        )
    print(*(f"Written: {path}" for path in (config.output, ledger.path)), sep="\n")
    return 0


def namer(cases: Sequence[Case]) -> Callable[[Mapping[str, Any]], str]:
    """What a case is called among others: its tile, its batch, and what else differs."""
    differ = [n for n in cases[0] if len({canonical(case[n]) for case in cases}) > 1]
    differ = [name for name in differ if name not in ("tile", "batch")]

    def name(case: Mapping[str, Any]) -> str:
        told = [f"tile {case['tile']}", f"batch {case['batch']}"]
        for knob in differ:
            value = case[knob]
            told.append(("" if value else "no ") + knob if isinstance(value, bool) else str(value))
        return ", ".join(told)

    return name
