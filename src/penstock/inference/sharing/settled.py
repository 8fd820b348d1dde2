"""The settings of a job with absolute paths, as workers may run in other folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base import InferConfig, UsageError


def settled(config: InferConfig) -> InferConfig:
    """The settings with all paths made absolute.

    Raises `UsageError` for a model, input or output in memory, which no other process can open.
    """
    if not isinstance(config.model_type, str):
        raise UsageError("--cluster needs a model by name, reference or file, not a module")
    specs = [config.in_spec, *config.out_spec]
    if any(not isinstance(spec, str | Path | dict) for spec in specs):
        raise UsageError("--cluster needs an input and outputs that workers open, not arrays")
    name, colon, function = config.model_type.rpartition(":")
    file = Path(name if colon else function)
    model = config.model_type
    if file.is_file():
        model = f"{file.absolute()}{colon}{function if colon else ''}"
    folders = {name: whole(getattr(config, name)) for name in ("weights", "run_dir")}
    return config.model_copy(
        update={
            **folders,
            "in_spec": _absolute(config.in_spec),
            "out_spec": tuple(map(_absolute, config.out_spec)),
            "model_type": model,
        }
    )


def _absolute(spec: Any) -> Any:
    """Make a path absolute. Return URLs and TensorStore's JSON as they are."""
    text = str(spec)
    if isinstance(spec, dict) or "://" in text or text.lstrip().startswith("{"):
        return spec
    return str(Path(text).absolute())


def whole(path: Path | str | None) -> Path | str | None:
    """Make a local path absolute. Return a URL as it is."""
    return path.absolute() if isinstance(path, Path) else path
