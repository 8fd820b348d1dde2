"""Pictures of runs side by side: those in the folders, and the figures of the reports."""

from __future__ import annotations

import base64
import contextlib
import html
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..base import MissingDependency, UsageError, group_by
from ..reports import PlaceKind, RecordPlace, inline_svg, reports_of_places, shown
from .compare import Selected
from .listed_run import label
from .markup import rendered

MOST_PICTURES = 24
"""Most pictures of a run that are shown."""
_MOST_BYTES = 4 * 2**20
_DEPTH = 3
_KINDS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}
"""The first bytes of the types of files that are shown. An SVG may hold a script, so it is not
shown."""
_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif")

_PICTURES = """\
{% for name, pictures in groups %}<h2>{{ name }}</h2><div class="beside">
{% for each in pictures %}<figure>{{ each.markup | safe }}
<figcaption>{{ each.run }}</figcaption></figure>{% endfor %}</div>{% endfor %}
"""


class ShownPicture(NamedTuple):
    """A picture of a run."""

    name: str
    """Name of the picture. Pictures of several runs with the same name are shown side by side."""
    run: str
    markup: str
    """HTML element that loads nothing."""


def pictures_of(selected: Sequence[Selected]) -> list[ShownPicture]:
    """The pictures of runs, those of one name together.

    Args:
        selected: The runs.

    Returns:
        The pictures, in the order of the runs.
    """
    pictures = [
        picture
        for number, each in enumerate(selected)
        for picture in [*_files(each), *_figures(each, number)][:MOST_PICTURES]
    ]
    names = list(dict.fromkeys(picture.name for picture in pictures))
    return sorted(pictures, key=lambda picture: names.index(picture.name))


def _files(each: Selected) -> Iterator[ShownPicture]:
    folder = each.details.folder
    if folder is None or not folder.is_dir():
        return
    for path in _images(folder):
        with contextlib.suppress(OSError):
            if path.stat().st_size > _MOST_BYTES:
                continue
            data = path.read_bytes()
            kind = next((kind for head, kind in _KINDS.items() if data.startswith(head)), None)
            if kind is None:
                continue
            name = label(path.relative_to(folder))
            alt = html.escape(f"{name} of {each.name}")
            source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
            yield ShownPicture(name, each.name, f'<img alt="{alt}" src="{source}">')


def _images(folder: Path) -> Iterator[Path]:
    """Picture files in a folder and just below it. Links out of the folder are not followed."""
    for at, folders, names in os.walk(folder):
        path = Path(at)
        if len(path.relative_to(folder).parts) >= _DEPTH:
            folders.clear()
        folders.sort()
        files = (path / name for name in sorted(names) if name.lower().endswith(_SUFFIXES))
        yield from (file for file in files if file.is_file() and not file.is_symlink())


def _figures(each: Selected, number: int) -> Iterator[ShownPicture]:
    """The figures of the run's report."""
    folder = each.details.folder
    if folder is None or each.run.kind not in ("training", "inference"):
        return
    kind: PlaceKind = "training" if each.run.kind == "training" else "inference"
    with contextlib.suppress(UsageError, MissingDependency):
        (report,) = reports_of_places([RecordPlace(kind, folder)])
        drawn = [picture for chapter in report.chapters for picture in chapter.pictures]
        for place, picture in enumerate(drawn[:MOST_PICTURES]):
            title = shown(f"{picture.caption} {each.name}")
            svg = inline_svg(picture.draw(), 1000 * number + place, title, shown(picture.alt))
            yield ShownPicture(label(picture.caption), each.name, svg)


def side_by_side(pictures: Sequence[ShownPicture]) -> str:
    """Pictures of one name in a row, each with the name of its run."""
    groups = group_by(pictures, lambda picture: picture.name)
    return rendered(_PICTURES, groups=list(groups.items()))
