"""Whether the workers of a cluster see the folder of a run, which may be a disk of one machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ...base import UsageError, nearest, system_errors
from ...cluster import Workers


def check_seen(run_dir: Path | str, workers: Workers) -> None:
    """Refuse a run folder that workers do not see. A file is written to find out, and removed.

    Workers that join later check it themselves.

    Args:
        run_dir: The run folder, which may not be there yet.
        workers: The workers that are there.

    Raises:
        UsageError: A machine does not see the folder, or nothing can be written there.
    """
    if isinstance(run_dir, str):
        return
    one_of = {host: address for address, host in workers.hosts().items()}
    place = nearest(run_dir.absolute())
    with (
        system_errors(f"--run-dir {run_dir}"),
        tempfile.NamedTemporaryFile(dir=place, prefix=".penstock-") as trial,
    ):
        asked = list(one_of.values())
        seen = workers.client.run(_sees, trial.name, workers=asked, on_error="return")
    blind = sorted(host for host, address in one_of.items() if seen.get(address) is False)
    if blind:
        raise UsageError(
            f"--run-dir {run_dir}: workers on {', '.join(blind[:3])} do not see this folder; give "
            "--run-dir s3://BUCKET/PREFIX, or a folder that all workers share"
        )


def _sees(file: str) -> bool:
    return Path(file).exists()
