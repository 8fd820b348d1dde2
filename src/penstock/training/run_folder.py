"""The folder of a run. Two runs never share one, and files that no run wrote are not removed."""

from __future__ import annotations

from pathlib import Path

from ..base import (
    ARGS,
    BEST,
    CHECKPOINTS,
    PICTURES,
    RESULTS,
    STEPS,
    TRACEBACK_FILE,
    TrainConfig,
    UsageError,
    read_json,
    remove,
)
from ..data import DOCUMENT
from .checkpoint import LAST
from .profiling import PROFILE_FOLDER
from .tracking import TRACKING_FOLDER

OURS = (
    RESULTS,
    BEST,
    PICTURES,
    CHECKPOINTS,
    STEPS,
    TRACKING_FOLDER,
    PROFILE_FOLDER,
    TRACEBACK_FILE,
)
"""The files and folders of a run. Another run in the same folder is refused, or removes them."""


def data_folders(config: TrainConfig) -> dict[str, Path | None]:
    """The folders of chips and packed data sets, by flag, inside which no run may write. Folders of
    scenes are not among them, because each scene has its own folder in them."""
    roots = {
        "--train-data-root": config.train_data_root,
        "--val-data-root": config.val_data_root,
    }
    packed = {flag: root for flag, root in roots.items() if root and (root / DOCUMENT).is_file()}
    return {
        **packed,
        "--train-chips-path": config.train_chips_path,
        "--val-chips-path": config.val_chips_path,
    }


def take_folder(config: TrainConfig, is_first: bool) -> bool:
    """Make the folder ready for a run, on its first rank.

    With --overwrite an earlier run is removed. With --resume it goes on from its last checkpoint;
    if it was stopped before the first one, it begins anew.

    Returns:
        True if the run goes on from a checkpoint; False on other ranks.

    Raises:
        UsageError: The folder holds another run, or files that may not be a run's.
    """
    if config.resume and config.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove; give one")
    if not is_first:
        return False
    if config.resume and _has_checkpoint(config.output_dir):
        return True
    remove(_left_by_a_run(config.output_dir, replaced=config.overwrite or config.resume))
    return False


def _has_checkpoint(out: Path) -> bool:
    """Whether there is a last checkpoint. Raises `UsageError` if other files show that one is
    missing."""
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
    """The files of an earlier run. Raises `UsageError` if they may not be removed."""
    there = [out / name for name in OURS if (out / name).exists()]
    has_args = (out / ARGS).exists()
    args = read_json(out / ARGS) if has_args else {"workload": None}
    if not (isinstance(args, dict) and "workload" in args):
        raise UsageError(
            f"--output-dir {out}: Penstock did not write its {ARGS}; give another folder"
        )
    if there and not replaced:
        raise UsageError(f"--output-dir {out} holds a run; use --resume or --overwrite")
    if there and not has_args:
        raise UsageError(
            f"--output-dir {out} holds {there[0].name} and no {ARGS}, which every run leaves: it "
            "may not be Penstock's, and nothing was removed"
        )
    return there
