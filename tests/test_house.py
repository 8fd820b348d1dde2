"""The package is held to its own rules: wings, doors, purity, sizes, public names, start-up."""

import ast
import gc
import importlib
import json
import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import penstock
from penstock.base import plural

from .anew import OPTIONAL, WAYS, run_anew, run_fresh
from .house import (
    HEAVY,
    HEAVY_ROOMS,
    PACKAGE,
    ROOT,
    architecture,
    doors,
    files,
    forget,
    imports_of,
    module_of,
    nodes,
    nodes_beside,
    pure_rooms,
    ranks,
    targets_of,
    tree,
)


@pytest.fixture(scope="module", autouse=True)
def _trees_go_unsearched() -> Iterator[None]:
    """The trees of all files are a million objects: too many to search for garbage again and again,
    here or in later tests."""
    gc.disable()
    yield
    forget()
    gc.enable()


def test_the_plan_of_the_house_names_every_wing() -> None:
    assert list(doors()) == sorted(set(ranks()) - {"cli"})
    assert {file.split("/")[0] for file in files()} == set(ranks())
    assert not HEAVY_ROOMS - set(files())


def test_no_room_bears_the_name_of_a_room_in_another_wing() -> None:
    """A verb's file in cli may share the name of what it calls."""
    wings: dict[str, set[str]] = {}
    for file in files():
        room, wing = Path(file).stem, file.split("/")[0]
        if not room.startswith("__") and wing != "cli":
            wings.setdefault(room, set()).add(wing)
    assert {room: names for room, names in wings.items() if len(names) > 1} == {}


def _strange(file: str) -> Iterator[str]:
    wing = file.split("/")[0]
    for base, name, line in imports_of(file):
        other = f"{base}.{name}".split(".")[1]
        if other in (wing, "__version__"):
            continue
        if ranks()[other] >= ranks()[wing]:
            yield f"{file}:{line} imports {other}"
        elif base != f"penstock.{other}":
            yield f"{file}:{line} comes not by the door of {other}"
        elif name not in doors()[other]:
            yield f"{file}:{line}: {other} does not hand out {name}"


def test_other_wings_are_left_of_it_and_come_in_by_the_door() -> None:
    assert [wrong for file in files() for wrong in _strange(file)] == []


def test_no_circle_of_imports() -> None:
    graph = {file: {other for other in targets_of(file) if other != file} for file in files()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("wing", ranks())
def test_no_circle_among_the_folders_of_a_wing(wing: str) -> None:
    """Each folder, and each room beside them, stands for itself."""
    order = TopologicalSorter[str]()
    for file in files():
        for other in targets_of(file):
            here, there = (place.split("/")[:2] for place in (file, other))
            if here != there and {here[0], there[0]} == {wing}:
                order.add(here[1], there[1])
    order.prepare()


def test_folders_of_inference_are_in_the_order_that_architecture_gives() -> None:
    """The rooms beside them are the entries, which may import any of them."""
    (said,) = re.findall(r"imports only\s+those to its left: `(.*?)`", architecture())
    rank = {f: n for n, step in enumerate(said.split(" < ")) for f in step.split(", ")}
    assert set(rank) == {file.split("/")[1] for file in files() if file.count("/") > 1
                         and file.startswith("inference/")}  # fmt: skip
    for file in (file for file in files() if file.split("/")[0] == "inference"):
        for other in targets_of(file):
            wing, there, *_ = other.split("/")
            here = rank.get(file.split("/")[1], len(rank))
            if wing == "inference" and there != file.split("/")[1]:
                assert rank.get(there, len(rank)) <= here - (there in rank), f"{file} -> {other}"


def test_every_room_that_a_run_imports_is_known_to_compute_voxels_or_not() -> None:
    """A run is made anew where the code that computed its voxels has changed."""
    assigned = nodes("inference/opening/identity.py", ast.Assign)
    (line,) = (node for node in assigned if ast.unparse(node.targets[0]) == "VOXEL_CODE")
    voxel_code = ast.literal_eval(line.value)
    seen: set[str] = set()
    coming = ["inference/run.py"]
    while coming:
        if (file := coming.pop()) not in seen:
            seen.add(file)
            coming += targets_of(file)
    assert [place for place in voxel_code if not (PACKAGE / place).exists()] == []
    others = {file for file in seen if not any(Path(file).is_relative_to(p) for p in voxel_code)}
    assert {file.split("/")[0] for file in others} == {"base", "instruments"}


@pytest.mark.parametrize("wing", doors())
def test_a_door_says_what_lives_behind_it(wing: str) -> None:
    door = importlib.import_module(f"penstock.{wing}")
    assert door.__doc__ and len(door.__doc__.strip().splitlines()) >= 3
    assert sorted(door.__all__) == sorted(doors()[wing])
    paths = (Path(file).parts for file in files())
    inside = {parts[1].removesuffix(".py") for parts in paths if parts[0] == wing}
    assert not inside & set(doors()[wing]), "a name is a room's too"


NAMES = (
    "import json, sys; from importlib import import_module\n"
    "rooms_first, rooms, doors = json.loads(sys.argv[1])\n"
    "def names():\n"
    "    door = {d: import_module('penstock.' + d) for d in doors}\n"
    "    return {(d, n): getattr(door[d], n) for d in doors for n in doors[d]}\n"
    "before = None if rooms_first else names()\n"
    "for room in rooms: import_module(room)\n"
    "after = names()\n"
    "for (d, n), what in after.items():\n"
    "    home = import_module(doors[d][n])\n"
    "    assert what is getattr(home, n), (d, n)\n"
    "    assert before is None or what is before[d, n], (d, n)\n"
    "print(len(after))"
)


@pytest.mark.slow
@pytest.mark.parametrize("rooms_first", [False, True])
def test_every_name_of_every_door_is_the_same_before_and_after_all_rooms(rooms_first: bool) -> None:
    """An imported room hides no name that a door hands out."""
    homes = {
        door: {name: module_of(file) for name, file in names.items()}
        for door, names in doors().items()
    }
    printed = run_anew(NAMES, [json.dumps([rooms_first, [*map(module_of, files())], homes])])
    assert int(printed) == sum(map(len, homes.values())) > 0


def test_an_import_of_the_face_changes_nothing_in_the_process() -> None:
    state = "(sys.meta_path[:], sys.path[:], dict(os.environ), signal.getsignal(signal.SIGTERM))"
    code = f"import os, signal, sys; before = {state}; import penstock; assert before == {state}"
    assert run_fresh(code) == ""


@pytest.mark.parametrize("run", WAYS)
def test_pure_modules_import_with_heavy_libraries_blocked(run: Callable[..., str]) -> None:
    """In one interpreter: a room that cannot be imported is not kept, so all who need it fail. Of
    the libraries of extras they import two, which import nothing heavy."""
    code = (
        "import sys, traceback; from importlib import import_module\n"
        f"blocked, failed = dict.fromkeys({HEAVY}), {{}}\n"
        "sys.modules.update(blocked)\n"
        "for module in sys.argv[1:]:\n"
        "    try: import_module(module)\n"
        "    except Exception: failed[module] = traceback.format_exc()\n"
        "    assert all(sys.modules[name] is None for name in blocked), module\n"
        "for module, why in failed.items(): print(module, why)\n"
        "print('tried', len(sys.argv) - 1, 'failed', sorted(failed))"
    )
    pure = [module_of(name) for name in pure_rooms()]
    printed = run(code, pure, {*HEAVY, *OPTIONAL} - {"numcodecs", "xxhash"})
    assert printed.splitlines()[-1] == f"tried {len(pure)} failed []", printed


FILE, CLASS, FUNCTION, TEST_FILE = 400, 200, 60, 600
"""Lines, at most."""


def _lengths() -> Iterator[tuple[str, int, int]]:
    for file in files():
        yield file, len((PACKAGE / file).read_text().splitlines()), FILE
        for node in nodes(file, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
            most = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
            assert node.end_lineno
            yield f"{file}::{node.name}", node.end_lineno - node.lineno + 1, most


def test_files_classes_and_functions_are_of_one_sitting() -> None:
    assert {name for name, lines, most in _lengths() if lines > most} == set()


def test_test_files_are_of_one_sitting() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert {str(path) for path, lines in lengths.items() if lines > TEST_FILE} == set()


def test_no_file_repeats_its_folders_name() -> None:
    for file in files():
        folder, stem = Path(file).parent.name, Path(file).stem
        assert stem != folder and not stem.startswith(f"{folder}_"), file


def test_no_library_code_prints() -> None:
    for file in files():
        if not file.startswith("cli/"):
            calls = (node.func for node in nodes(file, ast.Call))
            assert "print" not in {c.id for c in calls if isinstance(c, ast.Name)}, file


def test_one_default_per_knob() -> None:
    """Functions below the config take what it holds; they do not repeat its defaults."""
    from penstock.base import InferConfig

    knobs = set(InferConfig.model_fields)
    below = (
        "base/threads data/box data/normalize inference/tiling/geometry inference/tiling/stitch "
        "inference/planning/plan inference/planning/memory inference/lanes/lane"
    )
    for file in (f"{room}.py" for room in below.split()):
        for node in nodes(file, ast.FunctionDef, ast.AsyncFunctionDef):
            named = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            assert not knobs & {arg.arg for arg in named}, f"{file}: {node.name}"


VAGUE = {"found", "told", "own", "known"}
OF_PERSONS = {"told", "heard", "deaf", "tired"}
"""Words of which no part of a name is made: machines are not persons."""
NOT_FIRST = (
    "of in on at by for from to with without as after before above below under over per among "
    "between beside through until since whose which where whether what how"
).split()
"""An attribute's text says what it is, so it does not begin with one of these."""


def test_no_two_classes_share_a_name() -> None:
    """An underscore before it makes no other name of it."""
    homes: dict[str, list[str]] = {}
    for file in files():
        for node in nodes(file, ast.ClassDef):
            homes.setdefault(node.name.lstrip("_"), []).append(file)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def _set_by(node: ast.arg | ast.Name) -> str | None:
    """The name of a variable that is set here, or of a parameter."""
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node.ctx, ast.Store) else None


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_names_say_what_they_hold(beside: bool) -> None:
    """In the package, and in the tests and benchmarks beside it."""
    kinds = (ast.arg, ast.Name)
    package = ((file, node) for file in files() for node in nodes(file, *kinds))
    outside = nodes_beside("tests", "benchmarks", kinds=kinds)
    vague = [
        f"{file}:{node.lineno} {name}"
        for file, node in (outside if beside else package)
        if (name := _set_by(node)) in VAGUE or OF_PERSONS & {*str(name).split("_")}
    ]
    assert vague == []


def _attribute_docs(node: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    for before, text in pairwise(node.body):
        if (
            isinstance(before, ast.Assign | ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            yield text.lineno, text.value.value


def test_an_attribute_says_what_it_is() -> None:
    wrong = [
        f"{file}:{line} {text}"
        for file in files()
        for node in nodes(file, ast.Module, ast.ClassDef)
        for line, text in _attribute_docs(node)
        if text.split()[0].lower() in NOT_FIRST
    ]
    assert wrong == []


def _functions_of_doors() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for wing in doors():
        for name, file in doors()[wing].items():
            for node in tree(file).body:
                functions = ast.FunctionDef | ast.AsyncFunctionDef
                if isinstance(node, functions) and node.name == name:
                    yield f"{file}::{name}", node


def test_functions_that_doors_hand_out_tell_their_arguments() -> None:
    """In sections, from which a reference can be rendered; a single argument may do without."""
    wrong = []
    for where, node in _functions_of_doors():
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        text = ast.get_docstring(node) or ""
        if len(args) > 1:
            wrong += [
                f"{where}: {a.arg}" for a in args if not re.search(rf"^ +{a.arg}: ", text, re.M)
            ]
            returns = ast.unparse(node.returns) if node.returns else "None"
            if returns not in ("None", "Never", "NoReturn") and not re.search(
                r"^(Returns|Yields):$", text, re.MULTILINE
            ):
                wrong.append(f"{where}: what it returns")
        raises = any(isinstance(part, ast.Raise) and part.exc for part in ast.walk(node))
        if (raises or "Raises `" in text) and "Raises:" not in text:
            wrong.append(f"{where}: what it raises")
    assert wrong == []


CHECKS = {"assert", "raises", "warns", "fail", "AssertionError"}


def test_what_is_counted_is_said_by_plural() -> None:
    """No message says "1 scenes": a length before a noun that `plural` is given elsewhere."""
    calls = [call for file in files() for call in nodes(file, ast.Call)]
    words = [call.args[1] for call in calls if ast.unparse(call.func) == "plural"]
    many = "|".join(plural(2, w.value)[2:] for w in words if isinstance(w, ast.Constant))
    texts = [text for file in files() for text in nodes(file, ast.JoinedStr)]
    pairs = [pair for text in texts for pair in pairwise(map(ast.unparse, text.values))]
    wrong = [b for a, b in pairs if a.startswith("{len(") and re.match(rf"[\"'] ({many})\b", b)]
    assert many and wrong == []


def _words(function: ast.AST) -> Iterator[str]:
    """What a function may check with: its own assertions, and the helpers that it names."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            yield "assert"
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr.startswith(tuple(CHECKS)):
            yield "assert"  # as in np.testing.assert_equal


@pytest.mark.slow
def test_every_test_asserts_something() -> None:
    """It does, or a helper that it names does. Helpers are told apart by their names alone."""
    words: dict[str, set[str]] = {}
    for file, node in nodes_beside("tests", kinds=[ast.FunctionDef]):
        place = f"{file}:{node.name}" if node.name.startswith("test_") else node.name
        words.setdefault(place, set()).update(_words(node))
    checks = set(CHECKS)
    while more := {place for place, names in words.items() if names & checks} - checks:
        checks |= more
    assert [place for place in words if ":" in place and place not in checks] == []


@pytest.mark.parametrize("run", WAYS)
def test_help_starts_without_anything_heavy(run: Callable[..., str]) -> None:
    code = "from penstock.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert "usage: penstock" in run(code, without={*HEAVY, "numpy", "pydantic", "rich"})


def test_public_names_are_pinned() -> None:
    assert penstock.__all__ == [
        "Box", "Incomplete", "Loader", "PenstockError", "Plan", "Progress", "Refused", "StageError",
        "Summary", "UsageError", "open_sink", "open_source", "plan_inference", "run_inference",
        "run_training",
    ]  # fmt: skip
    for name in penstock.__all__:
        assert getattr(penstock, name).__doc__, f"{name} has no docstring"
