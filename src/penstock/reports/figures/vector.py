"""Figures as inline SVG: light and dark, with text that a screen reader can read.

matplotlib writes fixed colours. Here the colours of the palette become CSS variables, which have
other values on a dark screen. Ids in a figure get its number, because all figures of a page share
one namespace. Text stays text.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from ...base import for_terminal, require
from .canvas import STYLE, Figure, harmless

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_VARIABLES = {
    STYLE["ink"]: "ink",
    "#000000": "ink",
    STYLE["faint"]: "faint",
    STYLE["grid"]: "grid",
    "#ffffff": "paper",
    "#f4f4f4": "grid",
    "#dddddd": "grid",
    "#c4c4c4": "bar",
    "#b5b5b5": "bar",
    "#4d4d4d": "deep",
    "#999999": "middle",
    "#d0d0d0": "pale",
    STYLE["limit"]: "limit",
    **{colour: f"c{place}" for place, colour in enumerate(STYLE["colours"])},
}
_COLOURS = {colour.lower(): f"var(--{name}, {colour})" for colour, name in _VARIABLES.items()}
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
"""Font names of matplotlib. They are removed, so that the font of the page is used."""
_PLACE = re.compile(r"url\(#([^)]*)\)")
_PNG = "data:image/png;base64,"


def inline_svg(figure: Figure, number: int, title: str, alt: str) -> str:
    """A figure as an element of a page.

    Args:
        figure: The figure. It is changed: its texts become `harmless`.
        number: Its number on the page.
        title: Its name, for screen readers.
        alt: What it shows, for screen readers.

    Returns:
        The text of an ``svg`` element that loads nothing.
    """
    matplotlib = require("matplotlib", "plot")
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        harmless(figure)
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=none, facecolor="white")
    # Safe to parse: matplotlib has just written it, so it has no foreign DTD or entities.
    root = ElementTree.fromstring(for_terminal(text.getvalue()))
    _rename(root, f"f{number}-")
    for element in root.iter():
        for child in element.findall(f"{{{_SVG}}}style"):  # it would apply to the page
            element.remove(child)
        if style := element.get("style"):
            element.set("style", _FAMILY.sub("", _COLOUR.sub(_themed, style)))
        if element.get("href", "").startswith(_PNG):
            element.set("href", _in_greys(element.attrib["href"]))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"f{number}-title f{number}-alt")
    for place, (name, words) in enumerate((("title", title), ("alt", alt))):
        child = ElementTree.Element(f"{{{_SVG}}}{'title' if name == 'title' else 'desc'}")
        child.set("id", f"f{number}-{name}")
        child.text = words
        root.insert(place, child)
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _in_greys(link: str) -> str:
    """Shrink the data URL of a grey image to one channel instead of four: a third to half as
    long."""
    image = require("PIL.Image", "plot").open(io.BytesIO(base64.b64decode(link[len(_PNG) :])))
    greys = image.convert("L")
    if greys.convert(image.mode).tobytes() != image.tobytes():
        return link
    file = io.BytesIO()
    greys.save(file, "PNG", optimize=True)
    return _PNG + base64.b64encode(file.getvalue()).decode()


def _themed(match: re.Match[str]) -> str:
    return _COLOURS.get(match.group().lower(), match.group())


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Make the ids that are referred to unique on the page, and remove all other ids."""
    used = set(_references(root))
    for element in root.iter():
        if (name := element.get("id")) is not None:
            if name in used:
                element.set("id", prefix + name)
            else:
                del element.attrib["id"]
        for attribute, value in list(element.attrib.items()):
            if attribute == f"{{{_LINK}}}href":
                del element.attrib[attribute]
                element.set("href", f"#{prefix}{value[1:]}" if value.startswith("#") else value)
            elif "url(#" in value:
                element.set(attribute, _PLACE.sub(rf"url(#{prefix}\1)", value))


def _references(root: ElementTree.Element) -> Iterator[str]:
    for element in root.iter():
        for attribute, value in element.attrib.items():
            if attribute == f"{{{_LINK}}}href":
                yield value.removeprefix("#")
            yield from _PLACE.findall(value)
