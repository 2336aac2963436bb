"""Every committed frame parses, every question has its answer in the passage, and broken frames are named."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from research.pocket.documents import attribute, event, record
from research.pocket.frames import bank, load, parse, sample
from research.pocket.reading import from_frames, passage
from research.pocket.values import KINDS

GOOD = "The {d:thing} opens at {t:time}. It is {c:[red|blue]}.\n? When does the {d} open? = {t}\n? Which color? = {c}"


def test_all_frames_are_valid() -> None:
    frames, bad = load(strict=True)
    assert len(frames) >= 600
    assert not bad


def test_the_held_out_tenth_shares_no_frame_with_training() -> None:
    training, held = bank()
    assert len(held) == pytest.approx(len(training) / 9, abs=2)
    assert not set(training) & set(held)


def test_answers_are_spans_of_the_passage() -> None:
    random = Random(0)
    for frame in bank()[0]:
        reading = sample(frame, random)
        assert all(answer in reading.passage for _, answer in reading.questions)
        assert not any("{" in question or "}" in question for question, _ in reading.questions)
    for maker in (record, event, attribute, from_frames, passage):
        for _ in range(60):
            reading = maker(random)
            assert all(answer and answer in reading.passage for _, answer in reading.questions)


def test_a_seed_fixes_a_passage() -> None:
    one, two = (passage(Random(5)) for _ in range(2))
    assert one == two
    assert one != passage(Random(6))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_slot_makes_varied_text(kind: str) -> None:
    random = Random(1)
    made = {KINDS[kind](random) for _ in range(200)}
    assert all(value.strip() == value and value for value in made)
    assert len(made) >= (7 if kind == "weekday" else 12)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (GOOD.replace("= {t}", "= {x}"), "not a slot"),
        (GOOD.replace("= {t}", "= noon"), "not a span"),
        (GOOD.replace(":time", ":clock"), "unknown slot"),
        (GOOD.replace(" = {t}", ""), "without an answer"),
        ("Only text, {d:thing}.", "without questions"),
    ],
)
def test_broken_frames_are_named(block: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(block, "file frame 1")
    (tmp_path / "bad.txt").write_text(f"{GOOD}\n\n{block}\n", encoding="utf-8")
    frames, bad = load(tmp_path)
    assert len(frames) == 1
    assert "bad.txt frame 2" in bad[0]
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, strict=True)
