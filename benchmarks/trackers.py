"""What ``--track`` costs a training: runs with trackers and without, in turns.

    python benchmarks/trackers.py            the numbers of README.md, about six minutes
    python benchmarks/trackers.py --quick    a smoke test, README untouched

The spiral's steps are as short as steps get, so what a tracker takes of one shows most there. All
is offline: MLflow's database and Comet's archive in the folder of the run. A ratio is taken between
two runs of one round. The median step says what a step costs while others are told; the median
epoch also what lies between steps; and all epochs also what the processes of trackers take of the
cores as they start, which a short run feels and a long one does not.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import readme
from penstock.base.units import format_seconds
from penstock.instruments.environment import collect_environment

HERE = Path(__file__).resolve().parent
ALONE = "none"
CONTENDERS = (ALONE, "mlflow", "comet,mlflow,tensorboard")
MEASURES = {"step": "step_s", "epoch": "epoch_s", "all epochs": "training_s"}

Sample = dict[str, Any]


def run(out: Path, contender: str, flags: Sequence[str]) -> Sample:
    """A training in a fresh process, and the seconds of its steps and epochs."""
    track = [] if contender == ALONE else ["--track", contender]
    command = [sys.executable, "-m", "penstock", "train", "spiral", "--device", "cpu", *flags]
    hidden = {"COMET_API_KEY", "MLFLOW_TRACKING_URI"}
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    load = os.getloadavg()[0]
    subprocess.run(
        [*command, "--output-dir", str(out), *track],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    results = json.loads((out / "training_results.json").read_text())
    with (out / "steps" / "rank0.csv").open(newline="") as file:
        steps = [round(float(row["step_s"]), 6) for row in csv.DictReader(file)]
    return {
        "contender": contender,
        "load": round(load, 2),
        "step_s": steps,
        "epoch_s": results["epoch_times_s"],
        "training_s": [results["training_s"]],
        "trackers": [
            {name: each[name] for name in ("name", "status", "error")}
            for each in results["trackers"]
        ],
    }


def ratios(rounds: Sequence[Mapping[str, Sample]], contender: str, what: str) -> list[float]:
    """Of medians, this contender's to that of the run alone in the same round."""
    return [median(each[contender][what]) / median(each[ALONE][what]) for each in rounds]


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} [{min(values):.3f} - {max(values):.3f}]"


def table(rounds: Sequence[Mapping[str, Sample]]) -> list[str]:
    columns = [f"{name} | {name} / none's" for name in MEASURES]
    lines = [
        f"| --track | {' | '.join(columns)} | trackers that failed |",
        "|---|" + "---:|---:|" * len(columns) + "---:|",
    ]
    for contender in CONTENDERS:
        samples = [each[contender] for each in rounds]
        cells = [contender.replace(",", ", ")]
        for what in MEASURES.values():
            cells.append(format_seconds(median(median(sample[what]) for sample in samples)))
            cells.append("1" if contender == ALONE else spread(ratios(rounds, contender, what)))
        failed = [each["status"] != "ok" for sample in samples for each in sample["trackers"]]
        cells.append(f"{sum(failed)} of {len(failed)}" if failed else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    number, flags = 5, ["--num-samples", "60000", "--epochs", "5", "--threads", "1"]
    if args.quick:
        number, flags = 1, ["--num-samples", "400", "--epochs", "2", "--threads", "1"]
    rounds: list[dict[str, Sample]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(number):
            of = {c: run(Path(folder) / f"{turn}-{i}", c, flags) for i, c in enumerate(CONTENDERS)}
            rounds.append(of)
    day = datetime.now(UTC).date().isoformat()
    args.results.mkdir(parents=True, exist_ok=True)
    with gzip.open(args.results / f"{day}-trackers.jsonl.gz", "wt") as file:
        for turn, of in enumerate(rounds):
            file.writelines(json.dumps({"round": turn, **of[c]}) + "\n" for c in CONTENDERS)
    here, nice = collect_environment()["machine"], os.nice(0)
    loads = [sample["load"] for of in rounds for sample in of.values()]
    machine = (
        f"{day}, {here['processor']}, {here['cores']} cores, {platform.system()}; load average "
        f"before a run: median {median(loads):.1f}, most {max(loads):.1f}"
    )
    if nice:
        machine += f"; all at nice {nice}, so that trainings had no precedence over trackers"
    steps = len(rounds[0][ALONE]["step_s"])
    about = (
        f"`penstock train spiral --device cpu {' '.join(flags)}`: {steps} steps a run, "
        f"{number} rounds. Each value: median [least - most] over rounds."
    )
    lines = [f"{machine}.", about, "", *table(rounds)]
    print("\n".join(lines))
    if not args.quick:
        readme.write("trackers", "\n".join(lines))


if __name__ == "__main__":
    main()
