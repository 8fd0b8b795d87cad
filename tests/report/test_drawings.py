"""Inlined SVG: unique ids, no inline styles, colours for light and dark pages."""

from __future__ import annotations

import colorsys
import re
from multiprocessing import get_context
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine, LayoutEngine

from scalebench.figures.drawing.series_style import _PLACED, TASKS, looks
from scalebench.report.drawings import SingleAxesLayout, write
from scalebench.report.page import Queue
from scalebench.report.pictures import StyleSheet, in_the_dark, inline

DARK_CARD = "#17191c"
COLORS = st.tuples(*(st.integers(0, 255),) * 3).map(
    lambda parts: "#{:02x}{:02x}{:02x}".format(*parts)
)


def picture(title: str = "time") -> str:
    figure = Figure(figsize=(2, 2))
    ax = figure.subplots()
    ax.plot([1, 2], [3, 4], marker="o", color="#0072b2")
    ax.bar([1], [2], hatch="//", facecolor="white", edgecolor="#999999")
    ax.set_title(title, parse_math=False)
    return write(figure)


def luminance(color: str) -> float:
    parts = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of the Web Content Accessibility Guidelines, 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_ids_of_two_pictures_differ_and_resolve():
    sheet = StyleSheet()
    page = inline(picture(), "one-", sheet) + inline(picture(), "two-", sheet)
    ids = re.findall(r'\bid="([^"]+)"', page)
    wanted = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page + sheet.rules()))
    assert len(ids) == len(set(ids)) > 4
    assert {one or other for one, other in wanted} == set(ids), (
        "exactly the referenced elements have ids"
    )


def test_styles_become_classes():
    sheet = StyleSheet()
    svg = inline(picture(), "", sheet)
    assert "style=" not in svg
    assert "<style" not in svg
    used = {
        name for names in re.findall(r'class="([^"]+)"', svg) for name in names.split()
    }
    assert used == set(re.findall(r"^\.(\w+)\{", sheet.rules(), flags=re.MULTILINE))
    assert "#0072b2" not in sheet.rules()
    assert "--c0072b2:#0072b2;" in sheet.colors(dark=False)
    assert "var(--c0072b2)" in sheet.rules()
    assert "font-family" not in sheet.rules(), "letters are the page's"


def test_equal_styles_share_one_class():
    sheet = StyleSheet()
    inline(picture(), "one-", sheet)
    rules = sheet.rules().replace("one-", "")
    inline(picture(), "two-", sheet)
    more = sheet.rules().count("\n") - rules.count("\n")
    assert more <= 1, "only the reference to a hatch has an id in it"


@pytest.mark.parametrize(
    "title",
    [
        "<script>alert(1)</script>",
        "a & b",
        "bell \x07 nul \x00",
        "$x^2$ {",
        "]]>",
        "été 時間",
    ],
)
@pytest.mark.filterwarnings("ignore:Glyph")
def test_hostile_titles_stay_text(title):
    svg = inline(picture(title), "", StyleSheet())
    assert "<script" not in svg
    assert not re.search(r"[\x00-\x08\x0e-\x1f]", svg)
    texts = [element.text for element in ET.fromstring(svg).iter("text")]
    assert texts[-1] == re.sub(r"[\x00\x07]", "\ufffd", title)


@given(COLORS)
def test_dark_scheme_keeps_contrast(color):
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    lightness = colorsys.rgb_to_hls(red, green, blue)[1]
    turned = in_the_dark(color)
    assert re.fullmatch(r"#[0-9a-f]{6}", turned)
    if lightness < 0.5:
        assert contrast(turned, DARK_CARD) > 2.4
    if lightness > 0.9:
        assert contrast(turned, DARK_CARD) < 2


@pytest.mark.parametrize(
    "names",
    [
        ["serial", "allreduce", "horovod", "ddp", "epoch_average", "epoch_async"],
        list(_PLACED[:12]),
        [f"local_sgd(steps={steps})" for steps in (4, 8, 16, 32)],
    ],
)
def test_strategy_colours_differ_in_dark_scheme(names):
    colors = [in_the_dark(look.color.lower()) for look in looks(names).values()]
    assert all(contrast(color, DARK_CARD) >= 3 for color in colors)
    assert len(set(colors)) == len(colors)


def test_text_has_contrast_in_dark_scheme():
    for color in ("#222222", "#444444", "#555555", "#666666"):
        assert contrast(in_the_dark(color), DARK_CARD) >= 4.5
    assert contrast(in_the_dark("#e4e4e4"), DARK_CARD) < 1.6, (
        "a grid stays in the background"
    )
    assert len({in_the_dark(color.lower()) for color in TASKS.values()}) == len(TASKS)


def test_svg_has_view_box_without_size():
    svg = inline(write(Figure(figsize=(2, 1))), "", StyleSheet())
    assert svg.startswith('<svg viewBox="0 0 144 72">')


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_layout_is_that_of_constrained_layout(scale):
    def places(layout: LayoutEngine) -> list[float]:
        figure = Figure(figsize=(3, 2), layout=layout)
        ax = figure.subplots()
        ax.plot([1, 64], [0.001, 20000])
        ax.set(xlabel="workers", ylabel="time (s)", xscale="log", yscale=scale)
        write(figure)
        return list(ax.get_position().extents)

    # A hundredth of an inch: the second pass of constrained layout moves labels a
    # little beyond the ends of axes.
    assert places(SingleAxesLayout()) == pytest.approx(
        places(ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03)), abs=0.01 / 2
    )


def test_each_figure_is_drawn_by_one_process():
    queue = Queue("abcde", get_context("fork").Array("i", 2))
    front, back = queue.forwards(), queue.backwards()
    assert [next(front), next(back), next(back), next(front)] == ["a", "e", "d", "b"]
    assert list(back) == ["c"]
    assert not list(front)
