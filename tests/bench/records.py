"""Records of launches that never were."""

from collections.abc import Mapping
from typing import Any

from penstock.instruments.record import Record, case_key


def made_record(
    scenario: str, case: Mapping[str, Any], launch: int = 0, status: str = "ok", **fields: Any
) -> Record:
    """A record; ``fields`` override what it usually is."""
    key = case_key(scenario, case)
    usual = {
        "id": f"{key}-{launch}", "time": "2026-01-01T00:00:00+00:00", "scenario": scenario,
        "case": dict(case), "key": key, "launch": launch, "status": status,
    }  # fmt: skip
    return Record.model_validate(usual | fields)
