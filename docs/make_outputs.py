"""What the commands of the tutorials print, and the pictures that they make, put into the pages.

    python docs/make_outputs.py                 all tutorials
    python docs/make_outputs.py docs/tutorials/1-a-volume.md
    python docs/make_outputs.py --pictures PAGE     the pictures; what is printed stays as it was

Each page runs in an empty folder of its own, from its first block to its last. A block of output
stands below a mark, and so does a picture:

    <!-- output -->                   what the block above printed
    <!-- output, first 12 lines -->   the beginning of it
    <!-- output, last 12 lines -->    the end of it
    <!-- picture logs/bench.png -->   a file that the page's commands have made
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TUTORIALS = sorted((HERE / "tutorials").glob("[0-9]*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(
    r"(?P<mark><!-- output(?:, (?P<end>first|last) (?P<most>\d+) lines)? -->\n)"
    r"```text\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PICTURE = re.compile(r"<!-- picture (?P<file>\S+) -->\n!\[[^\]]*\]\((?P<place>[^)]+)\)")


class Step(NamedTuple):
    """A block of a page that runs, and what it did."""

    text: str
    exit_code: int
    printed: str
    """Standard output, with the folder of the page as ``.``."""
    error: str


def environment_in(folder: Path) -> dict[str, str]:
    """The variables of a shell that finds this checkout's ``penstock``."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    modules = {"penstock": "-m penstock", "torchrun": "-m torch.distributed.run", "python": ""}
    for name, module in modules.items():
        tool = tools / name
        if tool.exists():  # a test has put its own there
            continue
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        tool.chmod(0o755)
    return os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(tools / "python"),
        "PYTHONPATH": str(HERE.parent / "src"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": "100",
    }


def run(page: str, folder: Path, prepare: Callable[[str], str] = str) -> Iterator[Step]:
    """Run the blocks of a page in order.

    Args:
        page: Its text.
        folder: An empty folder.
        prepare: Takes a block of a shell, and returns what runs in place of it.

    Yields:
        Each block of a shell or of Python, once it has ended.
    """
    environment = environment_in(folder)
    here = folder / "here"
    here.mkdir()
    for language, text in FENCE.findall(page):
        if language == "sh":
            words = ["bash", "-e", "-c", prepare(text)]
        elif language == "python":
            words = ["python", "-c", text]
        else:
            if language == "yaml":  # a file by the name in its first line
                (here / text.split()[1]).write_text(text)
            continue
        done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True)
        printed = done.stdout.replace(f"{here}/", "").replace(str(here), ".")
        yield Step(text, done.returncode, printed, done.stderr)


def filled(page: str, steps: list[Step]) -> str:
    """A page with what its blocks printed.

    Args:
        page: Its text.
        steps: Its blocks in order, as they ran.

    Returns:
        The page.
    """
    ends = [fence.end() for fence in FENCE.finditer(page) if fence[1] in ("sh", "python")]

    def output(match: re.Match[str]) -> str:
        above = sum(end <= match.start() for end in ends)
        lines = steps[above - 1].printed.strip("\n").splitlines()
        most = int(match["most"] or len(lines))
        if len(lines) > most:
            lines = ["...", *lines[-most:]] if match["end"] == "last" else [*lines[:most], "..."]
        shown = "\n".join(line.rstrip() for line in lines)
        return f"{match['mark']}```text\n{shown}\n```"

    return OUTPUT.sub(output, page)


def main() -> int:
    words = sys.argv[1:]
    pages = [Path(word).resolve() for word in words if word != "--pictures"] or TUTORIALS
    for path in pages:
        page = path.read_text()
        with tempfile.TemporaryDirectory() as name:
            steps = []
            for step in run(page, Path(name)):
                steps.append(step)
                if step.exit_code:
                    print(f"{path.name}: exit {step.exit_code}\n{step.text}{step.error[-3000:]}")
                    return 1
            for match in PICTURE.finditer(page):
                place = path.parent / match["place"]
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(Path(name, "here", match["file"]), place)
        if "--pictures" not in words:
            path.write_text(filled(page, steps))
        print(f"{path.name}: {len(steps)} blocks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
