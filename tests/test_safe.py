"""What others named is safe where it goes, and no key is written or printed."""

import argparse
import csv
import io
import itertools
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from penstock.base import SafeStream, redact, redacted, scrubbed
from penstock.cli import VERBS, main
from penstock.instruments import Ledger, Record, case_key, ledger_to_csv
from penstock.reports import before_after_figure, report_of_records, save_figures, write_report
from penstock.reports.table import Columns, append_rows
from penstock.scaling import TrainingRun, runs_to_csv

from .arrays import counted_up, zarr
from .parameters import crossed
from .rows import rows_of
from .slow_server import Loopback

HOSTILE = "<script>a|b\x1b[2J<img src=x onerror=y>![p](http://e.vil)"
SECRETS = ("hunter2word", "bearer-of-keys", "s1gnature", "env-secret-value")


def record(**case: Any) -> Record:
    full = {"model": HOSTILE, "tile": "8", "batch": 1, "mode": "inference", "device": "cpu", **case}
    return Record(
        id="1", time="2026-01-01T00:00:00+00:00", scenario="model", case=full,
        key=case_key("model", full), launch=0, status="ok", work={"samples": 1.0, "pixels": 64.0},
        samples_s={"step": (0.1, 0.11, 0.1)},
    )  # fmt: skip


@pytest.mark.slow
def test_a_terminal_is_moved_by_nobody(tmp_path, capsys, here) -> None:
    (tmp_path / "a\x1b[2Jb\x9b\u202e\udcff.csv").write_text("no benchmark")
    assert main(["plot", "a\x1b[2Jb\x9b\u202e\udcff.csv"]) == 2
    assert main(["score", "xview3", "--inference-file", "\x1b]0;t\x07", "--label-file", "x"]) == 2
    (tmp_path / "in.zarr").mkdir()
    metadata = {"zarr_format": 2, "shape": [8], "chunks": [8], "dtype": "\x1b[2J\x07", "order": "C",
                "compressor": None, "filters": None, "fill_value": 0}  # fmt: skip
    (tmp_path / "in.zarr" / ".zarray").write_text(json.dumps(metadata))
    spec = ["--in-spec", "in.zarr", "--out-spec", "o.zarr", "--model-type", "identity"]
    for words in (["infer", *spec], ["bench", "loader", "in.zarr", "--output", "b.csv"]):
        assert main(words) == 2
    with pytest.raises(SystemExit):
        main(["plot", "--\x1b[2J"])
    printed = "".join(capsys.readouterr())
    assert "\\x1b[2Jb\\x9b\\u202e\\udcff.csv" in printed and '"\\x1b[2J\\x07"' in printed
    assert not {char for char in printed if not char.isprintable()} - {"\n"}


def test_a_bar_of_the_users_model_stays_one_line() -> None:
    stream = io.StringIO()
    for _ in tqdm(range(3), file=SafeStream(stream), mininterval=0.0, ascii=True):
        pass
    assert "\\r" not in stream.getvalue() and stream.getvalue().count("\r") >= 3


def test_what_rich_draws_stays_drawn() -> None:
    from rich.console import Console

    SafeStream(Console().file)  # type: ignore[arg-type]
    assert getattr(SafeStream(Console().file), "rich_proxied_file", None) is not None  # type: ignore[arg-type]


@pytest.mark.usefixtures("undrawn")
def test_a_page_runs_nothing_and_a_table_calculates_nothing(tmp_path) -> None:
    report = report_of_records([record()], f"{HOSTILE}.ledger")
    page = write_report(report, tmp_path)[0].read_text()
    assert "<script" not in page and "<img" not in page and "](http" not in page
    assert "\x1b" not in page and "a\\|b" in page
    ledger_to_csv([record(model="=HYPERLINK(1)"), record(model="@x"), record(model="-2")],
           tmp_path / "a.csv")  # fmt: skip
    models = [row["case.model"] for row in rows_of(tmp_path / "a.csv")]
    assert models == ["'=HYPERLINK(1)", "'@x", "-2"]


def test_no_table_of_runs_or_of_a_benchmark_calculates(tmp_path) -> None:
    run = TrainingRun("=HYPERLINK(1)", "@x", "+cmd", devices=1)
    columns = Columns(names=("model",), place=("model",), apart=())
    append_rows([{"model": "=HYPERLINK(1)"}], tmp_path / "b.csv", columns)
    for text in ((tmp_path / "b.csv").read_text(), runs_to_csv([run])):
        (row,) = csv.DictReader(io.StringIO(text))
        assert "'=HYPERLINK(1)" in row.values()
        assert not [cell for cell in row.values() if cell[:1] in ("=", "@", "+")]


def test_a_figure_has_no_control_characters(tmp_path) -> None:
    figure = before_after_figure({"a\x1b[2J": np.eye(4), "b\x07": np.eye(4)}, "caption \x9b")
    save_figures({tmp_path / "a.png": figure})  # pytest makes an error of a missing glyph
    assert (tmp_path / "a.png").stat().st_size


def test_every_way_in_which_a_key_comes() -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "http",
            "base_url": "https://me:hunter2word@host/?part=2&X-Amz-Signature=s1gnature",
            "headers": ["Authorization: Bearer bearer-of-keys"],
        },
        "storage_options": {"aws_secret_access_key": "hunter2word", "token": "bearer-of-keys"},
        "key": "shape",
    }
    for text in (json.dumps(redacted(spec)), redacted(json.dumps(spec)), redacted(str(spec))):
        assert not [secret for secret in SECRETS if secret in text], text
        assert "part=2" in text and "shape" in text
    fresh = json.loads(json.dumps(spec).replace("s1gnature", "another").replace("hunter2", "new"))
    assert redacted(fresh) == redacted(spec) == redacted(redacted(spec))
    assert case_key("loader", {"data": spec}) == case_key("loader", {"data": fresh})
    assert scrubbed(["Authorization: Basic aHVudGVyMg==", "a token: 5", "s3://b/a@b"])[1:] == [
        "a token: 5", "s3://b/a@b",
    ]  # fmt: skip


HARMLESS = {
    "TOKENIZER": "a-train-of-words",
    "TOKENIZERS_PARALLELISM": "disabled",
    "KEYBOARD": "de-latin1-nodeadkeys",
    "KEY": "1234567",
    "MAX_TOKENS": "100000",
    "API_KEY": "default",
    "PASSWORD": "data",
    "CONFIG_KEY": "s3://host/x.yaml",
    "KEYS_AT": "s3://bucket/prefix",
    "GOOGLE_APPLICATION_CREDENTIALS": "/no/such/place/account.json",
    "SSL_KEY_FILE": "keys/server.pem",
    "SHORT_SECRET": "volume",
}


def test_what_is_no_key_stays(tmp_path, monkeypatch) -> None:
    for name, value in HARMLESS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEY_FOLDER", str(tmp_path))
    kept = [value for name, value in HARMLESS.items() if name != "SHORT_SECRET"]
    kept += [str(tmp_path / "a.zarr"), "subvolumes", "12345678.zarr"]
    assert scrubbed(kept) == kept
    assert scrubbed("a volume, pass=volume") == "a ***, pass=***"
    for name in ("AWS_SECRET_ACCESS_KEY", "SOME_TOKEN", "MY_PASSWORD", "KEY"):
        for value in ("/sOmE+0pen/Base64/wOrds/0f/a/secret/aa==", "bearer-of-keys", "n0t.s0-long"):
            monkeypatch.setenv(name, value)
            assert scrubbed(f"of {value} here") == "of *** here"
            monkeypatch.delenv(name)


def leaks(folder: Path, printed: str) -> list[str]:
    """Where a secret stands: in what was printed, or in a file or its name."""
    places = ["printed" for secret in SECRETS if secret in printed]
    for path in (path for path in folder.rglob("*") if path.is_file()):
        text = str(path).encode() + path.read_bytes()
        places += [f"{path}: {secret}" for secret in SECRETS if secret.encode() in text]
    return places


@pytest.mark.slow
def test_no_verb_writes_or_prints_a_key(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "env-secret-value")
    out = tmp_path / "out"
    zarr(tmp_path / "data" / "in.zarr", counted_up())
    with Loopback(tmp_path / "data", 0.0) as server:
        place = f"{server.url.rstrip('/')}/in.zarr/"
        query = "?X-Amz-Signature=s1gnature&token=env-secret-value"
        spec = {"driver": "zarr", "kvstore": {
            "driver": "http", "base_url": place,
            "headers": ["Authorization: Bearer bearer-of-keys"]}}  # fmt: skip
        infer = ["infer", "--in-spec", json.dumps(spec), "--out-spec", f"{out}/a.zarr",
                 "--model-type", "identity", "--patch", "8", "--overlap", "0", "--devices", "cpu",
                 "--trace", f"{out}/trace.json", "--metrics-json", f"{out}/m.json"]  # fmt: skip
        assert main(infer) == 0
        assert main([*infer, "--resume"]) == 0
        fresh = json.dumps(spec).replace("bearer-of-keys", "bearer-of-more-keys")
        assert main(["infer", "--in-spec", fresh, *infer[3:], "--resume"]) == 0
        assert main(["plan", *infer[1:3], "--out-spec", f"{out}/b.zarr", *infer[5:13]]) == 0
    assert main(["plot", f"https://me:hunter2word@h/{query}"]) == 2
    assert main(["slurm", "render", "--", "train", "pairs", "--in-spec", json.dumps(spec)]) == 2
    assert main(["slurm", "render", "--", "train", "pairs", "--in-spec", f"https://h/{query}"]) == 2
    assert not leaks(out, "".join(capsys.readouterr()))


AT = "127.0.0.1:1/x.yaml?X-Amz-Signature=s1gnature&token=env-secret-value"
URL = f"http://me:hunter2word@{AT}"
HEADERS = ["Authorization: Bearer bearer-of-keys", "X-Api-Key: hunter2word"]
SPEC = json.dumps(
    {"driver": "zarr3", "kvstore": {"driver": "http", "base_url": URL, "headers": HEADERS}}
)


def ends(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    """The words of a verb, with each of its kinds, and the arguments that it takes."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, kind in action.choices.items():
                yield from ends(kind, [*words, name])
            return
    yield words, parser._actions


def planted_lines(verb: str, every_kind: bool) -> Iterator[list[str]]:
    """Command lines of a verb: a key is in all that must be said, and in one flag after another.

    Left out is what takes seconds until it is refused: data of ``bench``, which a process of its
    own asks for (`test_what_fails_tells_no_key`), and devices; and the name and tags of
    ``bench``, which needs nothing else and would work for a while. Of kinds that take the same
    arguments, the presets of ``suite``, one is asked unless all are.
    """
    asked = set[tuple[str, ...]]()
    left_out = {"device", "name", "tag"} if verb == "bench" else {"device"}
    parser = argparse.ArgumentParser()
    import_module(f"penstock.cli.{verb}").add_arguments(parser)
    for words, actions in ends(parser, [verb]):
        taken = tuple(action.dest for action in actions)
        if taken in asked and not every_kind:
            continue
        asked.add(taken)
        places = [action for action in actions if not action.option_strings]
        flags = [
            [(name := action.option_strings[0]), SPEC if name.endswith("spec") else URL]
            for action in sorted(actions, key=lambda action: not action.required)
            if action.option_strings and action.nargs != 0 and action.dest not in left_out
        ]
        required = sum(bool(action.option_strings and action.required) for action in actions)
        said = [*words, *(str(next(iter(place.choices or [URL]))) for place in places)]
        said += itertools.chain.from_iterable(flags[:required])
        if (places or required) and verb != "bench":
            yield said
        yield from ([*said, *flag] for flag in flags)


@pytest.mark.parametrize(
    ("verb", "every_kind"),
    [*((verb, False) for verb in VERBS), pytest.param("suite", True, marks=pytest.mark.slow)],
)
def test_a_key_in_any_argument_of_any_verb_stays_there(
    verb: str, every_kind: bool, tmp_path, capsys, monkeypatch
) -> None:
    """A place to write to that is a URL is refused, where a folder would be made of that name."""
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "env-secret-value")
    monkeypatch.chdir(tmp_path)
    once = {"http_request_retries": {"max_retries": 0}}
    monkeypatch.setattr("penstock.data.stores.kvstore.BRIEF", once)
    for words in planted_lines(verb, every_kind):
        try:
            code: Any = main(words)
        except SystemExit as end:
            code = end.code
        printed = "".join(capsys.readouterr())
        assert code == 2 and printed, words
        assert not leaks(tmp_path, printed), words
        assert not [path for path in tmp_path.rglob("*") if "hunter2word" in path.name], words


BUCKETS = (
    "s3://me:{}@bucket/x.zarr", "gs://me:{}@bucket/x", "S3://me:{}@bucket/x",
    "s3://me:{}@bucket/x|zarr3:", '{{"driver": "zarr3", "kvstore": "s3://me:{}@bucket/x"}}',
    '{{"driver": "zarr3", "kvstore": {{"driver": "s3", "bucket": "me:{}@bucket", "path": "x"}}}}',
)  # fmt: skip
LOGINS = ("hunter2word", "half/hunter2word", "a+b/hunter2word/c")


@pytest.mark.parametrize(("spec", "key"), crossed(BUCKETS, LOGINS))
def test_a_buckets_login_is_in_no_text(spec: str, key: str, capsys, tmp_path, here) -> None:
    """Also not in the texts of TensorStore, which quotes it as a bucket's name."""
    words = ["--in-spec", spec.format(key), "--out-spec", "a.zarr", "--model-type", "identity"]
    assert main(["infer", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "hunter2word" not in said and "half" not in said
    assert not [*tmp_path.iterdir()]


def test_an_address_without_a_login_stays_as_it_is() -> None:
    for text in (
        "s3://bucket/a:b@c",
        "http://host:9000/a@b",
        "10:30",
        "net.py:make",
        "a: b@c",
        "h:9/a@b",
        "B:USR1@120",
    ):
        assert redact(text) == text


def test_no_output_has_a_key_in_its_name(tmp_path, capsys, here) -> None:
    zarr(tmp_path / "in.zarr", counted_up())
    infer = ["infer", "--in-spec", "in.zarr", "--out-spec", "out.zarr", "--model-type", "identity",
             "--patch", "8", "--overlap", "0", "--devices", "cpu"]  # fmt: skip
    here = "a URL was given; give a place on this machine"
    for words, said in (
        (["generate", "ufs-p1", URL], here),
        (["generate", "volume", URL], here),
        ([*infer, "--run-dir", URL], "the URL holds a login"),
        ([*infer, "--run-dir", "s3://me:hunter2word@bucket/run"], "the URL holds a login"),
        ([*infer, "--run-dir", "memory://run"], "or a prefix such as s3://BUCKET/PREFIX"),
        ([*infer, "--trace", URL], here),
        ([*infer, "--metrics-json", URL], here),
    ):
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert said in error and "hunter2word" not in error, words
        assert [path.name for path in tmp_path.iterdir()] == ["in.zarr"], words


@pytest.mark.slow  # a store that does not answer is asked again
def test_what_fails_tells_no_key(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "env-secret-value")
    monkeypatch.chdir(tmp_path)
    for words in (
        ["infer", "--in-spec", SPEC, "--out-spec", "a.zarr", "--model-type", "identity"],
        ["bench", "loader", URL, "--output", "b.csv"],
        ["tune", "loader", URL, "--step-time", "1"],
        ["train", "pairs", "--in-spec", SPEC, "--target-spec", SPEC, "--output-dir", "t"],
    ):
        assert main(words) in (1, 2), words
    assert not leaks(tmp_path, "".join(capsys.readouterr()))


def test_a_record_holds_no_key(tmp_path) -> None:
    from penstock.bench.launch.supervisor import Launch as Asked
    from penstock.bench.launch.supervisor import run_launch as launch

    case = {"data": "https://me:hunter2word@host/x?sig=s1gnature", "batch": 1}
    record = launch(Asked("loader", case, 60.0), command=["/no/such/command"])
    Ledger(tmp_path).append(record)
    assert record.key == case_key("loader", case) == case_key("loader", record.case)
    assert not leaks(tmp_path, str(record))
