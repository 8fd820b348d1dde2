"""Presets: what a suite measures, in JSON of the seed's keys, and the devices that it takes.

Beside those keys a preset may have ``train``, with whatever else ``penstock train`` may be told:
``{"amp": true, "backbone": "mobilenet"}``. One that names the device ``cuda`` there, or has several
ranks, is for so many GPUs as it has ranks; any other runs on whatever there is.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from ...base import Knobs, Natural, Positive, Refused, TrainConfig, UsageError, describe, plural

PRESETS = {
    "laptop": "laptop_rtx3080ti",
    "laptop-rtx3080ti": "laptop_rtx3080ti",
    "gb200": "gb200",
    "dgx-a100": "dgx_a100",
    "quick": "quick",
}
"""By what the user calls them. ``quick`` is for any machine, the others for those of the seed."""
PRESET_DEFAULTS = ("laptop", "gb200", "dgx-a100")
"""What ``--use-default-configs`` means, as far as there are devices for them."""

OWN = frozenset(
    "train_data_root val_data_root train_label_file val_label_file train_chips_path val_chips_path "
    "output_dir epochs batch_size num_workers learning_rate distributed seed resume "
    "overwrite".split()
)
"""Knobs of a training that the suite sets; a preset's ``train`` may not."""


class SuitePreset(Knobs):
    """What to measure: the keys of the seed's files, and ``train``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """Part of the names of folders."""
    batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Of each device."""
    num_workers_list: Annotated[tuple[Natural, ...], Field(min_length=1)]
    epochs: Positive
    channels: str = "vh,vv,bathymetry"
    """Those that the chips must have."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.005
    distributed: bool = False
    world_size: Positive = 1
    """Devices, each with a rank of its own."""
    save_checkpoints: bool = False
    """Without them a run keeps its best weights alone."""
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
        return str((self.train or {}).get("device", TrainConfig.model_fields["device"].default))


def named_preset(name: str) -> SuitePreset:
    """One of `PRESETS`."""
    file = resources.files(__package__) / "presets" / f"{PRESETS[name]}.json"
    return _preset(json.loads(file.read_text()), f"preset {name}")


def read_preset(path: Path) -> SuitePreset:
    """A preset from a user's file.

    Raises `UsageError` with one sentence for the first thing that is wrong with it.
    """
    where = f"--config {path}"
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {describe(error)}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{where} holds no settings")
    return _preset(settings, where)


def _preset(settings: Mapping[str, Any], where: str) -> SuitePreset:
    _known(settings, SuitePreset.model_fields, where)
    try:
        made = SuitePreset.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UsageError(f"{where} lacks the key {name!r}") from None
        message = first["msg"].removeprefix("Value error, ")
        at = f"{name} {first['input']!r}: " if name else ""
        raise UsageError(f"{where}: {at}{message[:1].lower()}{message[1:]}") from None
    further = made.train or {}
    for name in sorted(further.keys() & OWN):
        raise UsageError(f"{where}: {name!r} is the suite's to set, not for its key 'train'")
    _known(further, TrainConfig.model_fields.keys() - OWN, f"{where}, train")
    return made


def _known(settings: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    names = sorted(names)
    for key in settings:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise UsageError(f"{where}: there is no key {key!r}; {hint}")


def fit_preset(preset: SuitePreset, gpus: Sequence[str], anyway: bool) -> tuple[SuitePreset, str]:
    """The preset for a machine with these GPUs and, where it is no longer what it was, why.

    Raises `Refused` with the two numbers where it is for more GPUs than there are.
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
