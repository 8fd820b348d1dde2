"""The settings that must be equal among runs that are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

COMPARED = {
    "epochs": "number of epochs",
    "max_epochs": "number of epochs",
    "max_steps": "number of steps",
    "workload": "workload",
    "model": "model",
    "backbone": "backbone",
    "model_parameters": "parameters",
    "parameters": "parameters",
    "hidden_dims": "hidden layers",
    "hidden_dimensions": "hidden layers",
    "dropout": "dropout",
    "noise": "noise",
    "noise_level": "noise",
    "learning_rate": "learning rate",
    "lr": "learning rate",
    "optimizer": "optimizer",
    "weight_decay": "weight decay",
    "schedule": "schedule",
    "warmup_steps": "steps of warm-up",
    "clip_norm": "clipping of gradients",
    "precision": "precision",
    "amp": "mixed precision",
    "dtype": "dtype",
    "tf32": "use of TF32",
    "channels_last": "channels last",
    "compile": "compilation",
    "checkpointing": "recomputing",
    "num_workers": "number of workers",
    "number_of_workers": "number of workers",
}
"""Settings by their names in logs, knobs and trackers, each with its name in a sentence. Batches
and devices are not among them, because a study varies them."""


def settings_of(values: Mapping[str, object]) -> dict[str, str]:
    """The settings among these names and values, under one name each; the first spelling counts.

    >>> settings_of({"Max epochs": "50", "epochs": 40, "seed": 3, "dropout": None})
    {'number of epochs': '50'}
    """
    settings: dict[str, str] = {}
    for key, value in values.items():
        name = COMPARED.get(key.lower().replace(" ", "_"))
        if name is not None and value not in (None, ""):
            settings.setdefault(name, plain(value))
    return settings


def plain(value: object) -> str:
    """A setting as text in one spelling, exact to the last digit.

    >>> plain("1e-3"), plain(0.001), plain("2834.0"), plain("[64, 32]")
    ('0.001', '0.001', '2834', '[64, 32]')
    """
    text = str(value)
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            return str(int(number)) if number == number // 1 else repr(number)
    return text
