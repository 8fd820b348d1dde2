"""The server of a page of runs as a process: who may ask it, for what, and how it ends."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import dashboard, main

from .kit import launch
from .run_kit import ledger_of, training
from .served import Served, command, environment, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    training(folder / "a")
    ledger_of(folder / "b.ledger", [launch(8), launch(16)])
    (folder.parent / "secret.txt").write_text("what lies outside")
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Served]:
    with served(folder) as server:
        yield server


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["absent"], "absent cannot be read: No such file or directory"),
        ([".", "--port", "70000"], "--port 70000: a port is from 0 to 65535"),
        (["s3://bucket/runs"], "FOLDER: a URL was given"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(words, sentence, here, capsys) -> None:
    assert main(["dashboard", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1


def test_the_page_is_named_by_its_folder_and_counts_its_runs_once(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    report = dashboard._about([Path()], 3)
    assert report.title == f"Penstock: {folder.name}"
    assert report.verdict[0].startswith("3 runs;")
    assert not report.about  # "1 run", of the trainings alone


@pytest.mark.slow
def test_the_page_is_served_to_this_machine_alone(ours: Served) -> None:
    status, body = ours.ask()
    assert status == 200 and "Penstock" in body
    assert ours.ask(Host=f"127.0.0.1:{ours.port}")[0] == 200
    evil = ("evil.example", f"evil.example:{ours.port}", "localhost.evil.example", "", "0.0.0.0")
    for host in evil:
        for path in ("/", "/data.json"):
            status, body = ours.ask(path, Host=host)
            assert status == 403 and "Penstock" not in body, (host, path)


@pytest.mark.slow
def test_requests_of_other_pages_are_refused(ours: Served) -> None:
    def status(origin: str) -> int:
        return ours.ask("/data.json", Origin=origin)[0]

    assert status(f"http://localhost:{ours.port}") == 200
    for origin in ("http://evil.example", f"http://evil.example:{ours.port}", "null",
                   "http://localhost:1", f"https://localhost:{ours.port}"):  # fmt: skip
        assert status(origin) == 403, origin


@pytest.mark.slow
def test_it_answers_with_the_runs_and_only_when_they_change(ours: Served) -> None:
    data = json.loads(ours.ask("/data.json")[1])
    key = next(row["key"] for row in data["rows"] if row["kind"] == "training")
    assert len(data["rows"]) == 3 and data["live"]
    version = data["version"]
    assert ours.ask(f"/data.json?version={version}&run={key}")[0] == 204
    asked = json.loads(ours.ask(f"/data.json?again=1&version={version}&run={key}&run=none")[1])
    assert list(asked["details"]) == [key]


@pytest.mark.slow
def test_it_is_for_reading_only_and_knows_no_paths(ours: Served, folder: Path) -> None:
    def hashes() -> dict[Path, str]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = hashes()
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ours.ask("/", method=method)[0] == 501, method
    for path in (
        "/../secret.txt", "/%2e%2e/secret.txt", "/data.json/../../secret.txt",
        f"/{folder.parent}/secret.txt", f"/..%2f..%2f{folder.parent}/secret.txt",
        f"{folder}/a/args.json",
    ):  # fmt: skip
        status, body = ours.ask(path)
        assert status >= 400 and "what lies outside" not in body, path
    assert hashes() == before


@pytest.mark.slow
def test_ctrl_c_ends_it_in_peace(folder: Path) -> None:
    with served(folder) as server:
        server.ask()
        code, error = server.interrupt()
    assert code == 0 and "Traceback" not in error


@pytest.mark.slow
def test_a_taken_port_is_one_sentence(ours: Served, folder: Path) -> None:
    done = subprocess.run(
        command(folder, "--port", ours.port), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"--port {ours.port}: Address already in use; --port 0 takes any" in done.stderr
