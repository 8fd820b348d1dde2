"""The verb: what it prints and writes, and its exit codes."""

import pytest

from .kit import log, said, seed_logs, write


def test_output_writes_a_page_tables_and_figures(undrawn, tmp_path, capsys) -> None:
    seed_logs(tmp_path)
    code, _, err = said([str(tmp_path), "--output", str(tmp_path / "report")], capsys)
    assert code == 0
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {
        "scaling.md", "scaling.csv", "runs.csv", "speedup.png", "efficiency.png", "epoch.png",
    }  # fmt: skip
    assert f"Written: {tmp_path / 'report' / 'scaling.md'}" in err
    page = (tmp_path / "report" / "scaling.md").read_text("utf-8")
    assert page.startswith("# Training Results on NVIDIA A100") and "- 8 GPUs (2 nodes): 79" in page
    assert "![speedup](speedup.png)" in page and "| Single GPU | 1 |" in page


def test_csv_and_metrics_on_stdout(tmp_path, capsys) -> None:
    seed_logs(tmp_path)
    code, out, _ = said([str(tmp_path), "--csv"], capsys)
    assert code == 0
    assert out.splitlines()[0].startswith("kind,devices,nodes")
    assert len(out.splitlines()) == 4
    write(tmp_path, {"x.out": log("9", 4, None, done=3, end="Traceback (most recent call last)\n")})
    code, out, err = said([str(tmp_path), "--csv"], capsys)
    assert (code, len(out.splitlines())) == (0, 5)
    assert err == "penstock scaling: 9: crashed after 3 of 50 epochs; not compared.\n"
    (tmp_path / "x.out").unlink()
    code, out, _ = said([str(tmp_path), "--metrics"], capsys)
    assert code == 0
    assert out.count("(6.04 minutes)") == 1


def test_mixed_experiments_exit_with_4(tmp_path, capsys) -> None:
    write(tmp_path, {"a.out": log("1", 1, 50.0), "b.out": log("2", 4, 20.0, rate="0.01")})
    code, out, err = said([str(tmp_path)], capsys)
    assert (code, out) == (4, "")
    assert "mixed experiments: the learning rate is 0.001 in" in err
    code, out, _ = said([str(tmp_path), "--anyway"], capsys)
    assert code == 0
    assert "Speedup: 2.50x" in out


def test_only_broken_runs_exit_with_3_and_are_shown(tmp_path, capsys) -> None:
    write(tmp_path, {"a.out": log("1", 4, None, done=3, end="Traceback (most recent call last)\n")})
    code, out, err = said([str(tmp_path / "a.out")], capsys)
    assert code == 3
    assert "* 1: crashed after 3 of 50 epochs; not compared." in out
    assert "no run is complete" in err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["{}", "--between", "1GB"], "--between belongs to penstock scaling simulate"),
        (["{}", "--metrics", "--output", "x"], "--metrics prints one table and no more; --output"),
        (["{}", "--csv", "--metrics"], "--metrics prints one table and no more; --csv does not go"),
        (["simulate", "--csv"], "--csv belongs to penstock scaling, but this is penstock scaling"),
        (["simulate"], "simulate takes a RUN of one device, and perhaps one of several; it got 0"),
        (["simulate", "{}"], "holds 3 runs; simulate takes one"),
        (["{}/nothing"], "cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, capsys, argv: list[str], words: str) -> None:
    seed_logs(tmp_path)
    code, out, err = said([word.replace("{}", str(tmp_path)) for word in argv], capsys)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
