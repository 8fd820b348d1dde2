"""``penstock verify``: prove by checksums that an output is complete and written by its run."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base import (
    UsageError,
    VerifyConfig,
    add_flags,
    check_local,
    check_outputs,
    format_bytes,
    from_flags,
    json_text,
    one_heap,
    plural,
    write_output,
)
from ..data import count_differing, no_block_again
from ..inference import (
    Finding,
    Kind,
    Proof,
    Recomputed,
    RunFolder,
    is_label_run,
    open_run,
    verify_run,
)
from ..models import REGISTRY, check_model_name
from .progress import counted_progress

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
        help="the output of infer or label; if the run has several outputs, one or all of them",
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
    run, proof = proven(args, config)
    if proof.bad and config.forget:
        from ..inference import take_off  # it loads torch

        print(f"{plural(take_off(run, proof), 'block')} taken off the list of the run")
    if proof.bad:
        print(_cure(run, proof, config))
        return exit_code(proof)
    return check_levels(run, config.readers)


def proven(args: argparse.Namespace, config: VerifyConfig) -> tuple[RunFolder, Proof]:
    """Verify an output, and print what is wrong with it; also recompute blocks if that is asked
    for."""
    if isinstance(config.run_dir, Path):
        check_local(config.run_dir, "--run-dir")
    one_heap()
    run = open_run(args.output, config.run_dir)
    check_outputs(("--json", args.json), replace=config.overwrite, inputs=[Path(run.folder.place)])
    with counted_progress(run.num_blocks, "block", "verifying") as progress:
        proof = verify_run(run, config.readers, config.retry_for, progress)
    done = None
    if config.recompute is not None:
        from ..inference import recompute_blocks, sample

        keys = sample(run, proof, config.recompute, config.seed)
        with counted_progress(len(keys), "block", "computing") as progress:
            done = recompute_blocks(run, proof, keys, config, progress)
        proof.findings += done.findings
    if args.json is not None:
        write_output(
            "--json", args.json, json_text(_as_dict(run, proof, done), 1), replace=config.overwrite
        )
    print("\n".join(_lines(run, proof, done, config)))
    return run, proof


def check_levels(run: RunFolder, threads: int) -> int:
    """Compare the levels of the outputs with the blocks. Returns 1 where one differs, else 0."""
    code = 0
    for spec, stored in zip(run.specs, run.outputs, strict=True):
        counts, name = count_differing(spec, threads), stored.written.name
        wrong = {level: each for level, each in counts.items() if each[1]}
        for level, (chunks, differing) in wrong.items():
            what = "gone, or one above is"
            if chunks:
                what = f"not that of the one above in {differing:,} of {plural(chunks, 'chunk')}"
            command = f"penstock repair {shlex.quote(str(spec))}"
            print(f"Level {level} of {name} is {what}; {command} makes all levels anew")
        if counts and not wrong:
            print(f"{plural(len(counts), 'level')} of {name}: as the blocks have it")
        code = code or int(bool(wrong))
    return code


def exit_code(proof: Proof) -> int:
    """1 for damaged or different blocks, 3 for missing ones."""
    if proof.of_kind("damaged") or proof.of_kind("different"):
        return 1
    return 3 if proof.bad else 0


def _lines(
    run: RunFolder, proof: Proof, done: Recomputed | None, config: VerifyConfig
) -> Iterator[str]:
    names = ", ".join(stored.written.name for stored in run.outputs)
    yield (
        f"{names}: {proof.proven:,} of {proof.blocks:,} blocks are proven, "
        f"{format_bytes(proof.proven_bytes)} of values, by the checksums in {run.folder}"
    )
    yield from (f"Not locked: {reason}" for reason in run.lacking)
    if run.cut:
        yield f"Cut: {run.cut}"
    if done is not None:
        differ = len({finding.key for finding in done.findings})
        yield (
            f"Computed anew: {done.sampled:,} of {plural(done.population, 'block')} (--seed "
            f"{config.seed}): {done.equal:,} have the same bits"
            f"{f'; {differ:,} differ' if differ else ''}"
        )
    for kind in KINDS:
        word, findings = kind.capitalize(), proof.of_kind(kind)
        for finding in findings[:SHOWN]:
            yield f"{word}: {run.named(finding.key)} of {finding.output} {finding.what}"
        unlisted = proof.unlisted if kind == "missing" else 0
        if more := len(findings[SHOWN:]) + unlisted:
            lists = f"all but the last {unlisted:,}" if unlisted else "all"
            yield f"{word}: {more:,} more; --json FILE lists {lists}"


def _as_dict(run: RunFolder, proof: Proof, done: Recomputed | None) -> dict[str, Any]:
    recomputed = done and {"blocks": done.sampled, "of": done.population, "equal": done.equal}
    table = {
        "outputs": [stored.written.name for stored in run.outputs],
        "run_dir": str(run.folder),
        "run": run.content.get("run"),
        "blocks": proof.blocks,
        "proven": proof.proven,
        "proven_bytes": proof.proven_bytes,
        "unlisted": proof.unlisted,
        "recomputed": recomputed,
    }
    return table | {kind: [_finding(run, each) for each in proof.of_kind(kind)] for kind in KINDS}


def _finding(run: RunFolder, finding: Finding) -> dict[str, Any]:
    box = run.blocks.cell(finding.key[1:])
    return {
        "volume": finding.key[0],
        "block": finding.key[1:],
        "start": box.start,
        "stop": box.stop,
        "output": finding.output,
        "what": finding.what,
    }


def _cure(run: RunFolder, proof: Proof, config: VerifyConfig) -> str:
    """A sentence with the command that makes the bad blocks again."""
    for stored in run.outputs:
        if stored.written.is_file:
            return no_block_again(stored.written.name)
    model = str(run.settings.get("model_type"))
    outputs = [json.dumps(spec) if isinstance(spec, dict) else str(spec) for spec in run.specs]
    place = [] if config.run_dir is None else ["--run-dir", str(run.folder)]
    try:
        check_model_name(model, "--model")
        of_python = str(run.fingerprint["input"]).startswith("memory")
    except UsageError:  # an object in Python
        of_python = True
    if of_python:
        first = shlex.join(["penstock", "verify", *outputs, *place, "--forget"])
        again = "run_inference, called as before and with resume=True"
        if is_label_run(run.content):
            again = "penstock label, as before and with --resume"
        return f"This makes them: {'' if config.forget else f'{first}, and then '}{again}"
    if proof.of_kind("different"):
        place += ["--recompute", f"{config.recompute}", "--seed", f"{config.seed}"]
    if model in REGISTRY:
        return f"This makes them: {shlex.join(['penstock', 'repair', *outputs, *place])}"
    words = ["penstock", "repair", *outputs, *place, "--model", config.model or model]
    return f"This makes them, and runs the code of that model: {shlex.join(words)}"
