"""Settings of jobs by name: YAML files that Penstock ships, and those of the user.

--preset raven          ~/.config/penstock/slurm/raven.yaml if there is one, else the shipped file
--preset ./mine.yaml    that file
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import SlurmConfig, UsageError, check_file, read_yaml

SHIPPED = Path(__file__).parent / "presets"


def preset_folder() -> Path:
    """The folder of the user's presets."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "penstock" / "slurm"


def shipped_presets() -> list[str]:
    """The names of the presets that Penstock ships."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def slurm_preset(name: str | None) -> Mapping[str, Any]:
    """The settings of a preset; none if ``name`` is None.

    Args:
        name: A name, or the path of a YAML file: it ends in .yaml or .yml, or holds a slash.

    Returns:
        Settings of `SlurmConfig` by name, each checked by itself.

    Raises:
        UsageError: There is no such preset, or a setting in it is wrong.
    """
    return {} if name is None else read_settings(_path_of(name), "--preset")


def read_settings(path: Path, flag: str) -> dict[str, Any]:
    """Read settings of jobs from a YAML file.

    Args:
        path: The file.
        flag: The flag that names it.

    Returns:
        Settings of `SlurmConfig` by name, each checked by itself.

    Raises:
        UsageError: The file cannot be read, or a setting is wrong.
    """
    settings = read_yaml(path, flag)
    check_file(SlurmConfig, settings, f"{flag} {path}")
    return settings


def _path_of(name: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name).expanduser()
    folder = preset_folder()
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise UsageError(f"--preset {name!r} is neither a name nor the path of a YAML file")
    for place in (folder, SHIPPED):
        if (path := place / f"{name}.yaml").is_file():
            return path
    names = dict.fromkeys(
        [*shipped_presets(), *sorted(path.stem for path in folder.glob("*.yaml"))]
    )
    raise UsageError(
        f"--preset {name}: no such preset; there are {', '.join(names)}, the files "
        f"NAME.yaml in {folder}, and any file by its path"
    )
