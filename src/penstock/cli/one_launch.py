"""The record of a command that is no benchmark: one launch, in a ledger beside its output."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ..base import Labels, as_settings, default_name, redacted, run_labels
from ..instruments import Ledger, Record, case_key, collect_environment, peak_rss


def keep_launch(
    output: Path,
    scenario: str,
    config: Labels,
    seconds: Mapping[str, float],
    work: Mapping[str, float],
) -> None:
    """Add a launch to the ledger ``OUTPUT.ledger``. ``penstock compare OUTPUT`` finds it there.

    Args:
        output: What the command wrote.
        scenario: The verb.
        config: Its settings, name and tags. Secrets are removed before they are kept.
        seconds: Seconds by phase; ``step`` is the total.
        work: Amount of work done in this time, by unit.

    Raises:
        UsageError: The ledger cannot be written.
    """
    given = as_settings(config).items()
    settings = {name: value for name, value in given if name not in Labels.model_fields}
    rates = {f"{what}/s": count / seconds["step"] for what, count in work.items()}
    record = Record.model_validate(
        {
            "id": uuid.uuid4().hex,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "scenario": scenario,
            "case": {},
            "key": case_key(scenario, {}),
            "launch": 0,
            "status": "ok",
            "work": dict(work),
            "samples_s": {name: (value,) for name, value in seconds.items()},
            "memory": {"host_peak_kernel": peak_rss()},
            "facts": {"settings": redacted(settings), "rates": rates},
            "environment": collect_environment(),
        }
    )
    labels = run_labels(config, default_name(scenario))
    Ledger(output.with_name(f"{output.name}.ledger"), labels).append(record)
