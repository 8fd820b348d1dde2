"""Settings of jobs by name: YAML files that Penstock ships, and those of the user.

--preset raven          the shipped file of that name
--preset ./mine.yaml    that file
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import SlurmConfig, UsageError, check_file, read_yaml

SHIPPED = Path(__file__).parent / "presets"


def shipped_presets() -> list[str]:
    """The names of the presets that Penstock ships."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def slurm_preset(name: str) -> Mapping[str, Any]:
    """The settings of a preset.

    Args:
        name: A name, or the path of a YAML file: it ends in .yaml or .yml, or holds a slash.

    Returns:
        Settings of `SlurmConfig` by name, each checked by itself.

    Raises:
        UsageError: There is no such preset, or a setting in it is wrong.
    """
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    if not is_path and name not in (names := shipped_presets()):
        raise UsageError(
            f"--preset {name!r}: no such preset; there are {', '.join(names)}, and any YAML file "
            "by its path, such as ./mine.yaml"
        )
    path = Path(name).expanduser() if is_path else SHIPPED / f"{name}.yaml"
    return read_settings(path, "--preset")


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
