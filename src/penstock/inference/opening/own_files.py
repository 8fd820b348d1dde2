"""The files of a job besides its outputs: they may replace nothing and lie inside no array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from ...base import InferConfig, UsageError, check_folder, check_outputs
from ...data import Sink, Source
from ...models import model_files
from ..run_folder.bucket_folder import RemoteFolder
from ..run_folder.names import RUN_FILES


def check_own_files(
    config: InferConfig, run_dir: Path | str | None, source: Source, sinks: Sequence[Sink]
) -> None:
    """Refuse a run folder, a trace or metrics that would lie inside the input or an output, or
    replace a file of the run.

    ``run_dir`` is the run folder of the job, said or chosen; None for a job that has none.
    """
    if isinstance(config.run_dir, Path):
        check_folder(config.run_dir, "--run-dir")
    arrays = [("input", source.address), *(("output", sink.address) for sink in sinks)]
    if isinstance(run_dir, str):
        _check_apart(RemoteFolder(run_dir), arrays)
    here = run_dir if isinstance(run_dir, Path) else None
    named = [("--trace", config.trace), ("--metrics-json", config.metrics_json)]
    if run_dir is None and config.metrics_json is not None:
        named.append(("the rows of --metrics-json", config.metrics_json.with_suffix(".jsonl")))
    ours = [("--run-dir", here), *named]
    for (flag, path), (what, address) in itertools.product(ours, arrays):
        if path is not None and f"{path.resolve()}/".startswith(f"{address}/"):
            raise UsageError(f"{flag} {path} lies inside the {what}")
    kept = {here.resolve() / name for name in RUN_FILES} if here else set()
    for flag, path in named:
        if path is not None and path.resolve() in kept:
            raise UsageError(f"{flag} {path} is a file of the run folder; give another name")
    given = [config.in_spec, config.weights, *config.out_spec, *model_files(config.model_type)]
    read = [Path(each) for each in given if isinstance(each, str | Path)]
    check_outputs(*named, replace=config.overwrite, inputs=read)


def _check_apart(folder: RemoteFolder, arrays: Sequence[tuple[str, str]]) -> None:
    """Refuse a run folder in a bucket that lies inside the input or an output."""
    for what, address in arrays:
        if f"{folder.address}/".startswith(f"{address}/"):
            raise UsageError(f"--run-dir {folder} lies inside the {what}")
