"""Inline matplotlib's SVG into an HTML page: text as text, styles as classes, colours for light and dark pages.

The content security policy of the page forbids `style` attributes, so each distinct style becomes one class of one
style sheet for all pictures of the page.
"""

from __future__ import annotations

import colorsys
import io
import re
from typing import Any
from xml.etree import ElementTree as ET

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"(?:url\(#|^#)([^)]+)\)?")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PAPER = "#ffffff"
_LIGHT, _GREY = 0.74, 0.12  # lightness from which a colour is a background, saturation up to which it is a grey
_VISIBLE = 0.58  # least lightness on a dark page


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
        met = sorted({color for style in self._classes for color in _COLOR.findall(style)} - {_PAPER})
        return "\n".join(f"--{_variable(color)}:{in_the_dark(color) if dark else color};" for color in met)


def _variable(color: str) -> str:
    return "card" if color == _PAPER else f"c{color[1:]}"  # white becomes the background of the card


def write(figure: Any) -> str:
    """Return a matplotlib figure as an SVG document with text elements instead of outlines."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    text = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    with mpl.rc_context({"svg.fonttype": "none"}):
        canvas.print_svg(text, metadata={"Date": None})
    return text.getvalue()


def inline(svg: str, prefix: str, sheet: StyleSheet) -> str:
    """Return the `<svg>` element of matplotlib's document `svg`, without a size, with ids that begin with `prefix`."""
    root = ET.fromstring(_NOT_XML.sub("\ufffd", svg))  # noqa: S314 - matplotlib wrote it
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    used = {name for element in root.iter() for value in element.attrib.values() for name in _REFERENCE.findall(value)}
    for element in root.iter():
        _rewrite(element, prefix, used, sheet)
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib["viewBox"] = view
    return ET.tostring(root, encoding="unicode")


def _rewrite(element: ET.Element, prefix: str, used: set[str], sheet: StyleSheet) -> None:
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
        elif name == "transform" and value.startswith("rotate(-0 "):
            continue
        elif name in ("href", "clip-path"):
            element.attrib[name] = value.replace("#", f"#{prefix}")
        else:
            text = _NUMBER.sub(lambda number: f"{float(number[0]):.2f}", value)
            element.attrib[name] = " ".join(text.split()) if name == "d" else text
    if element.tag != "text":
        element.text = None
    element.tail = None


def _style(value: str, prefix: str) -> str:
    """Normalise a style attribute: no spaces, and no font, so that the page's applies."""
    parts = [part.split(":", 1) for part in value.split(";") if part.strip()]
    kept = [(name.strip(), text.strip()) for name, text in parts if name.strip() != "font-family"]
    return ";".join(f"{name}:{text}" for name, text in kept).replace("url(#", f"url(#{prefix}")


def in_the_dark(color: str) -> str:
    """Return `color` for a dark page: greys inverted, backgrounds darkened, hues lightened to stay visible."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    spread = max(red, green, blue) - min(red, green, blue)
    if spread <= _GREY:
        light = 0.09 + 0.85 * (1 - light)
    elif light > _LIGHT:
        light, saturation = 0.12 + 0.6 * (1 - light), min(saturation, 0.6)
    else:
        saturation = min(saturation, 0.75) if light < _VISIBLE else saturation
        light = _VISIBLE + (_LIGHT - _VISIBLE) * light / _LIGHT  # keeps shades of one hue apart
    turned = colorsys.hls_to_rgb(hue, light, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in turned)
