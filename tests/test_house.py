"""The package is held to its own rules: order of imports, purity, public names, start-up."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "penstock"
HEAVY = ("torch", "tensorstore", "zarr", "dask", "pandas", "matplotlib", "tifffile")


def rooms() -> dict[str, bool]:
    """Modules in the order of ARCHITECTURE.md, and whether each is pure."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    house = text.split("<!-- house -->")[1]
    lines = re.findall(r"^(\w+)(?:\.py|/)\s+(pure)?", house, re.MULTILINE)
    return {name: bool(pure) for name, pure in lines}


def imports_of(path: Path) -> set[str]:
    """First-level modules of this package that a file imports, at any depth of its code."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.partition(".")[0] for name in names}
    return found


def test_the_plan_of_the_house_lists_every_room() -> None:
    standing = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    standing |= {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(rooms()) == standing


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("**/*.py")), ids=lambda p: p.name)
def test_a_module_imports_only_modules_above_it(path: Path) -> None:
    order = list(rooms())
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room.startswith("__"):
        return
    above = set(order[: order.index(room)])
    if room == "store":  # opening by name is the one place that knows the family below it
        above.add("stores")
    assert imports_of(path) - {room, "__version__"} <= above


def test_pure_modules_import_with_heavy_libraries_blocked() -> None:
    """In one interpreter, which forgets the package before each: none finds what another loaded."""
    code = (
        "import sys, traceback; from importlib import import_module\n"
        f"blocked, failed = dict.fromkeys({HEAVY}), {{}}\n"
        "for module in sys.argv[1:]:\n"
        "    for name in [m for m in sys.modules if m.partition('.')[0] == 'penstock']:\n"
        "        del sys.modules[name]\n"
        "    sys.modules.update(blocked)\n"
        "    try: import_module('penstock.' + module)\n"
        "    except Exception: failed[module] = traceback.format_exc()\n"
        "    assert all(sys.modules[name] is None for name in blocked), module\n"
        "for module, why in failed.items(): print(module, why)\n"
        "print('tried', len(sys.argv) - 1, 'failed', sorted(failed))"
    )
    pure = [name for name, pure in rooms().items() if pure]
    words = [sys.executable, "-c", code, *pure]
    done = subprocess.run(words, capture_output=True, text=True)
    told = done.stdout + done.stderr
    assert done.returncode == 0 and told.splitlines()[-1] == f"tried {len(pure)} failed []", told


def test_help_starts_without_anything_heavy() -> None:
    code = (
        "import sys; from penstock.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print(sorted({{*{HEAVY}, 'numpy', 'pydantic', 'rich'}} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_public_names_are_pinned() -> None:
    assert penstock.__all__ == [
        "Box", "Incomplete", "Loader", "PenstockError", "Plan", "Progress", "Refused", "StageError",
        "Summary", "UsageError", "open_sink", "open_source", "plan_inference", "run_inference",
        "run_training",
    ]  # fmt: skip
    for name in penstock.__all__:
        assert getattr(penstock, name).__doc__, f"{name} has no docstring"


def test_no_library_code_prints() -> None:
    for path in PACKAGE.glob("**/*.py"):
        if path.parent.name != "cli":
            calls = (
                n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)
            )
            assert "print" not in {c.id for c in calls if isinstance(c, ast.Name)}, path


def test_one_default_per_knob() -> None:
    """Functions below the config take what it holds; they do not repeat its defaults."""
    from penstock.config import InferConfig

    knobs = set(InferConfig.model_fields)
    for module in ("grid", "stitch", "normalize", "plan", "lane", "flow"):
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.FunctionDef):
                named = node.args.args[len(node.args.args) - len(node.args.defaults) :]
                assert not knobs & {arg.arg for arg in named}, f"{module}.{node.name}"
