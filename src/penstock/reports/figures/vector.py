"""Figures as SVG that stands inside a page: light and dark, with text that can be read aloud.

A drawing of matplotlib names its colours. Here those of the house become variables of the page,
which has other values for them on a dark screen. Names within it get the number of the figure, for
a page has many figures and one space of names. Text stays text.
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
"""The page says which letters a figure has; names of fonts come from matplotlib alone."""
_PLACE = re.compile(r"url\(#([^)]*)\)")
_PNG = "data:image/png;base64,"


def inline_svg(figure: Figure, number: int, title: str, alt: str) -> str:
    """A figure as an element of a page.

    Args:
        figure: The figure. It is changed: its texts become `harmless`.
        number: Its number on the page.
        title: Its name, for readers who do not see it.
        alt: What it shows, for the same.

    Returns:
        The text of an ``svg`` element, which asks for nothing outside of it.
    """
    matplotlib = require("matplotlib", "plot")
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        harmless(figure)
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=none, facecolor="white")
    # What it parses matplotlib has just written: no document type of others, no entities.
    root = ElementTree.fromstring(for_terminal(text.getvalue()))
    _rename(root, f"f{number}-")
    for element in root.iter():
        for child in element.findall(f"{{{_SVG}}}style"):  # it would hold for the whole page
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
    """The link of an image, of one channel where its four say no more: a third to half as long."""
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
    """Give what is referred to a name of this figure alone, and take all other names away."""
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
