"""Tests of charts: the SVG is well-formed for all titles and numbers."""

import math
from xml.etree import ElementTree

import pytest

from runs.tools.base import ToolFailure
from runs.tools.builtin.draw_chart import HEIGHT, WIDTH, axis_ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def draw(call, storage):
    def drawn(title, series):
        result = call("draw_chart", {"title": title, "series": series})
        assert result.urls[0].endswith("/chart.svg")
        (file,) = storage.rglob("chart.svg")
        return ElementTree.fromstring(file.read_bytes())

    return drawn


def bars(chart):
    return [mark for mark in chart.iter(f"{SVG}rect") if mark.find(f"{SVG}title") is not None]


def test_few_values_are_drawn_as_proportional_bars(draw):
    first, second, negative = bars(draw("Sales", [10, 20, -20]))
    assert float(second.get("height")) == pytest.approx(2 * float(first.get("height")), abs=0.05)
    assert float(negative.get("height")) == pytest.approx(float(second.get("height")), abs=0.05)
    # Positive and negative bars start at the same line.
    zero = float(first.get("y")) + float(first.get("height"))
    assert float(negative.get("y")) == pytest.approx(zero, abs=0.05)


def test_many_values_are_as_many_bars(draw):
    assert len(bars(draw("Load", [math.sin(n) for n in range(1000)]))) == 1000


@pytest.mark.parametrize(
    "series",
    [
        [0],
        [5],
        [-5],
        [0, 0, 0],
        [3, 3, 3],
        [1e15, -1e15],
        [5e-324],
        [1e-15] * 100,
        [1e15, 1e15 - 0.25] * 50,
        [0.1, 0.2, 0.3],
        [1] * 24,
        [1] * 25,
        list(range(1000)),
        [10**15, 1],
    ],
)
def test_every_mark_is_inside_the_picture(draw, series):
    chart = draw("t", series)
    for element in chart.iter():
        for name in ("x", "x1", "x2", "y", "y1", "y2"):
            if element.get(name) is not None:
                assert 0 <= float(element.get(name)) <= (WIDTH if name[0] == "x" else HEIGHT)


@pytest.mark.parametrize(
    "title",
    [
        "</title><script>alert(1)</script>",
        '" onload="alert(1)',
        "' onload='alert(1)",
        "]]><script/>",
        "&lt;script&gt; &amp; &xxe;",
        "<!--",
        "\x01\x1b\x7f\ufffe text",
    ],
)
def test_title_is_escaped(draw, title):
    chart = draw(title, [1, 2])
    assert {element.tag for element in chart.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "title", "rect", "text", "line")
    }
    assert not any(name.lower().startswith("on") for element in chart.iter() for name in element.attrib)
    kept = "".join(character for character in title if character not in "\x01\x1b\ufffe").strip()
    assert chart.find(f"{SVG}title").text == kept


def test_long_title_is_shortened_in_the_picture(draw):
    chart = draw("x" * 200, [1])
    assert chart.find(f"{SVG}title").text == "x" * 200
    assert chart.find(f"{SVG}text").text == "x" * 63 + "…"


@pytest.mark.parametrize(
    "series", ["[]", '["1"]', "[NaN]", "[1e999]", "[1e16]", "[true]", "[null]", str([1] * 1001), "7"]
)
def test_invalid_series_is_refused(call, series):
    with pytest.raises(ToolFailure) as failure:
        call("draw_chart", '{"title": "t", "series": ' + series + "}")
    assert failure.value.code == "INVALID_INPUT"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (3, 31, [0, 10, 20, 30, 40]),
        (-4, 31, [-10, 0, 10, 20, 30, 40]),
        (7, 7, [0, 2, 4, 6, 8]),
    ],
)
def test_the_axis_has_round_values(low, high, ticks):
    assert axis_ticks(low, high) == pytest.approx(ticks)
