"""Four facts about 119 countries as files for `semgrad-guard calibrate --by sentence`, and the grades of its sheet.

    python benchmarks/country_sheet.py FOLDER                     # countries.jsonl and shown.jsonl
    python benchmarks/country_sheet.py FOLDER --grade sheet.csv   # fills in the column `correct`

The facts and the rule are those of `country_answers.py`: a program takes the place of the people who grade.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from country_answers import QUESTION, SHOWN, countries, is_right, sentences_about, table


def write_questions(folder: Path) -> None:
    """The questions with true sentences as references, and the two examples that go before each."""
    known = table()
    for name, about in (("countries", countries(known)), ("shown", SHOWN)):
        rows = (
            {"question": QUESTION.format(country=one), "answers": [" ".join(sentences_about(one, known[one]))]}
            for one in about
        )
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def grade(sheet: Path) -> int:
    """Grade every sentence of the sheet by the table; returns how many."""
    known = table()
    country = {QUESTION.format(country=one): one for one in countries(known)}
    with sheet.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["correct"] = "yes" if is_right(row["answer"], country[row["question"]], "recalled", known) else "no"
    with sheet.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--grade", type=Path)
    given = parser.parse_args()
    if given.grade is None:
        given.folder.mkdir(parents=True, exist_ok=True)
        write_questions(given.folder)
    else:
        print(f"{grade(given.folder / given.grade)} sentences are graded.")


if __name__ == "__main__":
    main()
