"""The check of the facts table, against a WordNet of four synsets; the real sources are a developer's packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.pocket import check_facts
from research.pocket.check_facts import Sources, WordNet, plain

DATA = """  1 this line is the licence
00000001 05 n 01 mammal 0 000 | warm-blooded animal
00000002 05 n 02 dog 0 domestic_dog 0 001 @ 00000001 n 0000 | a tame wolf
00000003 18 n 01 composer 0 000 | someone who composes music
00000004 18 n 02 Bach 0 Johann_Sebastian_Bach 0 001 @i 00000003 n 0000 | German baroque organist (1685-1750)
00000005 15 n 01 state_capital 0 000 | the capital city of a state
00000006 15 n 01 Juneau 0 001 @i 00000005 n 0000 | the state capital of Alaska
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.noun").write_text(DATA, encoding="latin-1")
    return tmp_path


@pytest.mark.parametrize(
    ("relation", "entity", "answer", "holds"),
    [
        ("class", "dog", "mammal", True),
        ("class", "dog", "bird", False),
        ("example", "mammal", "dog", True),
        ("profession", "Johann Sebastian Bach", "composer", True),
        ("person", "composer", "Johann Sebastian Bach", True),
        ("nationality", "Johann Sebastian Bach", "German", True),
        ("nationality", "Johann Sebastian Bach", "French", False),
        ("state_capital", "Alaska", "Juneau", True),
        ("state_capital", "Texas", "Juneau", False),
        ("birth_place", "Bach", "Eisenach", False),
    ],
)
def test_what_wordnet_says(folder: Path, relation: str, entity: str, answer: str, holds: bool) -> None:
    assert Sources(folder).holds(relation, entity, answer) is holds


def test_hypernyms_are_followed(folder: Path) -> None:
    net = WordNet(folder)
    assert net.is_a("Domestic Dog", "mammal")
    assert not net.is_a("mammal", "dog")


def test_the_command_fails_on_an_answer_its_source_does_not_hold(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = folder / "facts.csv"
    rows = "class,dog,mammal,,WordNet\nclass,cat,mammal,,unverified\n"
    table.write_text(f"relation,entity,answers,pin,source\n{rows}", encoding="utf-8")
    options = ["--wordnet", str(folder), "--table", str(table)]
    assert check_facts.main(options) == 0
    assert "2 facts: 1 checked, 1 marked unverified, 0 answers not found" in capsys.readouterr().out
    table.write_text(f"relation,entity,answers,pin,source\n{rows}class,dog,fish,,WordNet\n", encoding="utf-8")
    assert check_facts.main(options) == 1
    assert "class(dog) = fish" in capsys.readouterr().err


def test_accents_go() -> None:
    assert plain("Reykjavík") == "Reykjavik"
