"""From scenes to a trained detector to its score, on scenes that it never saw.

    python benchmarks/detector.py             the numbers of README.md, a quarter of an hour or more
    python benchmarks/detector.py --quick     a smoke test, README untouched

Every step is a command of Penstock's, as a user would give it, in a process of its own: scenes are
generated, cut, trained on; ``penstock predict`` looks at scenes made from another seed, with the
threshold that did best on the validation scenes; ``penstock score xview3`` counts. Seconds are
those on the wall and those of the processors, which a busy machine does not lengthen.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import readme
from penstock.base.units import format_seconds
from penstock.data.scenes.objects import LOW, Objects, read_labels, read_predictions
from penstock.data.scenes.scene import Scene
from penstock.data.scenes.xview3_score import match
from penstock.instruments import environment
from penstock.reports.charts.chart import Axis, Figure, Panel, Series
from penstock.reports.charts.paper import COLOURS, PALETTE, save_figures

HERE = Path(__file__).resolve().parent
ENOUGH, MOST_SECONDS = 0.8, 15 * 60
LEADERBOARD = ["--drop-low-detect", "--costly-dist"]
NEAR_M = 200.0

DATA = ["--scenes", "8", "--validation", "2", "--size", "1024", "1024", "--seed", "0"]
UNSEEN = ["--scenes", "5", "--validation", "4", "--size", "1024", "1024", "--seed", "1000"]
CHIPS = ["--chip-size", "256", "--num-workers", "2"]
TRAIN = (
    "--backbone mobilenet --epochs 6 --batch-size 4 --optimizer adam --learning-rate 1e-3 "
    "--schedule cosine --warmup-steps 20 --clip-norm 5 --num-workers 1 --device cpu"
).split()
QUICK = {
    "data": "--scenes 2 --size 256 256 --objects 8".split(),
    "unseen": "--scenes 2 --size 256 256 --objects 8 --seed 9".split(),
    "chips": "--chip-size 160 --num-workers 1".split(),
    "train": ["--max-steps", "2", "--epochs", "1"],
}


# --- the commands -------------------------------------------------------------------------------


def commands(quick: bool) -> dict[str, list[str]]:
    """Each step's words; paths are inside one folder, where they are run."""
    data, unseen, chips, train = DATA, UNSEEN, CHIPS, TRAIN
    if quick:
        data, unseen, chips = QUICK["data"], QUICK["unseen"], QUICK["chips"]
        train = [*TRAIN, *QUICK["train"]]
    labels = "--train-label-file {}/train.csv --val-label-file {}/validation.csv"
    labels = labels.format("scenes/labels", "scenes/labels")
    scored = "score xview3 --inference-file predictions.csv --label-file "
    scored += "unseen/labels/validation.csv --shore-root unseen/shoreline"
    return {
        "generate": ["generate", "xview3", "scenes", *data],
        "generate unseen": ["generate", "xview3", "unseen", *unseen],
        "preprocess": f"preprocess --data-root scenes {labels} --output-dir chips".split() + chips,
        "train": "train --train-chips-path chips/train --val-chips-path chips/val "
        f"--train-data-root scenes --val-data-root scenes {labels} --output-dir run".split()
        + train,
        "predict": "predict run/best_model.pth --data-root unseen/validation --device cpu".split(),
        "score": [*scored.split(), *LEADERBOARD, "--output", "score.json"],
        "score, strict": [
            *scored.split(), *LEADERBOARD, "--strict-official", "--output", "strict.json",
        ],
    }  # fmt: skip


def carry_out(folder: Path, steps: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Run every step; what each took."""
    took = []
    for name, words in steps.items():
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-m", "penstock", *words], cwd=folder, check=True)
        after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        took.append({"step": name, "seconds": seconds, "cpu_s": cpu, "command": " ".join(words)})
    return took


def collected(folder: Path, took: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All that the report is computed from."""
    machine = environment.collect_environment()["machine"]
    results = json.loads((folder / "run" / "training_results.json").read_text())
    kept = ("workload", "parameters", "device", "facts", "batch_size", "epochs", "steps", "samples",
            "training_s", "validation_s", "samples_per_s", "judge", "best", "history")  # fmt: skip
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{machine['processor']}, {machine['cores']} cores, {platform.system()}",
        "steps": list(took),
        "training": {name: results[name] for name in kept},
        "score": json.loads((folder / "score.json").read_text()),
        "strict_official": json.loads((folder / "strict.json").read_text()),
        "scenes": len(read_labels(folder / "unseen" / "labels" / "validation.csv")),
    }


# --- the report ---------------------------------------------------------------------------------


def lines_of(document: Mapping[str, Any]) -> list[str]:
    """The report, every number and verdict from what was collected."""
    training, score = document["training"], document["score"]
    facts, steps = training["facts"], {step["step"]: step for step in document["steps"]}
    operators = (
        "torchvision's compiled" if facts["compiled_operators"] else "Penstock's plain torch"
    )
    load = document["load"]
    seconds, cpu = steps["train"]["seconds"], steps["train"]["cpu_s"]
    about = (
        f"{document['time'][:10]}, {document['machine']}; "
        f"load average {load:.1f} before. Faster R-CNN, "
        f"MobileNet FPN, {training['parameters']:,} parameters, channels "
        f"{', '.join(facts['chips']['channels'])}; nms and roi_align are {operators} "
        f"(torchvision {facts['torchvision']})."
    )
    header = ("localisation F1", "shore F1", "vessel F1", "fishing F1", "length", "aggregate")
    first = f"| scored on {document['scenes']} unseen scenes | {' | '.join(header)} |"
    lines = [about, "", first, "|---" * 7 + "|"]
    for name, scores in (
        ("repaired", score),
        ("as the official script counts", document["strict_official"]),
    ):
        cells = ["-" if value is None else f"{value:.3f}" for value in scores.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| step | wall | CPU |", "|---|---:|---:|"]
    for step in document["steps"]:
        times = f"{format_seconds(step['seconds'])} | {format_seconds(step['cpu_s'])}"
        lines.append(f"| `penstock {step['command']}` | {times} |")
    best = training["best"]
    course = (
        f"{training['steps']} steps of {training['batch_size']} chips in {training['epochs']} "
        f"epochs, {training['samples_per_s']:.2f} chips/s; {training['judge']} was best after "
        f"epoch {best['epoch'] + 1}, {best['score']:.3f}."
    )
    lines += [
        "",
        course,
        "",
        verdict("localisation F1 on unseen scenes is", score["loc_fscore"] or 0.0, ENOUGH),
        verdict("minutes of `penstock train` are", seconds / 60, MOST_SECONDS / 60, least=False)
        + f" On two free cores its {cpu / 60:.1f} minutes of CPU are at least {cpu / 120:.1f}.",
    ]
    return lines


def verdict(what: str, value: float, target: float, *, least: bool = True) -> str:
    met = value >= target if least else value <= target
    bound = "at least" if least else "at most"
    return f"- {'met' if met else '**NOT MET**'}: {what} {value:.3g}, target {bound} {target:g}."


# --- pictures -----------------------------------------------------------------------------------


def draw_loss(history: Sequence[Mapping[str, Any]], steps: Path, out: Path) -> None:
    """The loss of every step, and the score of every epoch."""
    with steps.open(newline="") as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    step, loss = np.array(rows).T
    width = max(1, len(loss) // 40)
    mean = np.convolve(loss, np.ones(width) / width, "valid")
    ends = [row["step"] for row in history]
    scores = [
        Series(label, ends, [row[name] for row in history], "dots", colour)
        for name, label, colour in (
            ("val_best_loc_fscore", "F1 at the best threshold", 2),
            ("val_loc_fscore", "F1 at a score of 0.5", 1),
            ("val_AP50", "AP50", "faint"),
        )
    ]
    losses = [
        Series("loss of a step", step, loss, faint=True),
        Series(f"mean of {width} steps", step[width - 1 :], mean),
    ]
    along = Axis("step", high=float(step[-1]))
    panels = [
        Panel("", along, Axis("loss"), losses),
        Panel("", along, Axis("validation", high=1.0), scores),
    ]
    note = f"{len(loss)} steps; scores after each epoch, on validation scenes"
    save_figures({out: Figure("The detector learns", note, panels)}, replace=True)


def draw_detections(folder: Path, out: Path) -> None:
    """The unseen scene in which most went wrong, as radar sees it: what was found, what not."""
    import matplotlib.figure

    labels = read_labels(folder / "unseen" / "labels" / "validation.csv")
    everything = read_predictions(folder / "predictions.csv")

    def of(scene: str) -> tuple[Objects, Objects]:
        return everything[everything.scene == scene], labels[scene]

    def wrong(scene: str) -> int:
        predicted, true = of(scene)
        right, _ = match(predicted.points, true.points, NEAR_M)
        return len(predicted) + int((true.confidence > LOW).sum()) - 2 * len(right)

    name = max(labels, key=wrong)
    predicted, true = of(name)
    with Scene(folder / "unseen" / "validation" / name, ("vh",)) as scene:
        image = scene.read("vh", (0, scene.size[0]), (0, scene.size[1])).astype(np.float32)
    sure = true.confidence > LOW
    matched, labelled = match(predicted.points, true.points, NEAR_M)
    hit = np.zeros(len(true), bool)
    hit[labelled] = True
    stray = np.delete(np.arange(len(predicted)), matched)

    side = 8.0
    figure = matplotlib.figure.Figure(figsize=(side, side * image.shape[0] / image.shape[1] + 0.7))
    axis = figure.add_axes((0.015, 0.01, 0.97, 1 - 0.8 / figure.get_size_inches()[1]))
    low, high = np.nanpercentile(image, (1, 99.7))
    axis.imshow(np.nan_to_num(image, nan=low), cmap="gray", vmin=low, vmax=high)
    _, orange, green, _, yellow, sky = PALETTE
    for points, mark, colour, label in (
        (true.points[sure & hit], "o", sky, "labelled and found"),
        (true.points[sure & ~hit], "s", yellow, "labelled and missed"),
        (true.points[~sure], "o", "#cccccc", "labelled, LOW confidence: not counted"),
        (predicted.points[matched], "+", green, "detection, right"),
        (predicted.points[stray], "x", orange, "detection, stray"),
    ):
        faces = {} if mark in "+x" else {"facecolors": "none", "edgecolors": colour}
        axis.scatter(
            points[:, 1], points[:, 0], marker=mark, s=30 if mark in "+x" else 110, linewidths=1.4,
            label=f"{label} ({len(points)})", **faces or {"color": colour},
        )  # fmt: skip
    axis.set_axis_off()
    axis.set_anchor("N")
    axis.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False,
        fontsize=8, borderaxespad=0.2, columnspacing=1.2, handletextpad=0.3,
    )  # fmt: skip
    height = figure.get_size_inches()[1]
    figure.text(
        0.015, 1 - 0.1 / height, f"Scene {name}, VH, which the detector never saw", va="top",
        size=13, weight="bold", color=COLOURS["ink"],
    )  # fmt: skip
    figure.savefig(out, dpi=110)  # noise does not compress


# --- all of it ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        document = collected(folder, carry_out(folder, commands(args.quick))) | {"load": load}
        out = args.results / f"{document['time'][:10]}-detector"
        out.mkdir(parents=True, exist_ok=True)
        steps = folder / "run" / "steps" / "rank0.csv"
        with gzip.open(out / "steps.csv.gz", "wb") as file:
            file.write(steps.read_bytes())
        draw_loss(document["training"]["history"], steps, out / "loss.png")
        draw_detections(folder, out / "detections.png")
    (out / "score.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = lines_of(document)
    pictures = {"loss.png": "loss and scores", "detections.png": "detections over a scene"}
    shown = [f"![{text}]({name})" for name, text in pictures.items()]
    (out / "report.md").write_text("\n".join(["# The detector", "", *lines, "", *shown, ""]))
    print("\n".join(lines))
    if not args.quick:
        links = ", ".join(f"[{text}](results/{out.name}/{name})" for name, text in pictures.items())
        readme.write("detector", "\n".join([*lines, "", f"Pictures: {links}."]))


if __name__ == "__main__":
    main()
