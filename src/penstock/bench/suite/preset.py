"""Presets of a suite: its settings as JSON with the seed's keys, and the devices that it needs.

A preset may also have the key ``train`` with more knobs of ``penstock train``: ``{"amp": true,
"backbone": "mobilenet"}``. A preset that sets the device ``cuda`` there, or has several ranks,
needs as many GPUs as it has ranks. Any other preset runs on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from ...base import (
    Knobs,
    Natural,
    Positive,
    Refused,
    TrainConfig,
    UsageError,
    as_usage_error,
    check_file,
    parsed_json,
    plural,
    system_errors,
)

PRESETS = {
    "laptop": "laptop_rtx3080ti",
    "laptop-rtx3080ti": "laptop_rtx3080ti",
    "gb200": "gb200",
    "dgx-a100": "dgx_a100",
    "quick": "quick",
}
"""The file of each preset by its name. ``quick`` is for any machine, the others for the seed's."""
PRESET_DEFAULTS = ("laptop", "gb200", "dgx-a100")
"""The presets of ``--use-default-configs``; those that need more devices than there are, are left
out."""

OWN = frozenset(
    "train_data_root val_data_root train_label_file val_label_file train_chips_path val_chips_path "
    "output_dir name tag epochs batch_size num_workers learning_rate distributed seed resume "
    "overwrite".split()
)
"""Knobs of a training that the suite sets, so that ``train`` of a preset must not."""


class SuitePreset(Knobs):
    """The settings of a suite: the keys of the seed's files, and ``train``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """The name, which is part of the names of folders."""
    batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """The batch sizes of each device."""
    num_workers_list: Annotated[tuple[Natural, ...], Field(min_length=1)]
    epochs: Positive
    channels: str = "vh,vv,bathymetry"
    """The channels that the chips must have."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.005
    distributed: bool = False
    world_size: Positive = 1
    """The number of ranks, each with its own device."""
    save_checkpoints: bool = False
    """False keeps only the best weights of a run."""
    profile_memory: bool = True
    profile_gpu: bool = True
    train: dict[str, Any] | None = None
    """Further knobs of ``penstock train``."""

    @model_validator(mode="after")
    def _ranks(self) -> SuitePreset:
        if self.world_size > 1 and not self.distributed:
            raise ValueError(f"world_size {self.world_size} needs distributed true")
        return self

    @property
    def device(self) -> str:
        """The device of its trainings: ``auto``, ``cpu``, ``cuda`` or ``mps``."""
        return str((self.train or {}).get("device", TrainConfig.model_fields["device"].default))


def named_preset(name: str) -> SuitePreset:
    """One of `PRESETS`."""
    file = resources.files(__package__) / "presets" / f"{PRESETS[name]}.json"
    return _preset(parsed_json(file.read_text()), f"preset {name}")


def read_preset(path: Path) -> SuitePreset:
    """A preset from a user's file.

    Where there is no file, ``configs/NAME.json`` is the preset that we ship under the seed's name.

    Raises:
        UsageError: the file cannot be read or is wrong; the message names the first error.
    """
    where = f"--config {path}"
    shipped = resources.files(__package__) / "presets" / path.name
    with as_usage_error(f"{where} is not JSON", ValueError), system_errors(where):
        if path.parent.name == "configs" and not path.exists() and shipped.is_file():
            return _preset(parsed_json(shipped.read_text()), where)
        settings = parsed_json(path.read_text())
    if not isinstance(settings, dict):
        raise UsageError(f"{where} holds no settings")
    return _preset(settings, where)


def _preset(settings: Mapping[str, Any], where: str) -> SuitePreset:
    check_file(SuitePreset, settings, where, whole=True)
    made = SuitePreset.model_validate(settings)
    further = made.train or {}
    for name in sorted(further.keys() & OWN):
        raise UsageError(f"{where}: {name!r} is the suite's to set, not for its key 'train'")
    check_file(TrainConfig, further, f"{where}, train")
    return made


def fit_preset(preset: SuitePreset, gpus: Sequence[str], anyway: bool) -> tuple[SuitePreset, str]:
    """The preset for a machine with these GPUs.

    Args:
        preset: the preset.
        gpus: the names of the GPUs that torch finds.
        anyway: whether to run on fewer GPUs than the preset has ranks.

    Returns:
        The preset, and a sentence if it was changed.

    Raises:
        Refused: it needs more GPUs than there are; the message has both numbers.
    """
    wanted, have = preset.world_size, len(gpus)
    on_any = preset.device in ("cpu", "mps") or (preset.device == "auto" and wanted == 1)
    if on_any or have >= wanted:
        return preset, ""
    here = plural(have, "GPU")
    lacking = f"preset {preset.name} is for {plural(wanted, 'GPU')} and torch finds {here} here"
    lacking += f"; --anyway runs it {'on ' + here if have else 'without a GPU'}"
    if not anyway:
        raise Refused(f"{lacking}, and penstock suite quick is for any machine")
    there = {
        "world_size": max(1, have),
        "distributed": have > 1,
        "train": {**(preset.train or {}), "device": "auto"},
    }
    return preset.model_copy(update=there), lacking
