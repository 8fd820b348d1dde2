"""Whether two commits do the same: ``python benchmarks/unchanged.py BEFORE [AFTER]``.

Each commit is checked out beside this one and runs the same commands on the same data: ``infer`` on
twelve layouts with both seams, ``generate``, ``score``, ``scaling``, ``bench`` and the quick suite.
Exit codes, decoded arrays and computed tables must be identical. Of what was measured, files, CSV
columns and rows, and the keys and words of JSON, YAML and Parquet are compared, all with numbers
and digests masked. Sentences are only listed where they differ, as a sentence may depend on a time.
Exits with 1 where anything else differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], str]] = {
    "zarr2": ("zarr", (24, 70, 90), (8, 32, 32), "uint16"),
    "zarr3": ("zarr3", (24, 70, 90), (8, 32, 32), "uint16"),
    "n5": ("n5", (24, 70, 90), (8, 32, 32), "uint16"),
    "uint8": ("zarr3", (24, 70, 90), (24, 35, 45), "uint8"),
    "int16": ("zarr", (24, 70, 90), (5, 33, 17), "int16"),
    "float32": ("zarr3", (24, 70, 90), (8, 32, 32), "float32"),
    "float64": ("zarr", (16, 40, 40), (8, 40, 40), "float64"),
    "thin": ("zarr3", (3, 90, 120), (1, 45, 60), "uint16"),
    "one chunk": ("zarr", (20, 50, 60), (20, 50, 60), "uint16"),
    "tiny chunks": ("zarr3", (16, 40, 40), (4, 8, 8), "uint16"),
    "channels": ("zarr3", (2, 16, 40, 50), (1, 8, 32, 32), "uint16"),
    "times": ("zarr", (2, 1, 12, 40, 50), (1, 1, 8, 32, 32), "uint8"),
}
SPIRAL = "--hidden-dims 8 --num-samples 200 --epochs 2 --batch-size 16 --seed 3".split()
REFUSED = {
    "unknown verb": ["infre"],
    "missing input": ["infer", "--in-spec", "/nowhere", "--out-spec", "x"],
}
"""Commands that end with exit code 2; all others end with 0."""
DIGEST = re.compile(r"\b[0-9a-f]{8,}\b|(?<=\d-)[0-9a-f]{4}\b")
"""Random names, the last part of a run's name among them, and digests of places and of code."""
NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")


# --- one commit -----------------------------------------------------------------------------------


def commands(folder: Path) -> Iterator[tuple[str, list[str], bool]]:
    """Name, words, and whether what it prints was measured."""
    for name in LAYOUTS:
        for seam in ("trim", "blend"):
            source, out = folder / f"{name}.in", folder / f"{name}.{seam}.out"
            words = ["infer", "--in-spec", f"{source}", "--out-spec", f"{out}"]
            words += ["--model-type", "denoise-tiny", "--patch", "8", "32", "32", "--overlap", "4"]
            words += ["--normalize", "global", "--seam-mode", seam, "--devices", "cpu"]
            yield f"infer {name} {seam}", words, True
    make = ["generate", "volume", str(folder / "made.zarr"), "--shape", "16", "48", "48"]
    yield "generate volume", make, False
    make = ["generate", "ufs-p1", str(folder / "fields"), "--samples", "6", "--grid", "16", "32"]
    yield "generate ufs-p1", make, False
    scenes, chips = folder / "scenes", folder / "chips"
    make = ["generate", "xview3", str(scenes), "--scenes", "2", "--size", "512", "512"]
    yield "generate xview3", [*make, "--validation", "1"], False
    cut = ["preprocess", "--data_root", str(scenes), "--output_dir", str(chips)]
    cut += ["--train_label_file", str(scenes / "labels/train.csv")]
    yield "preprocess", [*cut, "--val_label_file", str(scenes / "labels/validation.csv")], True
    oracle = ROOT.parent / "shared/data/xview3-metric-oracle"
    if oracle.is_dir():
        score = ["score", "xview3", "--inference-file", str(oracle / "pred.csv")]
        score += ["--label-file", str(oracle / "gt.csv"), "--shore-root", str(oracle)]
        yield "score", score, False
        yield "score official", [*score, "--strict-official"], False
    for number in (1, 2):
        out = folder / f"spiral-{number}"
        words = ["train", "spiral", "--output-dir", str(out), "--device", "cpu", *SPIRAL]
        yield f"train {number}", words, True
    yield "scaling", ["scaling", str(folder / "spiral-1"), str(folder / "spiral-2")], True
    bench = ["bench", "model", "--model", "denoise-tiny", "--tile-sizes", "16", "--device"]
    bench += ["cpu", "--batch-sizes", "1", "2", "--output", str(folder / "bench.csv")]
    yield "bench", [*bench, "--effort", "quick"], True
    suite = ["suite", "quick", "--train-chips", str(chips / "train")]
    suite += ["--val-chips", str(chips / "val"), "--output-dir", str(folder / "suite")]
    yield "suite", suite, True
    for name, words in REFUSED.items():
        yield name, words, False


def collect(folder: Path, answer: Path) -> None:
    """Run everything in this process, with the Penstock that it imports."""
    from penstock.cli import main

    os.chdir(folder)
    for name, layout in LAYOUTS.items():
        _write(folder / f"{name}.in", *layout)
    outcomes: dict[str, Any] = {}

    def placed(text: str) -> str:
        return text.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")

    for name, words, measured in commands(folder):
        said, before = io.StringIO(), _files(folder)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            try:
                code: Any = main(words)
            except SystemExit as ended:
                code = ended.code
        mask = _masked if measured else placed
        new = {path: _content(folder / path, mask) for path in sorted(_files(folder) - before)}
        text = placed(said.getvalue())
        outcomes[name] = {"code": code, "measured": measured, "text": text, "files": new}
        print(f"{code} {name}", file=sys.stderr, flush=True)
    answer.write_text(json.dumps(outcomes))


def _write(
    path: Path, driver: str, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str
) -> None:
    import numpy as np
    import tensorstore as ts

    noise = np.random.default_rng(0).gamma(2.0, 20.0, shape)
    schema = {"chunk_layout": {"read_chunk": {"shape": chunks}}}
    spec = {"driver": driver, "kvstore": f"file://{path}/", "schema": schema}
    array = ts.open(spec, create=True, dtype=dtype, shape=shape).result()
    array.write(noise.clip(0, 250).astype(dtype)).result()


def _files(folder: Path) -> set[str]:
    """Every file; of an array its folder."""
    paths = set()
    for path in folder.rglob("*"):
        if path.is_file():
            arrays = [p for p in (*path.parents,) if p != folder and _driver(p)]
            paths.add(str((arrays[-1] if arrays else path).relative_to(folder)))
    return paths


def _driver(path: Path) -> str | None:
    markers = {".zarray": "zarr", "zarr.json": "zarr3", "attributes.json": "n5"}
    return next((d for marker, d in markers.items() if (path / marker).is_file()), None)


def _content(path: Path, mask: Callable[[str], str]) -> Any:
    """The values of an array, the columns and rows of a CSV, what JSON, YAML and Parquet hold; of
    another file, nothing."""
    if path.is_dir():
        try:
            import tensorstore as ts

            spec = {"driver": _driver(path), "kvstore": f"file://{path}/"}
            values = ts.open(spec).result().read().result()
        except ValueError:  # a group
            return "group"
        digest = hashlib.sha256(values.tobytes()).hexdigest()[:16]
        return f"{values.dtype} {values.shape} {digest}"
    if path.suffix == ".csv":
        lines = path.read_text().splitlines()
        return [lines[0], *map(mask, lines[1:])]
    if path.suffix in (".json", ".jsonl"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        return _outline([json.loads(line) for line in lines], mask)
    if path.suffix in (".yaml", ".yml"):
        return _outline(yaml.safe_load(path.read_text()), mask)
    return None


def _outline(value: Any, mask: Callable[[str], str]) -> Any:
    """A value with its texts and numbers masked. A list of what was measured is without
    repetitions: how many samples were taken is measured too."""
    if isinstance(value, dict):
        return {mask(str(key)): _outline(each, mask) for key, each in value.items()}
    if isinstance(value, list):
        outlines = [_outline(each, mask) for each in value]
        if mask is not _masked:
            return outlines
        return list({json.dumps(each, sort_keys=True): each for each in outlines}.values())
    return value if value is None or isinstance(value, bool) else mask(str(value))


def _masked(text: str) -> str:
    """Without its numbers and digests, and in lines that do not depend on their lengths."""
    return re.sub(r"#[#.]*", "#", re.sub(" +", " ", NUMBER.sub("#", DIGEST.sub("#", text))))


# --- two commits ----------------------------------------------------------------------------------


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What must be the same and is not, and sentences that differ beside their numbers."""
    wrong, reworded = [], []
    for name in before.keys() | after.keys():
        a, b = before.get(name), after.get(name)
        if a is not None and a["code"] != (2 if name in REFUSED else 0):
            wrong.append(f"{name}: exit {a['code']} before: it shows nothing")
        if a is None or b is None or a["code"] != b["code"]:
            wrong.append(f"{name}: exit {a and a['code']} before, {b and b['code']} after")
            continue
        old, new = _by_name(a["files"]), _by_name(b["files"])
        if changed := {path for path in old.keys() | new.keys() if old[path] != new[path]}:
            wrong.append(f"{name}: {', '.join(sorted(changed))}")
        if not a["measured"] and a["text"] != b["text"]:
            wrong.append(f"{name}: what it prints")
        elif _masked(a["text"]) != _masked(b["text"]):
            reworded.append(name)
    return sorted(wrong), sorted(reworded)


def _by_name(files: Mapping[str, Any]) -> defaultdict[str, list[Any]]:
    """What files hold, by their names; the numbers in a name may be measured."""
    contents: defaultdict[str, list[Any]] = defaultdict(list)
    for path, content in files.items():
        contents[_masked(path)].append(content)
    return contents


def run(commit: str, place: Path) -> dict[str, Any]:
    """What a commit does, checked out at ``place``/code."""
    code, data, answer = place / "code", place / "data", place / "answer.json"
    data.mkdir(parents=True)
    git = ["git", "-C", str(ROOT)]
    subprocess.run([*git, "worktree", "add", "--detach", "-q", str(code), commit], check=True)
    try:
        environ = {**os.environ, "PYTHONPATH": str(code / "src"), "OMP_NUM_THREADS": "1"}
        environ["HOME"] = environ["XDG_CACHE_HOME"] = str(place)
        words = [sys.executable, __file__, "--collect", str(data), str(answer)]
        subprocess.run(words, env=environ, check=True)
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(code)], check=True)
    return dict(json.loads(answer.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    parser.add_argument("--collect", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.collect:
        collect(*args.collect)
        return 0
    first, second = (*args.commits, "HEAD")[:2]
    with tempfile.TemporaryDirectory(prefix="penstock-unchanged-") as place:
        outcomes = [run(commit, Path(place, f"{i}")) for i, commit in enumerate((first, second))]
    wrong, reworded = differences(*outcomes)
    for line in wrong:
        print(f"differs: {line}")
    for name in reworded:
        print(f"says something else, of what it measured: {name}")
    print(f"{len(outcomes[0])} commands on {first} and {second}: {len(wrong)} differ")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
