"""The page in a real Chromium: errors, requests, screen sizes, sorting, printing, dark colours."""

from __future__ import annotations

import io
import zlib

import pytest
from PIL import Image, ImageStat

WIDE = "[document.documentElement.scrollWidth, window.innerWidth]"


def test_browser_detects_script_errors_and_requests(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'\">"
        "<p style='color:red'>x<img src='https://example.invalid/x.png'>"
        "<script>console.error('said'); setTimeout(() => { throw new Error('thrown') });</script>"
    )
    browser.open(bad)
    told = " ".join(browser.complaints)
    assert "said" in told
    assert "exception" in told
    assert "violates" in told
    asks = tmp_path / "asks.html"
    asks.write_text(
        "<link rel=icon href='data:,'><img src='https://example.invalid/x.png'>"
    )
    browser.open(asks)
    assert "https://example.invalid/x.png" in browser.requests


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_loads_without_errors_or_requests(browser, page, dark):
    browser.look(1280, 900, dark=dark)
    browser.open(page)
    assert browser.complaints == []
    assert [
        address for address in browser.requests if not address.startswith("data:")
    ] == [page.as_uri()]


@pytest.mark.parametrize(
    "width",
    [
        390,
        1280,
        *(pytest.param(width, marks=pytest.mark.thorough) for width in (320, 768)),
    ],
)
def test_page_fits_screen_width(browser, page, width):
    browser.look(width, 844)
    browser.open(page)
    wide, screen = browser.evaluate(WIDE)
    assert wide <= screen == width
    smallest = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('.panel svg text')].map(t => t.getBoundingClientRect().height))"
    )
    assert smallest >= (8 if width >= 390 else 6.5), "letters in figures can be read"


def test_every_picture_is_visible(browser, page):
    browser.look(1280, 900)
    browser.open(page)
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg')].map(s => { const b = s.getBBox(); return [b.width, b.height] })"
    )
    assert len(boxes) > 50
    assert all(width > 0 for width, _ in boxes)
    broken = browser.evaluate(
        "[...document.querySelectorAll('svg use')].filter(u => !document.querySelector(u.getAttribute('href'))).length"
    )
    assert broken == 0
    outside = browser.evaluate(
        "[...document.querySelectorAll('.panel svg')].flatMap(s => { const a = s.getBoundingClientRect();"
        " return [...s.querySelectorAll('text')].filter(t => { const b = t.getBoundingClientRect();"
        " return b.left < a.left - 4 || b.right > a.right + 6 || b.top < a.top - 4 || b.bottom > a.bottom + 4 })"
        ".map(t => t.textContent) })"
    )
    assert outside == [], "no text leaves its picture"


ROWS = "[...document.querySelector('#table-cells tbody').rows].map(r => r.cells[{}].dataset.key)"


def test_table_sorts_by_click_and_keyboard(browser, page):
    browser.open(page)
    browser.evaluate("document.querySelectorAll('#table-cells th button')[5].click()")
    times = [float(key) for key in browser.evaluate(ROWS.format(5))]
    assert times == sorted(times)
    head = "document.querySelectorAll('#table-cells th')[5].getAttribute('aria-sort')"
    assert browser.evaluate(head) == "ascending"
    browser.evaluate("document.querySelectorAll('#table-cells th button')[5].focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            text="\r",
            windowsVirtualKeyCode=13,
        )
    times = [float(key) for key in browser.evaluate(ROWS.format(5))]
    assert times == sorted(times, reverse=True)
    assert browser.evaluate(head) == "descending"
    browser.evaluate("document.querySelectorAll('#table-cells th button')[0].click()")
    names = browser.evaluate(ROWS.format(0))
    assert names == sorted(names)
    assert browser.evaluate(head) is None
    assert browser.complaints == []


def test_missing_values_sort_last_in_both_directions(browser, page):
    browser.open(page)
    place = browser.evaluate(
        "[...document.querySelectorAll('#table-saved th')].findIndex(h => h.textContent === 'time saved')"
    )
    keys = f"[...document.querySelector('#table-saved tbody').rows].map(r => r.cells[{place}].dataset.key)"
    for _ in range(2):
        browser.evaluate(
            f"document.querySelectorAll('#table-saved th button')[{place}].click()"
        )
        found = browser.evaluate(keys)
        unknown = found.count("")
        assert unknown > 0
        assert found[-unknown:] == [""] * unknown


def test_page_is_complete_without_scripts(browser, page):
    browser.open(page, scripts=False)
    assert browser.complaints == []
    assert browser.evaluate("document.querySelectorAll('th button, .copy').length") == 0
    assert (
        browser.evaluate("document.querySelectorAll('#table-cells tbody tr').length")
        > 40
    )


def test_colour_scheme_follows_the_system(browser, page):
    shades = {}
    for dark in (False, True):
        browser.look(1280, 900, dark=dark)
        browser.open(page)
        (shades[dark],) = ImageStat.Stat(
            Image.open(io.BytesIO(browser.screenshot())).convert("L")
        ).mean
    assert shades[False] > 200
    assert shades[True] < 60


def test_print_uses_light_colours_and_unfolds_the_study(browser, page):
    browser.look(1280, 900, dark=True)
    browser.open(page)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert 4 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") <= 30
    assert browser.evaluate("document.querySelector('details.printed').open")
    streams = [
        part.partition(b"stream\n")[2].partition(b"\nendstream")[0]
        for part in pdf.split(b" obj")
    ]
    assert any(b"re\nf" in unpacked(stream) for stream in streams)


def test_print_has_no_controls(browser, page):
    shown = "getComputedStyle(document.querySelector('.script-only')).display"
    browser.open(page)
    browser.look(1280, 900)
    assert browser.evaluate(shown) == "inline"
    browser.look(1280, 900, media="print")
    assert browser.evaluate(shown) == "none"


def unpacked(stream: bytes) -> bytes:
    try:
        return zlib.decompress(stream)
    except zlib.error:
        return b""


def test_commands_are_copied_to_the_clipboard(browser, page):
    browser.open(page)
    browser.evaluate("document.querySelector('.copy').click()")
    said = browser.evaluate(
        "new Promise(done => setTimeout(() => done(document.querySelector('.copy').textContent), 200))"
    )
    assert said in ("Copied", "Selected")
    assert browser.complaints == []
