"""docs/extending.md, followed to the letter; and what other packages add by entry points."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import penstock
from penstock.base.errors import UsageError
from penstock.cli import main

from .anew import imported_anew
from .rows import rows_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
IN_TREE = {"A loader engine", "A scenario", "A verb", "A tracker"}
OF_A_PACKAGE = {"A model", "A store", "A workload"}
PERIOD = (60, 60, 60)
"""Specimens that repeat so soon are grown in a tenth of the time of those in other tests."""
pytestmark = pytest.mark.usefixtures("one_thread")


class Step(NamedTuple):
    says: str
    blocks: list[tuple[str, str]]
    """Languages and texts."""


def recipe(title: str) -> list[Step]:
    """The steps under a heading."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    steps = []
    for number, text in enumerate(re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:], 1):
        assert f"\n{number}. {text}" in section
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        says = " ".join(re.split(r"^```|\n\n", text, maxsplit=1, flags=re.MULTILINE)[0].split())
        steps.append(Step(says, blocks))
    return steps


def edit(step: Step, root: Path) -> None:
    """Do what a step says to files; of commands and advice nothing."""
    if says := re.fullmatch(r"Write `([^`]+)`:", step.says):
        file = root / says[1]
        assert file.parent.is_dir() and not file.exists()
        file.write_text(step.blocks[0][1])
    elif says := re.fullmatch(r"In `([^`]+)`, (above|below) `([^`]+)`:", step.says):
        file = root / says[1]
        lines = file.read_text().splitlines(keepends=True)
        (place,) = (n for n, line in enumerate(lines) if line.strip().startswith(says[3]))
        lines.insert(place + (says[2] == "below"), step.blocks[0][1])
        file.write_text("".join(lines))
    elif says := re.fullmatch(r"In `([^`]+)`, write `([^`]+)` instead of `([^`]+)`\.", step.says):
        file = root / says[1]
        assert file.read_text().count(says[3]) == 1, says[3]
        file.write_text(file.read_text().replace(says[3], says[2]))
    else:
        assert re.match(r"(Run|Install it):$|Then test it", step.says), step.says


def lines_of(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("title", sorted(IN_TREE | OF_A_PACKAGE))
def test_a_recipe_has_at_most_ten_steps(title: str) -> None:
    assert 3 <= len(recipe(title)) <= 10


def test_the_page_has_these_recipes_and_no_other() -> None:
    assert set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE)) == IN_TREE | OF_A_PACKAGE


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of what the recipes change."""
    rewritten = shutil.ignore_patterns("*-pytest-*.pyc")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=rewritten)
    shutil.copy(ROOT / "ARCHITECTURE.md", tmp_path)
    return tmp_path


def run(words: list[str], tree: Path) -> str:
    """What a command says, in a folder of its own beside the copy."""
    (tree / "work").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tree / "work", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_anew(work: Iterable[tuple[str, str | list[str]]]) -> None:
    """Blocks and command lines of recipes, one after another, as a fresh interpreter would."""
    with imported_anew():
        from penstock.cli import main
        from penstock.data import volumes

        volumes.PERIOD = PERIOD
        for kind, text in work:
            if kind == "python":
                assert isinstance(text, str)
                exec(compile(text, "extending.md", "exec"), {"__name__": "__main__"})
            else:
                program, *words = text
                assert program == "penstock" and main(words) == 0, text


@pytest.mark.parametrize(
    "titles",
    [
        pytest.param({"A verb"}, id="A verb"),
        *(pytest.param({t}, id=t, marks=pytest.mark.slow) for t in sorted(IN_TREE - {"A verb"})),
    ],
)
def test_what_is_added_inside_runs(titles: set[str], tree: Path, monkeypatch, capsys) -> None:
    work: list[tuple[str, str | list[str]]] = []
    shown = []
    for step in (step for title in sorted(titles) for step in recipe(title)):
        edit(step, tree)
        if step.says != "Run:":
            continue
        *blocks, (language, output) = step.blocks
        assert language == "text"
        shown.append(output)
        for kind, block in blocks:
            lines = [block] if kind == "python" else map(shlex.split, lines_of(block))
            work += [(kind, line) for line in lines]
    (tree / "work").mkdir()
    monkeypatch.chdir(tree / "work")
    monkeypatch.syspath_prepend(tree / "src")
    monkeypatch.setenv("PYTHONPATH", str(tree / "src"))
    run_anew(work)
    said = capsys.readouterr().out
    assert len(shown) == len(titles) and all(output in said for output in shown), said
    if "A tracker" in titles:
        (table,) = (tree / "work" / "run" / "track" / "table").glob("*/metrics.csv")
        first = next(row for row in rows_of(table) if row["step"] == "1")
        assert float(first["train_loss_step"]) > 0


@pytest.mark.slow
def test_all_recipes_together_keep_the_rules_of_the_house(tree: Path) -> None:
    for title in sorted(IN_TREE):
        for step in recipe(title):
            edit(step, tree)
    (tree / "tests").mkdir()
    for name in ("__init__.py", "anew.py", "house.py", "test_house.py"):
        shutil.copy(ROOT / "tests" / name, tree / "tests")
    shutil.copy(ROOT / "pyproject.toml", tree)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "../tests"]
    words += ["-k", "not before_and_after and not blocked and not old_import"]
    assert " passed" in run(words, tree)


class Site:
    """A folder on the import path, as pip would fill it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, group: str, entries: dict[str, str], version: str = "1.0") -> None:
        about = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")
        lines = [f"{key} = {value}" for key, value in entries.items()]
        (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Site]:
    """It is left as it was found: what was imported from there is forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield Site(folder)
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


def follow(title: str, site: Site) -> None:
    """All steps of a recipe for a package of one's own, by real commands in this process."""
    for step in recipe(title):
        edit(step, site.folder)
        if step.says == "Install it:":
            project = tomllib.loads((site.folder / "pyproject.toml").read_text())["project"]
            ((group, entries),) = project["entry-points"].items()
            site.install(project["name"], group, entries, project["version"])
        elif step.says == "Run:":
            for kind, block in step.blocks:
                if kind == "python":
                    exec(compile(block, "extending.md", "exec"), {})
                    continue
                for line in lines_of(block):
                    program, *words = shlex.split(line)
                    assert program == "penstock"
                    assert main(words) == 0, line


@pytest.mark.slow
def test_a_model_of_another_package(site: Site) -> None:
    follow("A model", site)
    before, after = (penstock.open_source(f"{name}.zarr") for name in ("noisy", "blurred"))
    centre = np.s_[:, :, 4:12, 16:32, 16:32]
    noisy, blurred = (each.read(each.domain)[centre].astype(float) for each in (before, after))
    assert blurred.std() < 0.8 * noisy.std() and abs(blurred.mean() - noisy.mean()) < noisy.std()
    # What resumes a run knows it by its code and not by its name alone.
    from penstock.models.load import load_model

    assert load_model("blur").reference == "penstock_blur:Blur"
    assert load_model("blur").code == load_model("penstock_blur:Blur").code != ""


def test_a_store_of_another_package(site: Site, capsys) -> None:
    with pytest.warns(RuntimeWarning, match="raw has no lock: the package that writes it has none"):
        follow("A store", site)
    cells, copy = (Path(f"{name}-16x32x32.raw").read_bytes() for name in ("cells", "copy"))
    assert cells == copy and len(set(copy)) > 1
    capsys.readouterr()
    common = ["--model-type", "identity", "--normalize", "none", "--patch", "16", "--overlap", "0"]
    for given, made, reason in (
        ("cells-16x32x32", "copy-16x32x32", "exists; use --overwrite to replace it"),
        ("cells-16x32x32", "copy-16x32x8", "the output is (1, 1, 16, 32, 32) of uint16"),
        ("none-16x32x32", "new-16x32x32", "FileNotFoundError"),
    ):
        words = ["infer", "--in-spec", f"{given}.raw", "--out-spec", f"{made}.raw", *common]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert reason in error and "raw is an entry point of penstock-raw 1.0" in error
        assert error.count("\n") == 1
    assert not Path("new-16x32x32.raw").exists()


def test_a_workload_of_another_package(site: Site, capsys) -> None:
    follow("A workload", site)
    assert "line: 2 parameters" in capsys.readouterr().out
    assert Path("fit", "best_model.pth").is_file()


def refused(what: str, name: str, capsys) -> str:
    """What a command says that names a model, a store or a workload and is refused."""
    Path("empty").mkdir(exist_ok=True)
    infer = ["plan", "--in-spec", "none.zarr", "--out-spec", "out.zarr", "--model-type", "identity"]
    words = {
        "models": [*infer[:-1], name],
        "stores": ["plan", "--in-spec", f"volume.{name}", *infer[3:]],
        "workloads": ["train", name, "--output-dir", "run", "--device", "cpu"],
    }[what]
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("what", ["models", "stores", "workloads"])
def test_nothing_is_imported_that_was_not_named(what: str, site: Site, capsys) -> None:
    """Names of ours win, and those of other packages stand in the list of what there is."""
    (site.folder / "theirs.py").write_text("raise SystemExit('it was imported')")
    names = ("identity", "spiral", "zarr", "aardvark")
    site.install("theirs", f"penstock.{what}", dict.fromkeys(names, "theirs:Thing"))
    Path("volume.nothing").mkdir()
    assert "aardvark" in refused(what, "nothing", capsys)
    from penstock.models.load import load_model
    from penstock.models.registry import check_model_name
    from penstock.training.workloads import check_workload

    load_model("identity")
    check_model_name("identity", "--model-type")
    check_workload("spiral")
    with pytest.raises(UsageError, match="no such file"):
        penstock.open_source("none.zarr")
    assert "theirs" not in sys.modules


BROKEN = [
    ("Thing = 5", "theirs:Thing", "int|5"),
    ("import no_such_library", "theirs:Thing", "No module named 'no_such_library'"),
    ("def half(:", "theirs:Thing", "SyntaxError"),
    ("", "theirs:Thing", "has no attribute 'Thing'"),
    ("", "nowhere_at_all:Thing", "No module named 'nowhere_at_all'"),
]
"""The first is loaded and refused by each kind; the others all are loaded by the same code."""


@pytest.mark.parametrize(
    ("what", "code", "value", "reason"),
    [
        *(("models", *way) for way in BROKEN),
        *((what, *way) for what in ("stores", "workloads") for way in BROKEN[:2]),
    ],
)
def test_what_is_broken_is_told_with_its_package(what, code, value, reason, site, capsys) -> None:
    (site.folder / "theirs.py").write_text(code)
    site.install("their-tools", f"penstock.{what}", {"aardvark": value}, "2.1")
    error = refused(what, "aardvark", capsys)
    assert re.search(reason, error)
    assert "aardvark is an entry point of their-tools 2.1" in error


def test_a_store_that_lacks_something_is_refused(site: Site) -> None:
    (site.folder / "theirs.py").write_text("def open_source(place, **others): return object()")
    site.install("their-tools", "penstock.stores", {"aardvark": "theirs"})
    with pytest.raises(UsageError, match=r"type object and lacks .*chunks.*; aardvark is an"):
        penstock.open_source("volume.aardvark")
    whole = penstock.Box((0,) * 5, (1,) * 5)
    with pytest.raises(UsageError, match=r"aardvark can be read and not written; aardvark is an"):
        penstock.open_sink("volume.aardvark", domain=whole, dtype=np.dtype("uint8"))
    with pytest.raises(UsageError, match=r"any TensorStore spec \(and of other .*: \*\.aardvark\)"):
        penstock.open_sink("volume.tif", domain=whole, dtype=np.dtype("uint8"))


@pytest.mark.parametrize("refuses", [False, True])
def test_a_store_without_levels_has_one(refuses: bool, site: Site, capsys) -> None:
    """One that takes no notice of the level gives its first one for all."""
    line = "    if level: raise penstock.UsageError('no such level')" * refuses
    code = ["import numpy, penstock", "def open_source(place, *, level, name, **others):", line]
    code += ["    return penstock.open_source(numpy.ones((4, 5), 'uint8'), name=name)"]
    (site.folder / "theirs.py").write_text("\n".join(code))
    site.install("their-tools", "penstock.stores", {"aardvark": "theirs"})
    assert main(["info", "volume.aardvark"]) == 0
    assert "level" not in capsys.readouterr().out


def test_one_name_of_two_packages_is_refused(site: Site, capsys) -> None:
    for owner in ("one", "other"):
        site.install(owner, "penstock.models", {"aardvark": f"{owner}:Net"})
    said = refused("models", "aardvark", capsys)
    assert "'aardvark' in penstock.models is an entry point of one 1.0 and other 1.0" in said
