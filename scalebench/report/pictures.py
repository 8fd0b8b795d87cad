"""Pictures of the page: SVG inlined with classes, and colours for light and dark pages.

The content security policy of the page forbids `style` attributes, so each distinct
style becomes one class of one style sheet for all pictures of the page.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from xml.etree import ElementTree as ET

from markupsafe import Markup

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"(?:url\(#|^#)([^)]+)\)?")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PAPER = "#ffffff"
_LIGHT, _GREY = (
    0.74,
    0.12,
)  # lightness from which a colour is a background, saturation up to which it is a grey
_VISIBLE = 0.58  # least lightness on a dark page


class Svg(NamedTuple):
    """A document of matplotlib, whose ids are to begin with `prefix` on the page."""

    document: str
    prefix: str


@dataclass(frozen=True)
class Picture:
    """One panel: title, text alternative with numbers, and picture, of which `inlined` makes an `<svg>` of the page."""

    title: str
    words: str
    svg: Svg | Markup


@dataclass(frozen=True)
class Drawing:
    """One figure, or the reason why it cannot be drawn (`absent`).

    `rows` holds the number of columns and the panels of each row, `keys` the text and
    picture of each legend entry.
    """

    name: str
    summary: str
    rows: Sequence[tuple[int, Sequence[Picture]]] = ()
    keys: Sequence[Sequence[tuple[str, Svg | Markup]]] = ()
    caption: str = ""
    absent: str = ""
    notes: tuple[str, ...] = ()  # of the results, once it is drawn


def inlined(drawing: Drawing, sheet: StyleSheet) -> Drawing:
    """Return `drawing` with pictures for the page, whose styles are those of `sheet`."""

    def on_page(svg: Svg | Markup) -> Markup:
        if isinstance(svg, Markup):
            return svg
        return Markup(inline(svg.document, svg.prefix, sheet))  # noqa: S704

    rows = []
    for count, pictures in drawing.rows:
        rows.append((count, [replace(one, svg=on_page(one.svg)) for one in pictures]))
    keys = [[(text, on_page(svg)) for text, svg in row] for row in drawing.keys]
    return replace(drawing, rows=rows, keys=keys)


class StyleSheet:
    """Classes for the styles of the pictures, and variables for their colours."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def class_of(self, style: str) -> str:
        """Return the class for `style`, adding one if it is new."""
        return self._classes.setdefault(style, f"s{len(self._classes)}")

    def rules(self) -> str:
        """Return the rules, such as `.s0{fill:var(--c222222)}`, one per line."""
        return "\n".join(
            f".{name}{{{_COLOR.sub(lambda color: f'var(--{_variable(color[0])})', style)}}}"
            for style, name in self._classes.items()
        )

    def colors(self, *, dark: bool) -> str:
        """Return the values of the variables for a light or a dark page."""
        met = sorted(
            {color for style in self._classes for color in _COLOR.findall(style)}
            - {_PAPER}
        )
        return "\n".join(
            f"--{_variable(color)}:{in_the_dark(color) if dark else color};"
            for color in met
        )


def _variable(color: str) -> str:
    # white becomes the background of the card
    return "card" if color == _PAPER else f"c{color[1:]}"


def inline(svg: str, prefix: str, sheet: StyleSheet) -> str:
    """Return the `<svg>` element of matplotlib's document `svg`, without a size, with ids that begin with `prefix`."""
    root = ET.fromstring(_NOT_XML.sub("\ufffd", svg))  # noqa: S314 - matplotlib wrote it
    for parent in list(root.iter()):
        for child in list(parent):
            # Metadata names the version of matplotlib; a style sheet would hold for the
            # whole page.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    # Ids that nothing refers to would only make the page longer.
    used = {
        name
        for element in root.iter()
        for value in element.attrib.values()
        for name in _REFERENCE.findall(value)
    }
    for element in root.iter():
        _rewrite(element, prefix, used, sheet)
    # Without a size a picture is as wide as its place on the page.
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib["viewBox"] = view
    return ET.tostring(root, encoding="unicode")


def _rewrite(
    element: ET.Element, prefix: str, used: set[str], sheet: StyleSheet
) -> None:
    element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
    old = dict(element.attrib)
    element.attrib.clear()
    for name, value in old.items():
        name = "href" if name == f"{{{_XLINK}}}href" else name
        if name == "id":
            if value in used:
                element.attrib["id"] = prefix + value
        elif name == "style":
            element.attrib["class"] = sheet.class_of(_style(value, prefix))
        elif name == "fill":  # background of a hatch
            element.attrib["class"] = sheet.class_of(f"fill:{value}")
        # matplotlib writes a rotation by nothing for each text.
        elif name == "transform" and value.startswith("rotate(-0 "):
            continue
        elif name in ("href", "clip-path"):
            element.attrib[name] = value.replace("#", f"#{prefix}")
        else:
            # A hundredth of a point is not seen, and pages are shorter.
            text = _NUMBER.sub(lambda number: f"{float(number[0]):.2f}", value)
            element.attrib[name] = " ".join(text.split()) if name == "d" else text
    # White space between elements, of which there are thousands.
    if element.tag != "text":
        element.text = None
    element.tail = None


def _style(value: str, prefix: str) -> str:
    """Normalise a style attribute: no spaces, and no font, so that the page's applies."""
    parts = [part.split(":", 1) for part in value.split(";") if part.strip()]
    kept = [
        (name.strip(), text.strip())
        for name, text in parts
        if name.strip() != "font-family"
    ]
    return ";".join(f"{name}:{text}" for name, text in kept).replace(
        "url(#", f"url(#{prefix}"
    )


def in_the_dark(color: str) -> str:
    """Return `color` for a dark page: greys inverted, backgrounds darkened, hues lightened to stay visible."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    spread = max(red, green, blue) - min(red, green, blue)
    if spread <= _GREY:
        light = 0.09 + 0.85 * (1 - light)
    elif light > _LIGHT:
        light = 0.12 + 0.6 * (1 - light)
        saturation = min(saturation, 0.6)
    else:
        saturation = min(saturation, 0.75) if light < _VISIBLE else saturation
        # keeps shades of one hue apart
        light = _VISIBLE + (_LIGHT - _VISIBLE) * light / _LIGHT
    turned = colorsys.hls_to_rgb(hue, light, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in turned)
