"""Verdicts on two runs: how often they are wrong, what they refuse, what they say."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import NotComparable
from penstock.cli import main
from penstock.instruments import ledger
from penstock.instruments.record import FAILED, Record, Warmup
from penstock.reports.compare import Comparison, compare_records

from ..bench.records import made_record
from ..parameters import mainly

CASE = {"model": "denoise-net", "tile": "256", "batch": 1, "amp": False}


def record(
    times: Sequence[float] | None = (1.0, 1.0), launch: int = 0, status: str = "ok", **fields: Any
) -> Record:
    """A launch of CASE; ``knobs`` change the case."""
    usual = {
        "samples_s": {"step": tuple(times)} if times is not None else {},
        "work": {"samples": 1, "pixels": 65536},
        "facts": {"structure": "abc"},
        "environment": {"machine_key": "here"},
    }
    case, scenario = CASE | fields.pop("knobs", {}), fields.pop("scenario", "model")
    return made_record(scenario, case, launch, status, **usual | fields)


def launches(
    rng: np.random.Generator, n: int = 5, level: float = 1.0, noise: float = 0.01, **fields: Any
) -> list[Record]:
    """As many launches, with this noise within them and again between them."""
    middles = level * rng.lognormal(0, noise, (n, 1))
    times = middles * rng.lognormal(0, noise, (n, 50))
    return [record(row.tolist(), i, **fields) for i, row in enumerate(times)]


def judged(
    a: Iterable[Record], b: Iterable[Record], threshold: float | None = None, **options: Any
) -> Comparison:
    given = {"anyway": False, "metric": "step"} | options
    return compare_records(list(a), list(b), threshold=threshold, **given)


def verdicts(*args: Any, **options: Any) -> list[str]:
    return [row.verdict for row in judged(*args, **options).rows]


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, 1e-6])
def test_false_alarms_of_five_launches_against_five(threshold: float | None) -> None:
    """With the threshold it measures itself, and where the threshold is no help."""
    rng = np.random.default_rng(0)
    alarms = sum(
        verdicts(launches(rng), launches(rng), threshold)[0] in ("slower", "faster")
        for _ in range(100)
    )
    assert alarms <= 0.05 * 100


@pytest.mark.parametrize(("level", "verdict"), mainly([(1.1, "slower"), (1 / 1.1, "faster")], 0))
def test_a_change_of_ten_percent_is_found(level: float, verdict: str) -> None:
    rng, runs = np.random.default_rng(2), 10
    right = [verdicts(launches(rng), launches(rng, level=level)) == [verdict] for _ in range(runs)]
    assert sum(right) >= 0.9 * runs


def neighbours_alike(
    rng: np.random.Generator, n: int, noise: float, level: float = 1.0
) -> list[list[Record]]:
    """All launches of A, then all of B, on a machine whose speed wanders: a launch has 0.8 of the
    deviation of the one before."""
    wander = np.empty(2 * n)
    wander[0] = rng.normal(0, noise)
    for i in range(1, 2 * n):
        wander[i] = 0.8 * wander[i - 1] + rng.normal(0, 0.6 * noise)
    times = np.exp(wander)[:, None] * rng.lognormal(0, 0.01, (2 * n, 50))
    times[n:] *= level
    both = [record(row.tolist(), i) for i, row in enumerate(times)]
    return [both[:n], both[n:]]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "part"), [(5, 0.65), (8, 0.4)])
def test_false_alarms_on_a_machine_whose_speed_wanders(n: int, part: float, monkeypatch) -> None:
    """A permutation test takes launches to be independent. Halves of a side's own launches, and how
    alike neighbours are, tell where they are not; a change of 10 % on a quiet machine is found."""
    runs = 40

    def alarms(noise: float, level: float = 1.0) -> int:
        rng = np.random.default_rng(3)
        pairs = [neighbours_alike(rng, n, noise, level) for _ in range(runs)]
        return sum(verdicts(a, b)[0] in ("slower", "faster") for a, b in pairs)

    now, verdict_of_pair, white = alarms(0.3), alarms(0.01, 1.1), alarms(1e-6)
    monkeypatch.setattr("penstock.reports.verdicts.own_noise", lambda *sides: 0.0)
    before, found_before = alarms(0.3), alarms(0.01, 1.1)
    assert before >= 0.2 * runs and now <= part * before
    assert verdict_of_pair >= 0.95 * found_before and verdict_of_pair >= 0.95 * runs
    assert white <= 0.05 * runs


def test_halves_that_differ_as_much_are_named() -> None:
    """Here by more than B from A; a permutation test and the interval of the ratio are sure."""
    sides = ((1.0, 1.3, 1.6, 1.0, 1.5), (1.7, 1.9, 2.6, 2.6, 1.7))
    a, b = ([record([t], i) for i, t in enumerate(times)] for times in sides)
    row = judged(a, b).rows[0]
    assert row.p == pytest.approx(2 / 252) and row.ratio is not None and row.ratio.excludes(1)
    assert row.ratio.value == pytest.approx(1.9 / 1.3) and row.verdict == "inconclusive"
    assert row.reason.endswith(
        "; not distinguishable: A or B differs from itself as much (up to 53 %)"
    )
    twice = [record([2 * t], i) for i, t in enumerate(sides[1])]
    assert judged(a, twice).rows[0].verdict == "slower"


def test_launches_are_taken_in_the_order_of_time() -> None:
    """Whatever the order of the records: neighbours in time are alike."""
    a, b = neighbours_alike(np.random.default_rng(7), 8, 0.3)
    timed = [r.model_copy(update={"time": f"2026-01-01T10:{i:02}"}) for i, r in enumerate(a + b)]
    one, other = timed[:8], timed[8:]
    assert judged(one, other).rows == judged(one[::-1], other[3:] + other[:3]).rows


def test_quiet_launches_are_the_same_and_noisy_ones_inconclusive() -> None:
    rng = np.random.default_rng(0)
    assert verdicts(launches(rng, noise=0.002), launches(rng, noise=0.002)) == ["same"]
    assert verdicts(launches(rng, noise=0.2), launches(rng, noise=0.2)) == ["inconclusive"]


def test_a_sure_change_that_does_not_matter_is_the_same() -> None:
    rng = np.random.default_rng(0)
    a, b = launches(rng, noise=0.001), launches(rng, noise=0.001, level=1.01)
    row = judged(a, b).rows[0]
    assert (row.verdict, row.p) == ("same", pytest.approx(2 / 252))
    assert verdicts(a, b, threshold=0.005) == ["slower"]
    assert verdicts(a, b, threshold=0.01) == ["inconclusive"]


def test_a_verdict_never_goes_against_its_interval() -> None:
    a, b = (
        [record([t], i) for i, t in enumerate(times)]
        for times in (
            (0.5, 1.1001, 1.0002, 1.0203, 0.5002),
            (1.1006, 0.9806, 1.501, 1.5012, 2.0018),
        )
    )
    row = judged(a, b).rows[0]  # the permutation test alone, which looks at means, is sure
    assert row.p <= 0.05 and not row.ratio.excludes(1)
    assert row.verdict == "inconclusive"


def test_one_large_change_among_many_cases_is_found_and_named() -> None:
    rng = np.random.default_rng(0)
    a, b = (
        [
            r
            for k in range(10)
            for r in launches(rng, level=slow if k == 7 else 1, knobs={"batch": k})
        ]
        for slow in (1, 1.5)
    )
    comparison = judged(a, b)
    assert [row.label for row in comparison.rows if row.verdict == "slower"] == ["batch=7"]
    assert comparison.regressed and len(comparison.rows) == 10
    assert "batch=7" in comparison.sentence()


@pytest.mark.parametrize(
    ("noise", "low", "high", "said"),
    [
        (0.0, 0.02, 0.02, "the least"),
        (0.02, 0.025, 0.08, "halves of the same launches differ"),
        (0.3, 0.10, 0.10, "the most"),
    ],
)
def test_the_threshold_is_the_noise(noise: float, low: float, high: float, said: str) -> None:
    rng = np.random.default_rng(0)
    comparison = judged(launches(rng, noise=noise), launches(rng, noise=noise))
    assert low <= comparison.threshold <= high
    assert said in comparison.threshold_source
    assert said in comparison.sentence()


def test_the_halves_of_four_launches_by_hand() -> None:
    a = [record([t], i) for i, t in enumerate((1.0, 1.0, 1.1, 1.1))]
    # Of six ways to halve, two part the fast from the slow: the widest 5 % are among them.
    assert judged(a, a, anyway=False).threshold == pytest.approx(0.1)
    few = judged(a[:3], a[:3])
    assert few.threshold == 0.02
    assert few.threshold_source == "the least; too few launches to measure noise"


@pytest.mark.parametrize(
    ("n", "m", "verdict", "said"),
    [
        (1, 1, "inconclusive", "one launch is never compared (A has 1, B has 1)"),
        (1, 40, "inconclusive", "one launch is never compared (A has 1, B has 40)"),
        (3, 3, "inconclusive", "3 launches of A and 3 of B cannot tell at 95 %; 4 of each can"),
        (4, 4, "slower", "beyond 2.0 %"),
        (3, 5, "slower", "beyond 2.0 %"),
    ],
)
def test_few_launches_say_so(n: int, m: int, verdict: str, said: str) -> None:
    rng = np.random.default_rng(0)
    row = judged(launches(rng, n, noise=1e-3), launches(rng, m, level=2, noise=1e-3)).rows[0]
    assert row.verdict == verdict
    assert said in row.reason
    assert (row.a_launches, row.b_launches) == (n, m)


def side(word: str) -> list[Record]:
    """``ok ok oom_device``: launches of one case."""
    return [
        record([1.0 + i / 1000] if status == "ok" else None, i, status)
        for i, status in enumerate(word.split())
    ]


OK5 = "ok ok ok ok ok"


@pytest.mark.parametrize(
    ("a", "b", "verdict", "reason"),
    [
        ("ok", "oom_device", "fails", "A ran, B: 1 of 1 launch ran out of device memory"),
        (OK5, "ok ok crash ok ok", "fails", "A ran, B: 1 of 5 launches crashed"),
        ("ok crash", "crash timeout", "fails", "1 of 2 launches crashed, 1 of 2 launches did not"),
        ("oom_host", "ok", "mended", "B ran, A: 1 of 1 launch ran out of host memory"),
        ("ok ok crash ok ok ok", OK5, "mended", "A: 1 of 6 launches crashed"),
        ("crash ok ok ok ok", "ok ok ok ok crash", "same", "A: 1 of 5 launches crashed; B: 1 of 5"),
    ],
)
def test_failures_are_results(a: str, b: str, verdict: str, reason: str) -> None:
    comparison = judged(side(a), side(b))
    assert comparison.rows[0].verdict == verdict
    assert reason in comparison.rows[0].reason
    assert comparison.regressed == (verdict == "fails")


def test_cases_that_fail_alike_are_the_same() -> None:
    ran = launches(np.random.default_rng(0), knobs={"batch": 2})
    oom = [record(None, status="oom_device")]
    hang = [record(None, status="timeout")]
    row = judged([*oom, *ran], [*oom, *ran]).rows[0]
    assert row.verdict == "same"
    assert row.reason == "both: 1 of 1 launch ran out of device memory"
    assert judged([*oom, *ran], [*hang, *ran]).rows[0].verdict == "inconclusive"


def test_every_failure_has_words() -> None:
    assert {"ok", *FAILED} == set(Record.model_json_schema()["properties"]["status"]["enum"])


def test_launches_that_never_settled_are_told() -> None:
    a = launches(np.random.default_rng(0), noise=1e-3)
    b = [r.model_copy(update={"warmup": Warmup(settled=i > 1)}) for i, r in enumerate(a)]
    assert judged(a, b).rows[0].reason.endswith("; B: 2 of 5 launches never settled")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "machine": (
        {"environment": {"machine_key": "there"}},
        "the launches ran on 2 machines, here and there (model)",
    ),
    "schema": ({"schema": 0}, "the records are of schemas 0 and 1 (model)"),
    "structure": (
        {"facts": {"structure": "abd"}},
        "the structure of the model is abc and abd (model)",
    ),
    "work": ({"work": {"samples": 1, "pixels": 65537}}, "a step is 65536 and 65537 pixels (model)"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_comparable_is_compared_and_the_rest_named(what: str) -> None:
    """If nothing is left, it is refused, unless the user wants it compared anyway."""
    fields, sentence = OTHERS[what]
    alone, other = [record()], [record(**fields)]
    with pytest.raises(NotComparable) as refusal:
        judged(alone, other)
    assert str(refusal.value) == f"{sentence}; --anyway compares them anyway"
    assert refusal.value.exit_code == 4
    assert judged(alone, other, anyway=True).caveats == (sentence,)
    rng = np.random.default_rng(0)
    a = launches(rng)
    slower = launches(rng, level=2.0)
    unlike = record(knobs={"batch": 9}, **fields)
    comparison = judged([*a, record(knobs={"batch": 9})], [*slower, unlike])
    assert [row.verdict for row in comparison.rows] == ["slower"]
    assert comparison.left_out == (sentence.replace("(model)", "(batch=9)"),)
    assert (comparison.unlike, comparison.caveats, comparison.regressed) == (1, (), True)
    assert "1 case, B against A: 1 slower" in comparison.sentence()
    assert "1 not comparable" in comparison.sentence()


def test_other_hosts_of_one_kind_are_told() -> None:
    """They are compared, because their machine is of one kind; a sentence names the hosts."""

    def on(host: str, launch: int) -> Record:
        block = {"machine_key": "here", "worker": {"host": host}}
        return record([1.0, 1.0], launch, environment=block)

    a, b = [on("node1", 0), on("node2", 1)], [on("node3", 0), on("node1", 1)]
    comparison = judged(a, b)
    assert comparison.hosts == (
        "A ran on node1 and node2, B on node1 and node3: a difference may come from the hosts, "
        "even if they are of one kind"
    )
    assert comparison.caveats == comparison.left_out == ()
    assert judged(a, a[::-1]).hosts == judged(a, [record()]).hosts == ""


def test_several_reasons_are_counted() -> None:
    b = record(work={"samples": 2}, environment={"machine_key": "there"})
    with pytest.raises(NotComparable, match=r"here and there \(model\) \(and 1 more\)"):
        judged([record()], [b])


def test_what_is_not_known_does_not_differ() -> None:
    nothing = {"facts": {}, "environment": {}, "work": {}}
    assert judged([record()], [record(None, 0, "crash", **nothing)]).caveats == ()
    assert judged([record()], [record(work={"samples": 1, "bytes": 5})]).caveats == ()


def test_nothing_shared_is_refused() -> None:
    a, b = [record()], [record(scenario="disk"), record(scenario="disk", knobs={"batch": 9})]
    with pytest.raises(NotComparable) as refusal:
        judged(a, b, anyway=True)
    assert str(refusal.value) == (
        "A and B have no case in common: A holds 1 case of model, B holds 2 cases of disk"
    )
    with pytest.raises(NotComparable, match="B holds 0 cases of nothing"):
        judged(a, [])


def test_nothing_that_ran_is_refused() -> None:
    broken = [record(None, status="crash")]
    with pytest.raises(NotComparable, match="there is nothing to compare"):
        judged(broken, broken)


def test_another_metric() -> None:
    a = [record(samples_s={"step": (1.0,), "device": (1.0 + i / 1e4,)}) for i in range(5)]
    b = [record(samples_s={"step": (1.0,), "device": (2.0 + i / 1e4,)}) for i in range(5)]
    assert verdicts(a, b) == ["same"]
    assert verdicts(a, b, metric="device") == ["slower"]
    b = [record(samples_s={"step": (1.0,)}), record(samples_s={"device": (0.0, 0.0)})]
    row = judged(a, b, metric="device").rows[0]
    assert row.verdict == "inconclusive"
    assert row.reason == "5 launches of A and 0 of B measured this"


def test_cases_of_one_side_are_named_by_what_tells_them_apart() -> None:
    a = [record(), record(knobs={"tile": "384"}), record(knobs={"amp": True})]
    comparison = judged(a, [record(), record(knobs={"batch": 8})])
    assert comparison.rows[0].label == "tile=256 batch=1 amp=false"
    assert comparison.only_a == ("tile=384 batch=1 amp=false", "tile=256 batch=1 amp=true")
    assert comparison.only_b == ("tile=256 batch=8 amp=false",)
    assert "2 more only in A, 1 more only in B" in comparison.sentence()


def test_the_sentence_is_computed() -> None:
    a = [record([1.0 + i / 1000], i) for i in range(5)]
    b = [record([1.5 + i / 1000], i) for i in range(5)]
    compared = judged(a, b)
    ratio = compared.rows[0].ratio
    ends = f"[{ratio.low:.3f} to {ratio.high:.3f}]"
    assert compared.sentence() == (
        f"1 case, B against A: 1 slower (model, 1.499 {ends} times as long); "
        "5 launches a case and side, intervals of 95 %, "
        "threshold 2.0 % (the least; halves of the same launches differ by 0.25 %)."
    )
    assert compared.rows[0].reason == f"B takes 1.499 {ends} times as long, p 0.0079; beyond 2.0 %"


def run(*words: object) -> int:
    return main(["compare", *map(str, words)])


def store(folder: Path, records: Iterable[Record]) -> Path:
    for each in records:
        ledger.Ledger(folder).append(each)
    return folder


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> tuple[Path, Path]:
    """Two ledgers that no test adds to."""
    folder, rng = tmp_path_factory.mktemp("ledgers"), np.random.default_rng(0)
    a = launches(rng, noise=1e-3) + launches(rng, noise=1e-3, knobs={"amp": True}, level=0.5)
    return store(folder / "a", a), store(folder / "b", launches(rng, noise=1e-3, level=1.2))


def test_the_command_as_a_gate(sides: tuple[Path, Path], tmp_path, capsys) -> None:
    a, b = sides
    assert run(a, b, "--json", tmp_path / "out.json") == 1
    out = capsys.readouterr().out
    assert "amp=false: slower: B takes 1.2" in out
    assert "1 more only in A" in out
    assert "Only in A: amp=true." in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["sentence"] in out and document["regressed"] is True
    assert document["rows"][0]["ratio"]["value"] == pytest.approx(1.2, rel=0.05)
    assert run(b / "records.jsonl", b) == 0
    assert run(b, a) == 0  # faster is no regression
    assert run(a, b, "--fail-if-slower", 0.5) == 0


def test_unlike_machines_end_with_four(sides: tuple[Path, Path], tmp_path, capsys) -> None:
    other = launches(np.random.default_rng(0), environment={"machine_key": "there"})
    there = store(tmp_path / "there", other)
    assert run(sides[0], there) == 4
    capsys.readouterr()
    here = launches(np.random.default_rng(0), noise=1e-3, knobs={"amp": True}, level=0.5)
    some = store(tmp_path / "some", [*other, *here])
    assert run(sides[0], some) == 0  # what is comparable is
    out = capsys.readouterr().out
    assert "Not compared: the launches ran on 2 machines, here and there (amp=false)." in out
    assert "1 case, B against A: 1 same, 1 not comparable" in out
    assert run(sides[0], there, "--anyway") == 0
    assert "although not comparable: the launches ran on 2 machines" in (capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "device"], "--metric device was not measured; there is step"),
        (["--fail-if-slower", "fast"], "--fail-if-slower: 'fast' is not a share such as"),
    ],
)
def test_mistakes(sides: tuple[Path, Path], words: list[str], message: str, capsys) -> None:
    assert run(*sides, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
