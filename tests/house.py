"""The rules of the house as ARCHITECTURE.md has them, and the package as its files have it."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "penstock"
HEAVY = ("torch", "tensorstore", "zarr", "dask", "pandas", "matplotlib", "tifffile")
FACE = ("__init__.py", "__main__.py")
HEAVY_ROOMS = frozenset(
    """
    data/stores/ometiff.py
    models/detector.py models/devices.py models/emulator.py
    models/footprint.py models/load.py models/prithvi.py
    models/checkpointing.py
    models/explained.py models/packages/bioimageio.py
    models/packages/monai_bundle.py models/packages/nnunet.py models/packages/onnx.py
    models/packages/package.py
    models/changed_heads.py models/torchvision_ops.py
    models/unet3d.py models/weights.py
    loading/torch_dataset.py
    inference/opening/as_its_makers.py
    inference/opening/identity.py inference/opening/job.py inference/opening/net.py
    inference/opening/seam_error.py inference/opening/seams.py
    models/probes.py models/probe_windows.py
    inference/lanes/bricks.py
    inference/lanes/lane.py
    inference/lanes/transfers.py inference/lanes/values.py
    inference/stages/pipeline.py
    inference/stages/reading.py inference/stages/run.py inference/stages/statistics.py
    inference/stages/watch.py inference/stages/writing.py inference/sharing/steps.py
    inference/repair.py inference/run.py
    training/checkpoint.py training/detecting.py
    training/fabric_plugins.py training/feed.py
    training/loop.py training/predict.py training/profiling.py
    training/ranks.py training/results.py training/run_folder.py
    training/step.py
    training/workloads/detector_workload.py training/workloads/emulator_workload.py
    training/workloads/objectives.py training/workloads/pairs.py training/workloads/spiral.py
    bench/scenarios/infer_scenario.py bench/scenarios/model.py
    """.split()
)
"""Rooms that import heavy libraries as they are imported themselves; all others are pure."""


@cache
def architecture() -> str:
    return (ROOT / "ARCHITECTURE.md").read_text()


@cache
def ranks() -> dict[str, int]:
    """Each wing's place in the order of imports; wings of one place do not know each other."""
    line = re.search(r"^base < .*$", architecture(), re.MULTILINE)
    assert line
    steps = [step.split(", ") for step in line.group().split(" < ")]
    return {wing: rank for rank, step in enumerate(steps) for wing in step}


def pure_rooms() -> tuple[str, ...]:
    return tuple(file for file in files() if file not in HEAVY_ROOMS)


@cache
def tree(file: str) -> ast.Module:
    """A file of the package, parsed."""
    return ast.parse((PACKAGE / file).read_text())


Node = TypeVar("Node", bound=ast.AST)


@cache
def _sorted(file: str) -> dict[type[ast.AST], list[ast.AST]]:
    """All nodes of that tree by their kinds: to walk it takes as long as to parse it."""
    return by_kind(tree(file))


def by_kind(root: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
    """All nodes of a tree by their kinds, but for those that hold nothing, such as ``pass``."""
    kinds: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    waiting = [root]
    for node in waiting:
        kinds[kind := type(node)].append(node)
        if kind in (ast.Name, ast.Constant):  # half of all, and nothing is in them
            continue
        for value in node.__dict__.values():
            if isinstance(value, list):
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                waiting.append(value)
    return kinds


def nodes(file: str, *kinds: type[Node]) -> Iterator[Node]:
    """The nodes of these kinds in a file of the package."""
    for kind in kinds:
        yield from _sorted(file).get(kind, ())  # type: ignore[misc]


@cache
def _beside(path: Path) -> dict[type[ast.AST], list[ast.AST]]:
    return by_kind(ast.parse(path.read_text()))


def nodes_beside(*folders: str, kinds: Sequence[type[Node]]) -> Iterator[tuple[str, Node]]:
    """Such nodes of the files in folders beside the package, as ``tests``, with their files."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for kind in kinds:
                for node in _beside(path).get(kind, ()):
                    yield str(path.relative_to(ROOT)), node  # type: ignore[misc]


def forget() -> None:
    """The trees are let go."""
    for kept in (tree, _sorted, _beside):
        kept.cache_clear()


@cache
def files() -> tuple[str, ...]:
    """Every file with code of its own: no doors, and no folder's docstring."""
    paths = (path for path in PACKAGE.rglob("*.py"))
    named = (str(path.relative_to(PACKAGE)) for path in paths if not _is_only_text(path))
    return tuple(sorted(set(named) - {*FACE}))


def _is_only_text(path: Path) -> bool:
    return path.name == "__init__.py" and (
        path.with_suffix(".pyi").exists()
        or all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body)
    )


def module_of(file: str) -> str:
    return ".".join(("penstock", *Path(file).with_suffix("").parts)).removesuffix(".__init__")


@cache
def file_of() -> dict[str, str]:
    """The file of each module."""
    return {module_of(file): file for file in files()}


@cache
def doors() -> dict[str, dict[str, str]]:
    """For each wing, the names that it hands out and the file that each is defined in."""
    homes: dict[str, dict[str, str]] = {}
    for stub in sorted(PACKAGE.glob("*/__init__.pyi")):
        names = homes[stub.parent.name] = {}
        for node in ast.parse(stub.read_text()).body:
            assert isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
            place = f"{stub.parent.name}/{node.module.replace('.', '/')}"
            file = f"{place}.py" if (PACKAGE / f"{place}.py").exists() else f"{place}/__init__.py"
            for alias in node.names:
                assert alias.asname == alias.name
                assert alias.name not in names, f"{stub.parent.name} hands out {alias.name} twice"
                names[alias.name] = file
    return homes


class Import(NamedTuple):
    """What one name of an import statement asks for."""

    base: str
    """The module or package it is imported from."""
    name: str
    line: int


@cache
def imports_of(file: str) -> tuple[Import, ...]:
    """Every import of this package, at any depth of a file's code."""
    package = module_of(file).split(".")
    if not file.endswith("__init__.py"):
        package = package[:-1]
    return tuple(imports_in(nodes(file, ast.Import, ast.ImportFrom), package))


def imports_in(nodes: Iterable[ast.AST], package: Sequence[str]) -> Iterator[Import]:
    """Imports of Penstock in code of a package, relative and absolute ones."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                base, _, name = alias.name.rpartition(".")
                if "penstock" in (base.split(".")[0], alias.name):
                    yield Import(base or "penstock", name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module.split(".")[0] == "penstock":
                yield from (Import(module, alias.name, node.lineno) for alias in node.names)


@cache
def targets_of(file: str) -> tuple[str, ...]:
    """The files that a file imports, each as often as it does."""
    return tuple(_targets_of(file))


def _targets_of(file: str) -> Iterator[str]:
    """The files that a file imports, what comes through a door by the room behind it."""
    for base, name, line in imports_of(file):
        wing = base.removeprefix("penstock.")
        if base == "penstock":
            assert name == "__version__", f"{file}:{line}"
        elif wing in doors() and name in doors()[wing]:
            yield doors()[wing][name]
        else:
            target = file_of().get(f"{base}.{name}") or file_of().get(base)
            assert target, f"{file}:{line} imports {name} of {base}, which is no room"
            yield target
