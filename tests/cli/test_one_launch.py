"""What a command that is no benchmark leaves: a launch that compare and report take."""

from pathlib import Path

from penstock.base import PreprocessConfig
from penstock.cli import main
from penstock.cli.one_launch import keep_launch
from penstock.instruments import Ledger


def kept(folder: Path, workers: int, seconds: float) -> Path:
    config = PreprocessConfig.model_validate(
        {"data_root": "d", "train_label_file": "t", "val_label_file": "v", "num_workers": workers}
        | {"output_dir": str(folder), "tag": {"study": "a"}, "name": "cut"}
    )
    times = {"step": seconds, "train": seconds * 0.8, "val": seconds * 0.2}
    folder.mkdir()
    keep_launch(folder, "preprocess", config, times, {"chips": 16})
    return folder


def test_launches_of_preprocess_compare_and_report(tmp_path, capsys) -> None:
    a, b = kept(tmp_path / "a", 4, 2.0), kept(tmp_path / "b", 1, 3.0)
    assert main(["compare", str(a), str(b)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "preprocess 2.00 s 3.00 s 1.500 1 + 1 inconclusive" in out
    assert "num-workers 4 1" in out and "output-dir" not in out
    assert "val 400 ms 600 ms 1.500 no interval" in out and "chips/s 8.00 5.33 0.6667" in out
    (record,) = Ledger(tmp_path / "a.ledger").records()
    assert (record.name, record.tags) == ("cut", {"study": "a"})
    assert record.facts["settings"].keys().isdisjoint({"name", "tag"})
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "r.md")]) == 0
    assert "a.ledger: preprocess: 2.00 s [1 launch]." in (tmp_path / "r.md").read_text()
    assert main(["report", str(a), "--output", str(tmp_path / "a.md")]) == 0
    assert "| preprocess | 2.00 s | - | 1 | ok |" in (tmp_path / "a.md").read_text()
