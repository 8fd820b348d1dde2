"""What selected runs have in common, and what not."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base import UsageError
from penstock.dashboard.compare import (
    Selected,
    group_choices,
    groups_sheet,
    knob_choices,
    metric_choices,
    metrics_sheet,
    number_of,
    points_of,
    points_sheet,
    runs_sheet,
    scaling_of,
    scaling_sheet,
    selected_of,
    settings_sheet,
)
from penstock.dashboard.curves import (
    MOST_POINTS,
    curve_choices,
    curves_sheet,
    drawn_curves,
    thinned,
)
from penstock.dashboard.listed_run import ListedRun, RunDetails, curve_of

from ..scaling.kit import SEED, run
from .kit import shown_run, with_details


def of_seed() -> list[Selected]:
    """The seed's three runs, on 1, 4 and 8 GPUs."""
    runs = []
    for devices, seconds in SEED.items():
        settings = {"devices": str(devices), "batch_size": "32", "device": "a GPU"}
        details = RunDetails(settings, {"seconds": seconds}, training=run(devices, seconds))
        tags = {"size": "one" if devices == 1 else "many"}
        runs.append(with_details(f"k{devices}", details, name="spiral", tags=tags))
    return selected_of(runs, lambda each: each.read())[0]


def test_settings_that_are_equal_are_left_out_and_counted() -> None:
    sheet = settings_sheet(of_seed(), everything=False)
    assert sheet.head == ["setting", "spiral (k1)", "spiral (k4)", "spiral (k8)"]
    assert sheet.rows == [["devices", "1", "4", "8"]]
    assert sheet.notes == ["2 more settings are equal."]
    assert len(settings_sheet(of_seed(), everything=True).rows) == 3


def test_a_setting_that_a_run_lacks_differs() -> None:
    runs = [
        with_details("a", RunDetails({"amp": "True"})),
        with_details("b", RunDetails({})),
    ]
    selected, _ = selected_of(runs, lambda each: each.read())
    sheet = settings_sheet(selected, everything=False)
    assert sheet.rows == [["amp", "True", "not set"]]


def test_time_against_the_number_of_gpus() -> None:
    points = points_of(of_seed(), "seconds", "devices", "tag size")
    assert [(p.x, p.y, p.group) for p in points] == [
        ("1", 362.45, "one"), ("4", 95.23, "many"), ("8", 57.14, "many"),
    ]  # fmt: skip
    sheet = points_sheet(points, "seconds", "devices", "tag size")
    assert sheet.head == ["run", "devices", "seconds", "tag size"]
    assert sheet.rows[1] == ["spiral (k4)", 4.0, 95.23, "many"]
    words = points_of(of_seed(), "seconds", "device", "")
    assert points_sheet(words, "seconds", "device", "").rows[0][1] == "a GPU"
    assert points_of(of_seed(), "nothing", "devices", "") == []


def test_speed_up_and_efficiency_are_those_of_the_seed() -> None:
    studied, why = scaling_of(of_seed(), anyway=False)
    sheet = scaling_sheet(studied)
    assert why == "" and [row[1] for row in sheet.rows] == [1.0, 4.0, 8.0]
    at = sheet.head.index("speedup"), sheet.head.index("efficiency")
    assert [tuple(round(float(row[n] or 0), 3) for n in at) for row in sheet.rows] == [
        (1.0, 1.0), (3.806, 0.952), (6.343, 0.793),
    ]  # fmt: skip


def test_runs_that_are_no_study_say_why() -> None:
    first = of_seed()[:1]
    why = "No scaling study: 1 complete training of 1 number of devices, and it takes 2."
    assert scaling_of(first, anyway=False) == ([], why)
    odd = RunDetails({}, {}, training=run(2, 9.0, settings={"learning rate": "0.1"}))
    even = RunDetails({}, {}, training=run(1, 10.0, settings={"learning rate": "0.2"}))
    pair = [with_details("a", odd), with_details("b", even)]
    selected, _ = selected_of(pair, lambda each: each.read())
    studied, why = scaling_of(selected, anyway=False)
    assert not studied and "the learning rate is 0.1" in why and "--anyway" not in why
    assert scaling_of(selected, anyway=True)[0]


def test_groups_have_their_median_and_ends() -> None:
    sheet = groups_sheet(of_seed(), "seconds", "tag size")
    assert sheet.rows == [
        ["one", 1.0, 362.45, 362.45, 362.45, "spiral (k1)"],
        ["many", 2.0, pytest.approx(76.185), 57.14, 95.23, "spiral (k4), spiral (k8)"],
    ]
    assert groups_sheet(of_seed(), "absent", "").rows[0][:3] == ["all", 0.0, None]


def test_choices_begin_with_what_matters() -> None:
    selected = of_seed()
    assert knob_choices(selected) == ["devices", "batch_size", "device"]
    assert group_choices(selected) == ["tag size", "devices"]
    more = selected[0]._replace(details=RunDetails({}, {"a": 1.0, "seconds": 2.0}))
    assert metric_choices([more]) == ["seconds", "a"]
    assert group_choices([s._replace(run=shown_run(s.name, model=s.name)) for s in selected]) == [
        "name", "model", "devices",
    ]  # fmt: skip


def test_metrics_stand_beside_each_other_with_the_errors() -> None:
    runs = [
        with_details("a", RunDetails({}, {"x": 1.0})),
        with_details("b", RunDetails({}, {"y": 2.0}, error="out of memory")),
    ]
    selected, _ = selected_of(runs, lambda each: each.read())
    sheet = metrics_sheet(selected)
    assert sheet.rows == [["x", 1.0, None], ["y", None, 2.0]]
    assert sheet.notes == ["b: out of memory"]


def test_a_run_that_is_gone_is_said_and_left_out() -> None:
    def gone(each: ListedRun) -> RunDetails:
        raise UsageError("no such file")

    assert selected_of([shown_run("a")], gone) == ([], ["a is left out: no such file"])


def test_numbers_among_words() -> None:
    assert (number_of("1e-3"), number_of("nan"), number_of("inf"), number_of("x")) == (
        0.001, None, None, None,
    )  # fmt: skip


def test_the_list_has_a_column_for_each_tag() -> None:
    sheet = runs_sheet([shown_run("a", tags={"x": "1"}), shown_run("b", tags={"y": "2"})])
    assert sheet.head[-2:] == ["tag x", "tag y"]
    assert [row[-2:] for row in sheet.rows] == [["1", None], [None, "2"]]


# --- curves ---------------------------------------------------------------------------------------


def curved() -> list[Selected]:
    whole = curve_of([3.0, 2.0, np.nan, 1.0], steps=[1, 2, 3, 4], seconds=[0.5, 1.0, 1.5, 2.0])
    cpu = curve_of([50.0], seconds=[1.0], of_machine=True)
    runs = [
        with_details("a", RunDetails({}, {}, {"loss": whole, "cpu": cpu, "val_loss": whole})),
        with_details("b", RunDetails({}, {}, {"loss": curve_of([9.0], epochs=[1])})),
    ]
    return selected_of(runs, lambda each: each.read())[0]


def test_curves_lie_over_each_other_along_what_they_have() -> None:
    drawn, notes = drawn_curves(curved(), "loss", "step", "name")
    assert [(each.name, each.x.tolist(), each.y.tolist()) for each in drawn] == [
        ("a", [1.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    ]
    assert notes == ["b has no steps for loss."] and drawn[0].group == "a"
    drawn, notes = drawn_curves(curved(), "loss", "epoch", "")
    assert [each.name for each in drawn] == ["b"] and notes == ["a has no epochs for loss."]
    assert curve_choices(curved(), of_machine=False) == ["val_loss", "loss"]
    assert curve_choices(curved(), of_machine=True) == ["cpu"]


def test_metrics_of_workers_are_named_where_the_run_has_none_of_its_own() -> None:
    cpu = curve_of([50.0], seconds=[1.0], of_machine=True)
    runs = [
        with_details("one", RunDetails({}, {}, {"blocks": cpu, "cpu_percent": cpu})),
        with_details("many", RunDetails({}, {}, {"w1/cpu_percent": cpu, "w2/cpu_percent": cpu})),
    ]
    selected = selected_of(runs, lambda each: each.read())[0]
    assert curve_choices(selected, of_machine=True)[0] == "cpu_percent"
    drawn, notes = drawn_curves(selected, "cpu_percent", "seconds", "")
    assert [each.name for each in drawn] == ["one"]
    assert notes == ["many has cpu_percent for each worker: choose w1/cpu_percent."]


def test_a_table_of_curves_has_every_point() -> None:
    rows = curves_sheet(curved(), ["loss"]).rows
    assert len(rows) == 5 and rows[1][:3] == ["a", "loss", 2.0] and rows[-1][-1] == 9.0


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[4321], y[77_777] = 100.0, -100.0
    fewer, values = thinned(x, y)
    assert len(fewer) == MOST_POINTS and values.max() == 100.0 and values.min() == -100.0
    assert (np.diff(fewer) >= 0).all() and np.array_equal(y[fewer.astype(int)], values)
    assert thinned(x[:10], y[:10])[0] is not None and len(thinned(x[:10], y[:10])[0]) == 10
