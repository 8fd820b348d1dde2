"""The folder of a run: no two runs are mixed in one, and what is not a run's is left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..base import ARGS, RESULTS, STEPS, TRACEBACK_FILE, TrainConfig, UsageError, read_json
from ..data import DOCUMENT
from .checkpoint import BEST, CHECKPOINTS, LAST
from .profiling import PROFILE_FOLDER
from .tracking.events import EVENTS
from .tracking.protocol import TRACKING_FOLDER

OURS = (
    RESULTS,
    BEST,
    CHECKPOINTS,
    STEPS,
    EVENTS,
    TRACKING_FOLDER,
    PROFILE_FOLDER,
    TRACEBACK_FILE,
)
"""What one run leaves in its folder and another must not find there."""


def data_folders(config: TrainConfig) -> dict[str, Path | None]:
    """Folders that hold nothing but data, by flag: chips and packed data sets. Scenes lie in
    folders of their own, beside which there is room."""
    roots = {
        "--train-data-root": config.train_data_root,
        "--val-data-root": config.val_data_root,
    }
    packed = {flag: root for flag, root in roots.items() if root and (root / DOCUMENT).is_file()}
    chips = {
        "--train-chips-path": config.train_chips_path,
        "--val-chips-path": config.val_chips_path,
    }
    return {**packed, **chips}


def take_folder(config: TrainConfig, is_first: bool) -> bool:
    """Refuse to mix two runs; make way where that was asked for. Whether the run goes on with one
    that is there, as the first rank sees it.

    A run that was stopped before its first checkpoint has nothing to go on from, so to resume it is
    to begin anew.
    """
    if config.resume and config.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove; give one")
    if not is_first:
        return False
    if config.resume and _has_checkpoint(config.output_dir):
        return True
    for path in _left_by_a_run(config.output_dir, replaced=config.overwrite or config.resume):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return False


def _has_checkpoint(out: Path) -> bool:
    """Raises `UsageError` where there is none, and the run was past its first."""
    last = out / CHECKPOINTS / LAST
    if last.is_file():
        return True
    for path in (out / RESULTS, out / BEST, *(out / CHECKPOINTS).glob("*.pt")):
        if path.exists():
            raise UsageError(
                f"--resume: there is no checkpoint {last}, and {path} is of a run that had one; "
                "--overwrite begins anew"
            )
    return False


def _left_by_a_run(out: Path, *, replaced: bool) -> list[Path]:
    """What stands there of an earlier run. Raises `UsageError` where it may not be removed."""
    there = [out / name for name in OURS if (out / name).exists()]
    has_args = (out / ARGS).exists()
    args = read_json(out / ARGS) if has_args else {"workload": None}
    if not (isinstance(args, dict) and "workload" in args):
        raise UsageError(f"--output-dir {out}: its {ARGS} is none of ours; give another folder")
    if there and not replaced:
        raise UsageError(f"--output-dir {out} holds a run; use --resume or --overwrite")
    if there and not has_args:
        raise UsageError(
            f"--output-dir {out} holds {there[0].name} and no {ARGS}, which every run leaves: it "
            "may be somebody else's, and nothing was removed"
        )
    return there
