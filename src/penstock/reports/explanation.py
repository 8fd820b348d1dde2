"""What limited a run or a benchmark, what to change, and whether that helped: the sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base import UsageError, plural
from ..instruments import Interval, Record, read_ledger
from .cell import inverse
from .change import Change, Held, ranked
from .infer.changes import changes_of_run
from .infer.changes import unset_lines as unset_of_run
from .infer.limits import limit_lines
from .infer.record import InferenceRun
from .infer.sentences import bound as bound_of_run
from .infer.sentences import headlines as headlines_of_run
from .infer.sentences import processor_had, waited
from .launches import launches_of
from .ledger_changes import explain_records
from .ledger_report import kinds_of
from .mfu import mfu_lines
from .phases import quantities_of
from .places import RecordPlace, places_in
from .run_settings import settings_of_launch
from .table import Section
from .training.changes import changes_of_training
from .training.changes import unset_lines as unset_of_training
from .training.ranks import rank_lines
from .training.record import TrainingFolder
from .training.sentences import bound as bound_of_training
from .verdicts import Judge, Pair


@dataclass(frozen=True)
class Explanation:
    """The explanation of one run or one ledger."""

    name: str
    bound: Sequence[str]
    """Sentences on what limited it, and on what is not known."""
    changes: Sequence[Change]
    """Changes, the one with the largest gain first."""
    held: Sequence[Held] = field(default_factory=tuple)
    """Changes that were tested."""

    def lines(self) -> list[str]:
        """All of it in sentences, without commands."""
        numbered = [f"{n}. {change.sentence()}" for n, change in enumerate(self.changes, 1)]
        nothing = "No measurement supports a change."
        tested = [each.sentence() for each in self.held]
        return [*self.bound, *(numbered or [nothing]), *tested]


def explain(place: RecordPlace, others: Sequence[Path] = ()) -> Explanation:
    """Explain the run or the ledger at a place.

    Args:
        place: A ledger, or the folder of a run.
        others: More runs that may have tested a change. Runs beside the run are found anyway.

    Returns:
        What limited it, and changes by their expected gain.

    Raises:
        UsageError: The place cannot be read.
    """
    if place.kind == "ledger":
        return _of_ledger(place)
    if place.kind == "training":
        training = TrainingFolder.read(place.path)
        limits = mfu_lines(training.results, training.args)
        lines = [bound_of_training(training), *limits, *rank_lines(training)]
        lines += unset_of_training(training)
        return _with_tests(place, lines, changes_of_training(training), others)
    run = InferenceRun.read(place.path)
    if not run.stages or not run.seconds:
        return Explanation(run.name, headlines_of_run(run), [])
    lines = [bound_of_run(run), waited(run), *limit_lines(run), *unset_of_run(run)]
    return _with_tests(place, lines, changes_of_run(run), others)


def _of_ledger(place: RecordPlace) -> Explanation:
    records = read_ledger(place.path)
    lines = [
        line
        for kind in kinds_of(records, place.path.name).values()
        for line in kind.headlines(records)
    ]
    changes, held, roofs = explain_records(records)
    return Explanation(place.path.name, [*lines, *roofs], ranked(changes), held)


def _with_tests(
    place: RecordPlace, lines: Sequence[str], changes: Sequence[Change], others: Sequence[Path]
) -> Explanation:
    """An explanation, with the gains that other runs measured for its changes."""
    (base,) = launches_of([place])
    tried = list(_tests(place, others))
    held = [
        Held(change, Path(test.id).name.removesuffix(".penstock"), _gain(base, test), _doubt(test))
        for change in changes
        for test in tried
        if test.scenario == base.scenario and _is_test(base, test, change.settings)
    ]
    name = place.path.name.removesuffix(".penstock")
    return Explanation(name, list(lines), ranked(changes), held)


def _tests(place: RecordPlace, others: Sequence[Path]) -> Iterator[Record]:
    """Yield the launches of the runs beside a run, and of the runs that the user names."""
    seen = {place.path.resolve()}
    for beside in places_in(place.path.absolute().parent, others):
        if beside.kind == place.kind and beside.path.resolve() not in seen:
            seen.add(beside.path.resolve())
            try:
                yield from launches_of([beside])
            except UsageError:  # an unfinished run tests nothing yet
                continue


def _is_test(base: Record, test: Record, change: Any) -> bool:
    """Whether a launch has the settings of the base with the change, and no other difference."""
    wanted = {**settings_of_launch(base), **change}
    return bool(change) and _plain(wanted) == _plain(settings_of_launch(test))


def _plain(settings: Any) -> dict[str, str]:
    """Settings as text, without unset ones. A list of equal numbers becomes one number."""
    plain = {}
    for name, value in settings.items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        if len({repr(each) for each in values}) == 1:
            values = values[:1]
        if value is not None:
            plain[name] = " ".join(map(str, values))
    return plain


def _gain(base: Record, test: Record) -> Interval:
    """How many times as fast a test was, with the interval of the steps of both."""
    metric = "sample" if base.scenario == "training" and "sample" in base.samples_s else "step"
    pair = Pair(base.key, metric, [base], [test], [], [])
    rows = quantities_of(pair, Judge(0.02, 0.95), np.random.default_rng(0))
    row = next(row for row in rows if row.name == metric)
    assert row.ratio is not None
    return replace(inverse(row.ratio), n=1)


def _doubt(test: Record) -> str:
    """A reason not to trust a test: others used the cores while its network ran. Or empty."""
    if test.scenario != "infer":
        return ""
    run = InferenceRun.read(Path(test.id))
    had = processor_had(run, "forward") if "forward" in run.stages else None
    return "" if had is None else f"it had a processor for at most {had:.0%} of that time"


def explanation_sections(explanations: Sequence[Explanation]) -> list[Section]:
    """Sections for a terminal or a page.

    Args:
        explanations: What is known of each run or ledger.

    Returns:
        A section for each of them, and one of the commands that would test its changes.
    """
    sections = []
    for each in explanations:
        sections.append(Section(each.name, (), each.lines()))
        commands = [change.command for change in each.changes if change.command]
        if commands:
            title = f"To test {plural(len(commands), 'change')}; then run explain again"
            sections.append(Section(title, (), commands))
    return sections


def explanation_document(explanations: Sequence[Explanation]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "format": "penstock-explain",
        "version": 1,
        "runs": [
            {
                "name": each.name,
                "bound": list(each.bound),
                "changes": [
                    {
                        "what": change.what, "why": change.why, "gain": change.gain.value,
                        "low": change.gain.low, "high": change.gain.high, "n": change.gain.n,
                        "basis": change.basis, "settings": dict(change.settings),
                        "command": change.command,
                    }
                    for change in each.changes
                ],
                "tested": [
                    {
                        "what": held.change.what, "where": held.where, "verdict": held.verdict,
                        "measured": held.measured.value, "low": held.measured.low,
                        "high": held.measured.high,
                    }
                    for held in each.held
                ],
            }
            for each in explanations
        ],
    }  # fmt: skip
