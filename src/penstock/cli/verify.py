"""``penstock verify``: prove by checksums that an output is complete and written by its run."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import (
    InferConfig,
    UsageError,
    VerifyConfig,
    add_flags,
    as_words,
    check_local,
    check_outputs,
    format_bytes,
    from_flags,
    one_heap,
    plural,
    significant,
    write_output,
)
from ..models import check_model_name
from .progress import counted_progress

if TYPE_CHECKING:
    from ..inference import Finding, Kind, Proof, Recomputed, RunFolder

KINDS: tuple[Kind, ...] = ("damaged", "different", "missing")
SHOWN = 10
"""Most blocks of each kind that are printed; ``--json`` lists all."""


EXAMPLES = """
penstock verify denoised.ome.zarr
penstock verify denoised.ome.zarr --recompute 1%   # compute some blocks anew, and compare
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output",
        nargs="+",
        metavar="OUTPUT",
        help="the output of a run of infer; if the run has several outputs, one or all of them",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write a list of the blocks that are not proven",
    )
    add_flags(parser, VerifyConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(VerifyConfig, args)
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: {args.json.parent} is not a folder")
    if isinstance(config.run_dir, Path):
        check_local(config.run_dir, "--run-dir")
    check_outputs(("--json", args.json), replace=config.replace)
    if config.recompute is not None:
        one_heap()
    from ..inference import forget, open_run, verify_run

    run = open_run(args.output, config.run_dir)
    check_outputs(("--json", args.json), replace=config.replace, inputs=[Path(run.folder.place)])
    with counted_progress(run.num_units, "blocks", "verifying") as progress:
        proof = verify_run(run, config.readers, config.retry_for, progress)
    done = _recompute(run, proof, config) if config.recompute is not None else None
    if done is not None:
        proof.findings += done.findings
    lost = forget(run, proof.bad) if config.forget else None
    if args.json is not None:
        text = json.dumps(_as_dict(run, proof, done), indent=1) + "\n"
        write_output("--json", args.json, text, replace=config.replace)
    print("\n".join(_lines(run, proof, done, config)))
    if proof.bad:
        print(_cure(run, proof, lost, config))
    return _exit_code(proof)


def _recompute(run: RunFolder, proof: Proof, config: VerifyConfig) -> Recomputed:
    from ..inference import recompute_units, sample

    keys = sample(run, proof, config.recompute or 0, config.seed)
    with counted_progress(len(keys), "blocks", "computing") as progress:
        return recompute_units(
            run, proof, keys, progress, devices=config.devices, tolerance=config.tolerance
        )


def _exit_code(proof: Proof) -> int:
    """1 for damaged or different blocks, 3 for missing ones, 4 for ones that cannot be proven."""
    if proof.of_kind("damaged") or proof.of_kind("different"):
        return 1
    if proof.bad:
        return 3
    return 4 if proof.unprovable else 0


def _lines(
    run: RunFolder, proof: Proof, done: Recomputed | None, config: VerifyConfig
) -> Iterator[str]:
    names = ", ".join(stored.written.name for stored in run.outputs)
    yield (
        f"{names}: {proof.proven:,} of {proof.units:,} blocks are proven, "
        f"{format_bytes(proof.proven_bytes)} of values, by the checksums in {run.folder}"
    )
    yield from (f"Not locked: {reason}" for reason in run.lacking)
    if proof.unprovable:
        yield (
            f"Not provable: {proof.unprovable:,} blocks decode, but another version of Penstock "
            "noted them without a checksum that this version can check"
        )
    if done is not None:
        yield from _recomputed(run, done, config.seed)
    for kind in KINDS:
        word, findings = kind.capitalize(), proof.of_kind(kind)
        for finding in findings[:SHOWN]:
            yield f"{word}: {run.named(finding.key)} of {finding.output} {finding.what}"
        if len(findings) > SHOWN:
            yield f"{word}: {len(findings) - SHOWN:,} more; --json FILE lists all"


def _recomputed(run: RunFolder, done: Recomputed, seed: int) -> Iterator[str]:
    words = [f"{done.equal:,} have the same bits"]
    if done.near:
        batches = ", or with smaller batches," * (done.halved > 0)
        words.append(
            f"{done.near:,} of other code, versions or machines{batches} differ by at most "
            f"{done.largest:.3g}, within the tolerance"
        )
    if done.findings:
        words.append(f"{len({finding.key for finding in done.findings}):,} differ")
    yield (
        f"Computed anew: {done.sampled:,} of {done.population:,} blocks (--seed {seed}): "
        f"{'; '.join(words)}"
    )
    pairs = zip(run.outputs, done.tolerances, strict=True)
    limits = ", ".join(
        f"{limit:g}{' of the largest value' * (out.written.source.dtype.kind == 'f')} "
        f"({out.written.source.dtype.name})"
        for out, limit in pairs
    )
    if done.halved:
        yield (
            f"Halved: {plural(done.halved, 'block')} of them had patches in smaller batches, as "
            "memory ran out: their bits may differ, within the tolerance"
        )
    yield f"Tolerance if code, versions or machine differ: {limits}; none if they are the same"
    chances = [
        f"{significant(100 * done.chance(count))} % for {plural(count, 'block')}"
        for count in damages(done.population)
    ]
    yield (
        "Chance of seeing values that were wrong before their checksum was taken: "
        f"{', '.join(chances)}"
    )


def damages(population: int) -> list[int]:
    """Numbers of damaged blocks whose chance is printed: 1, 10, and 1 % of all."""
    return sorted({k for k in (1, 10, math.ceil(population / 100)) if k <= population})


def _as_dict(run: RunFolder, proof: Proof, done: Recomputed | None) -> dict[str, Any]:
    table: dict[str, Any] = {
        "outputs": [stored.written.name for stored in run.outputs],
        "run_dir": str(run.folder),
        "run": run.content.get("run"),
        "blocks": proof.units,
        "proven": proof.proven,
        "proven_bytes": proof.proven_bytes,
        "without_checksum": proof.unprovable,
        "recomputed": None,
    }
    if done is not None:
        table["recomputed"] = {
            "blocks": done.sampled,
            "of": done.population,
            "equal": done.equal,
            "within_tolerance": done.near,
            "halved": done.halved,
            "largest_difference": done.largest,
            "tolerances": list(done.tolerances),
            "chance_to_see": {str(k): done.chance(k) for k in damages(done.population)},
        }
    for kind in KINDS:
        table[kind] = [_finding(run, finding) for finding in proof.of_kind(kind)]
    return table


def _finding(run: RunFolder, finding: Finding) -> dict[str, Any]:
    box = run.units.cell(finding.key[1:])
    return {
        "volume": finding.key[0],
        "block": finding.key[1:],
        "start": box.start,
        "stop": box.stop,
        "output": finding.output,
        "what": finding.what,
    }


def _cure(run: RunFolder, proof: Proof, lost: int | None, config: VerifyConfig) -> str:
    """A sentence with the commands that make the bad blocks again."""
    again = _infer_again(run, config)
    if lost is not None:
        return f"{plural(lost, 'block')} taken off the list of the run. This makes them: {again}"
    if proof.bad.isdisjoint(run.notes):
        return f"This makes them: {again}"
    words = ["penstock", "verify", *map(_spec, run.specs), *_run_dir(run, config), "--forget"]
    return f"This makes them: {shlex.join(words)}; {again}"


def _infer_again(run: RunFolder, config: VerifyConfig) -> str:
    """The command that continues a run."""
    from ..inference import NOT_AGAIN

    left_out = {*NOT_AGAIN, "run_dir"}
    settings = {name: value for name, value in run.settings.items() if name not in left_out}
    of_python = run.fingerprint.get("input", "memory").startswith("memory")
    try:
        check_model_name(settings["model_type"], "--model-type")
        words = as_words(InferConfig, settings)
    except (UsageError, KeyError):
        of_python = True
    if of_python:
        return "run_inference, called as before and with resume=True"
    return shlex.join(["penstock", "infer", *words, *_run_dir(run, config), "--resume"])


def _run_dir(run: RunFolder, config: VerifyConfig) -> list[str]:
    return [] if config.run_dir is None else ["--run-dir", str(run.folder)]


def _spec(spec: Any) -> str:
    return json.dumps(spec) if isinstance(spec, dict) else str(spec)
