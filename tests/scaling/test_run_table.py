"""Runs from tables: a CSV of one's own, and those that trackers export."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import NotComparable, UsageError
from penstock.scaling import TrainingRun, read_runs, runs_to_csv
from penstock.scaling.sources.tracked import training_runs
from penstock.scaling.sources.tracker_files import table_runs

from .kit import only, run, write


def read(folder: Path, text: str, said: list[str] | None = None) -> list[TrainingRun]:
    (path,) = write(folder, {"times.csv": text})
    return read_runs([path], [].append if said is None else said.append)


OWN = {
    "the least": (
        "devices, seconds\n1, 400\n4, 110\n", [("times-1", 1, 400.0), ("times-2", 4, 110.0)],
    ),
    "equal times": (
        "devices,seconds\n4,110\n4,110\n1,400\n",
        [("times-3", 1, 400.0), ("times-1", 4, 110.0), ("times-2", 4, 110.0)],
    ),
    "named, with units": (
        "run,devices,seconds\na,1,1.5 hours\nb,4,0:25:00\n", [("a", 1, 5400.0), ("b", 4, 1500.0)],
    ),
    "semicolons": (
        "Run;Devices;Seconds\na;1;362,45\nb;4;95,23\n", [("a", 1, 362.45), ("b", 4, 95.23)],
    ),
    "tabs, thousands": ("run\tworld_size\tseconds\na\t1\t1,295.23\n", [("a", 1, 1295.23)]),
    "a byte order mark": ("\ufeffdevices,seconds\n1,400\n", [("times", 1, 400.0)]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "runs"), OWN.values(), ids=OWN)
def test_a_table_of_ones_own(tmp_path, text: str, runs: list[tuple[str, int, float]]) -> None:
    read_ = read(tmp_path, text)
    assert [(one.job, one.devices, one.seconds) for one in read_] == runs
    assert all(one.complete for one in read_)


def test_scores_with_decimal_commas_are_read(tmp_path) -> None:
    (one,) = read(tmp_path, "devices;seconds;val_loss;val_acc\n1;362,45;0,1187;0,953\n")
    assert (one.val_loss, one.val_acc) == (0.1187, 0.953)


def test_nodes_and_batch_decide_the_kind_of_scaling(tmp_path) -> None:
    text = "devices,seconds,nodes,batch,samples,run\n1,400,1,32,10000,a\n8,60,2,32,10000,b\n"
    runs = read(tmp_path, text)
    assert [(one.nodes, one.batch, one.global_batch) for one in runs] == [(1, 32, 32), (2, 32, 256)]
    study = only(runs)
    assert (study.kind, study.points[1].speedup.value) == ("hybrid", pytest.approx(400 / 60))


WANDB = (
    '"Name","State","Notes","Created","Runtime","world_size","batch_size","lr","val_loss"\n'
    '"one","finished","-","2026-01-01T10:00:00.000Z","400","1","32","0.1","0.5"\n'
    '"four","finished","-","2026-01-01T10:00:00.000Z","110","4","32","0.1","NaN"\n'
    '"gone","killed","-","2026-01-01T10:00:00.000Z","20","4","32","0.1",""\n'
)
MLFLOW = (
    "run_id,status,start_time,end_time,params.world_size,params.batch_size,params.lr,"
    "metrics.val_loss,tags.mlflow.source.name,tags.mlflow.runName\n"
    "x1,FINISHED,2026-01-01 10:00:00.5+00:00,2026-01-01 10:06:40.5+00:00,1,32,0.1,0.5,a.py,one\n"
    "x2,FINISHED,2026-01-01 10:00:00.5+00:00,2026-01-01 10:01:50.5+00:00,4,32,0.1,,a.py,four\n"
    "x3,KILLED,2026-01-01 10:00:00.5+00:00,2026-01-01 10:00:20.5+00:00,4,32,0.1,,a.py,gone\n"
)
MLFLOW_PAGE = (
    "Start Time,Duration,Run ID,Name,Source Type,Source Name,User,Status,batch_size,lr,world_size,"
    "val_loss\n"
    "2026-01-01 10:00:00,6.6666667min,x1,one,LOCAL,a.py,me,FINISHED,32,0.1,1,0.5\n"
    "2026-01-01 10:00:00,110.0s,x2,four,LOCAL,a.py,me,FINISHED,32,0.1,4,\n"
    "2026-01-01 10:00:00,20.0s,x3,gone,LOCAL,a.py,me,KILLED,32,0.1,4,\n"
)


@pytest.mark.parametrize(
    ("text", "column"),
    [(WANDB, "runtime"), (MLFLOW, "end_time - start_time"), (MLFLOW_PAGE, "duration")],
    ids=["W&B", "MLflow", "a page of MLflow's"],
)
def test_a_table_that_a_tracker_exports(tmp_path, text: str, column: str) -> None:
    said: list[str] = []
    one, four, gone = read(tmp_path, text, said)
    assert [each.name for each in (one, four, gone)] == ["one", "four", "gone"]
    assert [each.seconds for each in (one, four, gone)] == pytest.approx([400, 110, 20], rel=1e-6)
    assert [each.status for each in (one, four, gone)] == ["complete", "complete", "cancelled"]
    assert (one.val_loss, four.val_loss, one.settings["learning rate"]) == (0.5, None, "0.1")
    assert f"its times ({column}) are of whole runs" in said[0]


def test_a_measured_training_time_counts_before_that_of_the_run(tmp_path) -> None:
    text = "Name,State,Runtime,world_size,training_time\na,finished,500,1,400.5\nb,finished,9,4,\n"
    said: list[str] = []
    first, other = read(tmp_path, text, said)
    assert (first.seconds, other.seconds, said) == (400.5, None, [])


def test_other_batches_on_more_devices_are_another_experiment(tmp_path) -> None:
    (tmp_path / "times.tsv").write_text("devices\tseconds\tbatch\n1\t400\t32\n4\t110\t128\n")
    runs = read_runs([tmp_path / "times.tsv"], [].append)
    with pytest.raises(NotComparable, match=r"32 a batch and device \(32 in all\) on 1 .*128 a"):
        only(runs)


def test_our_own_table_of_runs_is_read_back(tmp_path) -> None:
    runs = [run(1, 400.0), run(4, 110.0), run(4, 30.0, epochs=10, job="part", status="timeout")]
    back = read(tmp_path, runs_to_csv(runs))
    names = ("job", "devices", "nodes", "seconds", "epochs", "planned_epochs", "batch", "status")
    for name in (*names, "complete", "global_batch", "samples"):
        assert {getattr(one, name) for one in back} == {getattr(one, name) for one in runs}, name


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("GPU count,hours\n1,2\n", "has no column of devices: it has GPU count, hours, and of a"),
        ("trainer.devices,seconds\n4,9\n", "has no column of devices: .* are read devices"),
        ("devices,hours\n1,2\n", "has no column of seconds: it has devices, hours, and of"),
        ("devices,seconds\nfour,10\n", "row 1: devices is 'four', which is no whole number"),
        ("devices,seconds\n4,10\n0,9\n", "row 2: devices is '0', which is no whole number above 0"),
        ("devices,seconds,nodes\n4,10,1.5\n", "row 1: nodes is '1.5', which is no whole number"),
        ("devices,seconds\n4,09:15\n", "row 1: seconds is '09:15', which is no time such as"),
        ("devices,seconds,State\n4,10,odd\n", r"row 1: state is 'odd', .* \(complete, crashed"),
        ("devices,seconds\n4,1,295\n", "row 1 has more fields than the table has columns"),
        ("devices,seconds,seconds\n4,1,2\n", "has two columns of the name seconds"),
        ("devices,start_time,end_time\n4,01/02/2026 10:00,x\n", "row 1: start_time is '01/02/2026"),
        ("devices,start_time,end_time\n4,2026-01-01 10:00,2026-01-01T10:30Z\n", "row 1: end_time"),
    ],
)  # fmt: skip
def test_what_a_table_says_otherwise_is_refused(tmp_path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=rf"times.csv(,|) {sentence}"):
        read(tmp_path, text)


FIELD = st.sampled_from(["1", "4", "8.0", "0", "-3", "", "nan", "four", "1e3", "12:00", "2.5 h"])


@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=4))
def test_what_is_accepted_is_what_is_written(rows: list[tuple[str, str]]) -> None:
    """By Python's own reading of numbers; what is refused has a sentence that names its row."""
    text = io.StringIO()
    csv.writer(text).writerows([("devices", "seconds"), *rows])
    text.seek(0)
    try:
        runs = list(
            training_runs(table_runs(list(csv.DictReader(text)), Path("t.csv")), Path("t"), print)
        )
    except UsageError as error:
        assert "t.csv" in str(error) and ("row" in str(error) or "has no column" in str(error)
                                          or "a time is above 0" in str(error))  # fmt: skip
        return
    times = {"2.5 h": 9000.0, "": None, "nan": None}
    written = [(int(float(d)), times.get(s, s)) for d, s in rows if d not in ("", "nan")]
    assert [(one.devices, one.seconds) for one in runs] == [
        (d, float(s) if isinstance(s, str) else s) for d, s in written
    ]
