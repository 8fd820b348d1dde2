"""What a stranger installs: names, extras, hints, the wheel, and the core alone."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.base.errors import DISTRIBUTION, missing
from penstock.instruments import environment

from .anew import OPTIONAL
from .reports.kit import GPU_CSV, launch

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
TOOLS = ("test", "docs")
"""Extras of who works on Penstock: no library of theirs is imported by the package."""
BLOCK = f"""
import sys
ABSENT = {set(OPTIONAL)}
class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ABSENT:
            raise ModuleNotFoundError(f"No module named {{top!r}}", name=top)
sys.meta_path.insert(0, Absent())
"""


def blocked(folder: Path) -> dict[str, str]:
    """An environment in which Python finds the core's packages alone, children too."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(BLOCK)
    places = [str(folder / "site"), str(Path(penstock.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


@pytest.fixture
def core(tmp_path) -> dict[str, str]:
    return blocked(tmp_path)


def says_fresh(code: str, words: Sequence[str], folder: Path) -> str:
    """What the core prints there to stderr, in a fresh interpreter."""
    environment, command = blocked(folder), [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_hints_name_the_distribution_and_its_extras() -> None:
    assert PROJECT["name"] == DISTRIBUTION == "penstock-dl"
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    required = {e for text in sources for e in re.findall(r'require\(\s*"[\w.]+", "(\w+)"', text)}
    assert required and required <= EXTRAS
    named = re.compile(r"penstock(?:-dl)?\[([a-z,]+)\]")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "training" / "README.md"]
    for text in [*sources, *(page.read_text() for page in pages)]:
        assert "penstock[" not in text
        for extras in named.findall(text):
            assert set(extras.split(",")) <= EXTRAS


def test_the_lowest_versions_that_are_tested_are_those_that_are_allowed() -> None:
    """Each requirement has one minimum, wherever it stands, and lowest.txt that version."""
    lines = (ROOT / "lowest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["optional-dependencies"]
    asked = {line for name, extra in extras.items() if name not in TOOLS for line in extra}
    least: dict[str, str] = {}
    for line in asked.union(PROJECT["dependencies"]):
        if not line.startswith("penstock-dl["):
            minimum = re.fullmatch(r"([\w-]+)(?:\[array\])?>=([\d.]+)(?:,.*)?", line)
            assert minimum, f"{line} has no minimum"
            assert least.setdefault(minimum[1], minimum[2]) == minimum[2], f"{line} has two minima"
    assert least.keys() == pins.keys() - {"hypothesis", "pytest", "pytest-xdist"}
    for name, version in least.items():
        assert pins[name] in (version, version + ".0", version + ".0.0"), name


def test_the_files_that_make_names_are_there() -> None:
    """Of one that has gone, pytest would run none."""
    named = re.findall(r"\b(?:\w+/)?test_\w+\.py", (ROOT / "Makefile").read_text())
    assert len(named) > 60
    gone = [name for name in named if not (ROOT / "tests" / name.removeprefix("tests/")).exists()]
    assert gone == []


def test_the_version_is_the_packages_own() -> None:
    """And not that of another project by the name of penstock."""
    assert environment.collect_environment()["libraries"]["penstock"] == penstock.__version__


def test_types_and_the_schema_are_part_of_the_package() -> None:
    package = resources.files("penstock")
    assert package.joinpath("py.typed").is_file()
    schema = json.loads(package.joinpath("instruments/record.schema.json").read_text())
    assert "scenario" in schema["properties"]


WITHOUT = {
    "infer --in-spec in.npy --out-spec out.zarr --model-type identity": "torch.*dl[infer]",
    "plan --in-spec in.npy --out-spec out.zarr --model-type identity": "torch.*dl[infer]",
    "generate ufs-p1 fields --samples 1": "tensorstore.*dl[loaders]",
    "generate xview3 scenes": "dl[scenes]",
    "train spiral": "torch.*dl[train]",
    "predict best.pth --data-root . --output p.csv": "torch.*dl[train]",
    "bench model --tile-sizes 64 --batch-sizes 1 --output b.csv": "torch.*dl[infer]",
    "bench queue in.npy": "numcodecs.*dl[loaders]",
    "tune loader in.npy --step-time 0.1": "numcodecs.*dl[loaders]",
    "dashboard .": "jinja2.*dl[plot]",
    "plot gpus.csv": "matplotlib.*dl[plot]",
    "report b.jsonl --output b.html": "jinja2.*dl[plot]",
}


OF_CORE = """
import sys, numpy, penstock
numpy.save('in.npy', numpy.zeros((8, 8, 8), 'uint16'))
penstock.Loader
for name in ('plan_inference', 'run_inference'):
    try: getattr(penstock, name)
    except ImportError as error: print(error, file=sys.stderr)
from penstock.cli import main
for words in sys.argv[1:]:
    print('rc', main(words.split()), file=sys.stderr)
"""


@pytest.mark.slow
def test_every_verb_without_the_extras_names_the_one_it_needs(tmp_path) -> None:
    """The core alone, asked in Python, then by every verb that wants more."""
    (tmp_path / "gpus.csv").write_text(GPU_CSV)
    (tmp_path / "b.jsonl").write_text(launch(8).line() + "\n")
    error = says_fresh(OF_CORE, [*WITHOUT], tmp_path)
    plans, runs, *lines = error.splitlines()
    assert len(lines) == 2 * len(WITHOUT), error
    for command, refused, code_ in zip(WITHOUT, lines[::2], lines[1::2], strict=True):
        install = ".*is not installed; run: pip install 'penstock-"
        pattern = re.escape(WITHOUT[command]).replace(r"\.\*", install)
        assert re.search(pattern, refused) and code_ == "rc 2", (command, refused, code_)
    assert plans == runs == "torch is not installed; run: pip install 'penstock-dl[infer]'"


def test_all_is_what_every_verb_needs_but_trackers_and_networks_of_others() -> None:
    (names,) = re.findall(r"\[(.*)\]", *PROJECT["optional-dependencies"]["all"])
    of_others = {"onnx", "nnunet", "bioimageio", "monai"}
    assert EXTRAS - set(names.split(",")) == {"all", "demo", "track", *of_others, *TOOLS}


def make_rules() -> dict[str, tuple[str, str]]:
    """The first need and the recipe of each rule of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^(\S+): *(\S*).*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return {name: (first, recipe) for name, first, recipe in rules}


def test_make_demo_installs_the_demo_and_make_test_adds_the_rest() -> None:
    needs = make_rules()
    assert needs["demo"][0] == "$(VENV)/demo-ready" and needs["test"][0] == "$(VENV)/ready"
    assert "-e '.[demo]'" in needs["$(VENV)/demo-ready"][1]
    first, recipe = needs["$(VENV)/ready"]
    assert first == "$(VENV)/demo-ready" and "-e '.[test,docs]'" in recipe


NEEDED_BY_DEMO = {"contourpy", "markupsafe"}
"""What comes with the libraries of the extra and is not named in it."""


@pytest.mark.slow
def test_the_demo_needs_no_more_than_its_extra(core: dict[str, str], tmp_path) -> None:
    """`make demo` installs that extra alone, so that nobody waits for the rest."""
    extras = PROJECT["optional-dependencies"]
    words = {re.split(r"[>=\[]", line)[0] for line in (*extras["demo"], *extras["plot"])}
    assert words == {*"penstock-dl safetensors tensorstore torch jinja2 matplotlib xxhash".split()}
    site = tmp_path / "site" / "sitecustomize.py"
    here = " ".join(sorted((words | NEEDED_BY_DEMO) - {"penstock-dl"}))
    site.write_text(f"{BLOCK}ABSENT -= set({here!r}.split())\n")
    recipe = make_rules()["demo"][1].replace("\\\n", " ").replace("96 240 240", "32 64 64")
    for line in recipe.strip().splitlines():
        command = line.replace("$(RUN)", sys.executable).split()
        done = subprocess.run(command, capture_output=True, text=True, env=core, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    text = (tmp_path / "demo" / "report.html").read_text()
    for what in ("What the threads of each stage did", "Memory of the job", "input, output"):
        assert what in text, what


def test_the_guide_installs_from_the_clone_and_torch_with_torchvision_first() -> None:
    install = (ROOT / "docs" / "install.md").read_text()
    first, second = re.findall(r"^pip install (.*?)\s+# ", install, re.MULTILINE)
    assert (first, second) == ("torch torchvision", "'.[all]'")
    assert "from one index" in install


@pytest.mark.slow
def test_doctor_of_the_core_runs_without_the_rest(core: dict[str, str], tmp_path) -> None:
    words = [sys.executable, "-m", "penstock", "doctor", "--json", "found.json"]
    done = subprocess.run(words, capture_output=True, text=True, env=core, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["environment"]["libraries"]
    assert "Limits" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_line_that_a_message_prints_works_without_an_index(tmp_path) -> None:
    """pip adds the extra to the Penstock that is installed, from a clone too."""
    (line,) = re.findall(r"pip install '(.*)'", str(missing("wandb", "track")))
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--dry-run", line]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, line) == (0, "penstock-dl[track]"), done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with what is uploaded for a release."""
    folder = tmp_path_factory.mktemp("built")
    code = (
        "import hatchling.build as b, sys; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"
    )
    words = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_source_archive_is_small(built: Path) -> None:
    (archive,) = built.glob("penstock_dl-*.tar.gz")
    assert archive.stat().st_size < 1_200_000  # it is source alone
    with tarfile.open(archive) as files:
        inside = {name.partition("/")[2] for name in files.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/penstock/py.typed"} <= inside
    assert not [name for name in inside if name.startswith(("benchmarks", "docs", "tests"))]


@pytest.mark.slow
def test_the_wheel_holds_what_is_read_at_run_time(built: Path) -> None:
    (wheel,) = built.glob("penstock_dl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    tracked = subprocess.run(
        ["git", "ls-files", "src"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.split()
    inside = {name for name in names if name.startswith("penstock/")}
    assert inside == {path.removeprefix("src/") for path in tracked}
    assert {"penstock/py.typed", "penstock/instruments/record.schema.json"} <= inside
    assert f"Name: penstock-dl\nVersion: {penstock.__version__}\n" in text
    assert "Author: The Penstock developers" in text
