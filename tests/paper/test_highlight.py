"""Shades and marks: ordered, escaped, and the text unchanged."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.paper.drawing import highlighted_html, shades


def test_shades_are_even_in_the_logarithm() -> None:
    assert shades([1e-6, 1e-4, 1e-2]) == pytest.approx([0.0, 0.5, 1.0])
    assert shades([0.3]) == [0.0]
    assert shades([2.0, 2.0, None]) == [0.0, 0.0, None]
    assert shades([None, float("nan")]) == [None, None]
    assert shades([]) == []
    assert shades([0.0, 1.0]) == [0.0, 1.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_more_uncertain_is_never_lighter(values: list[float]) -> None:
    found = shades(values)
    assert all(0 <= shade <= 1 for shade in found if shade is not None)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [found[i] for i in order] == sorted(found[i] or 0.0 for i in order)


def test_the_page_holds_the_text_unchanged_and_escaped() -> None:
    claims = [('1 < 2 & "x".  \n', 0.1), ("<script>é</script>", None), (" So.", 0.3)]
    page = highlighted_html(claims)
    assert "<script>" not in page
    plain = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert plain == "".join(text for text, _ in claims)


def test_marks_tell_their_number_and_grow() -> None:
    page = highlighted_html([("Sure. ", 1e-5), ("Hardly.", 0.25), ("?", None)])
    tags: list[tuple[str, dict[str, str | None]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append((tag, dict(attrs)))

    Reader().feed(page)
    assert [tag for tag, _ in tags] == ["p", "mark", "mark", "span"]
    assert tags[1][1]["title"] == "uncertainty 1e-05"
    assert "1px" in (tags[1][1]["style"] or "")
    assert "4px" in (tags[2][1]["style"] or "")
    assert tags[3][1]["title"] == "no score"
