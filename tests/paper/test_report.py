"""The report: valid HTML, complete, self-contained, safe against what names hold, and possible for any run."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import html5lib
import numpy as np
import pytest

from semgrad_guard import errors, metrics
from semgrad_guard.errors import InputError, MissingExtraError
from semgrad_guard.paper.report import write_report
from semgrad_guard.paper.results import STANDING, GradedRun, deviations
from semgrad_guard.paper.summary import standing, summarize
from tests.made_answers import example_run

METHODS = ("HybridGrad", "SemGrad", "ParaGrad", "SAR")
RUN = example_run(n=80, methods=METHODS)


def write(folder: Path, runs: Any = RUN, **options: Any) -> Path:
    return write_report(runs, folder, count=40, splits=3, **options)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    about = {"right means": "one sentence asserts a reference", "no verdict: counted as wrong": 3}
    first = replace(RUN, title="first", settings={**RUN.settings, "grader": "contains@3", **about})
    runs = [first, replace(example_run(n=80, methods=METHODS, seed=1), title="second")]
    return write(tmp_path_factory.mktemp("report") / "new" / "folder", runs)


def valid(path: Path) -> str:
    """The page's text; a parser that stops at the first fault in the HTML has read it."""
    html5lib.HTMLParser(strict=True).parse(path.read_bytes())
    return path.read_text()


def test_the_page_is_valid_and_asks_nothing_of_the_network(page: Path) -> None:
    text = valid(page)
    assert "How well the guard knows</h1>" in text
    outside = re.sub(r'\sxmlns(?::\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?://|<script|<link|<iframe|@import|\ssrc=", outside)
    assert set(re.findall(r"url\((.)", outside)) <= {"#"}


def test_ids_are_unique_and_links_lead_to_them(page: Path) -> None:
    text = page.read_text()
    ids = Counter(re.findall(r'\bid="([^"]+)"', text))
    assert ids.most_common(1)[0][1] == 1
    links = set(re.findall(r'href="#([^"]+)"', text))
    assert {"decide", "main", "promised", "table5_aurc", "run-1", "run-2", "settings"} <= links
    assert links <= set(ids)


def test_the_page_begins_with_what_a_reader_decides_by(page: Path) -> None:
    text = page.read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings[0].startswith("What to decide by")
    assert headings[1] == "AUROC"
    right = (
        "Right by contains@3 means: one sentence asserts a reference. 3 answers have no verdict, and count as wrong."
    )
    assert text.count(f"<p>{right}</p>") == 1
    assert len(re.findall('class="promise"', text)) == 6
    assert len(re.findall(r"<svg ", text)) == 2 * 3


def test_every_table_has_its_csv(page: Path) -> None:
    found = {path.stem for path in (page.parent / "tables").iterdir()}
    assert found == {
        "guaranteed_coverage_1", "guaranteed_coverage_2", "table1_auroc", "differences", "table5_aurc", "prr",
        "accuracy_at_coverage", "confidence", "table2_ablation", "table3_run_time", "table4_graders", "kinds",
    }  # fmt: skip
    rows = list(csv.reader((page.parent / "tables" / "table1_auroc.csv").open(encoding="utf-8")))
    shown = next(float(row[1]) for row in rows if row[0] == "HybridGrad")
    assert shown == pytest.approx(metrics.auroc(RUN.scores["HybridGrad"], RUN.correct))
    assert f">{100 * shown:.1f}</span>" in page.read_text()


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    nasty = "<script>alert('x')</script> & \"ö\" \N{SNOWMAN}\n\x00\x1b\ud800 $\\frac$ $x_1$"
    run = replace(
        RUN,
        title=nasty,
        model=nasty,
        data=nasty,
        scores={nasty: RUN.scores["SAR"], "HybridGrad": RUN.scores["HybridGrad"]},
        ablations={nasty: RUN.scores["SAR"]},
        other_graders={nasty: RUN.correct},
        milliseconds={nasty: [1.0] * 80},
        kinds=[nasty, "b"] * 40,
        settings={nasty: {nasty: nasty}},
    )
    text = valid(write(tmp_path, run))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


DEGENERATE: dict[str, GradedRun] = {
    "one question": example_run(n=1),
    "all right": replace(RUN, correct=[True] * 80, other_graders={"judge": [True] * 80}),
    "all wrong": replace(RUN, correct=[False] * 80),
    "no score": replace(example_run(n=6), scores={"HybridGrad": [None] * 6, "SAR": [None, 1, 1, 1, 1, 1]}),
    "nothing but scores": GradedRun("t", "m", "d", {"SAR": [0.1, 0.2, 0.3]}, [True, False, True]),
}


@pytest.mark.parametrize("run", DEGENERATE.values(), ids=DEGENERATE)
def test_any_run_can_be_reported(tmp_path: Path, run: GradedRun) -> None:
    text = valid(write(tmp_path, run))
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)


def test_the_same_runs_make_the_same_files(tmp_path: Path) -> None:
    run = example_run(n=8, methods=("HybridGrad",))
    one = write(tmp_path, run)
    before = one.read_bytes()
    assert write(tmp_path, run) == one
    assert one.read_bytes() == before
    assert sorted(path.name for path in one.parent.iterdir()) == ["report.html", "tables"]


def test_standing_goes_by_the_interval_of_the_difference() -> None:
    rng = np.random.default_rng(0)
    correct = rng.random(300) < 0.6
    scores = {
        "HybridGrad": rng.normal(~correct, 0.8).tolist(),
        "SAR": rng.normal(~correct, 0.2).tolist(),
        "Deg": rng.normal(0, 1.0, 300).tolist(),
    }
    scores["INSIDE"] = (np.array(scores["HybridGrad"]) + rng.normal(0, 0.05, 300)).tolist()
    run = GradedRun("t", "m", "d", scores, correct.tolist())
    found = standing(summarize(run, count=200, splits=2))
    assert (found.better, found.worse, found.undecided) == (["SAR"], ["Deg"], ["INSIDE"])
    assert standing(summarize(DEGENERATE["nothing but scores"], count=20, splits=2)) is None


def test_what_cannot_be_reported_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="two runs are called"):
        write(tmp_path / "a", [RUN, RUN])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Cannot make the folder"):
        write(tmp_path / "file" / "folder")
    real = importlib.util.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(MissingExtraError, match="eval"):
        write(tmp_path / "b")


def test_too_few_questions_for_a_promise_are_said(tmp_path: Path) -> None:
    cards = re.findall(r'class="rest">(.*?)</div>', write(tmp_path, example_run(n=80)).read_text(), re.DOTALL)
    assert [re.findall(r"takes (\d+) questions", card) for card in cards] == [["90"], [], []]


def test_deviations_are_those_of_the_run() -> None:
    plan = {"count": 10, "temperature": 1.0, "top_p": 1.0}
    settings = {
        "grader": "bem>=0.7",
        "prompt": "paper",
        "generation": {"temperature": 0.0},
        "estimators": {
            "semantic_entropy": {"name": "semantic_entropy", "title": "Semantic Entropy", "plan": plan,
                                 "equivalence": "nli:microsoft/deberta-xlarge-mnli"},
            "hybridgrad": {"name": "hybridgrad", "variant": "paper", "layers": None, "tau": 1.0, "beta": 1.0},
        },
    }  # fmt: skip
    assert deviations(settings) == list(STANDING)
    assert deviations({}) == list(STANDING)
    changed = {
        "grader": "exact-match",
        "prompt": "plain",
        "generation": {"temperature": 0.5},
        "estimators": {
            "semantic_entropy": {"name": "semantic_entropy", "title": "Semantic Entropy", "equivalence": "f1>0.5",
                                 "plan": {**plan, "count": 5}},
            "hybridgrad": {"name": "hybridgrad", "tau": 0.5},
            "p_true": {"name": "p_true", "title": "P(True)", "examples": []},
        },
    }  # fmt: skip
    found = deviations(changed)
    assert len(found) == 7 + len(STANDING)
    assert "Semantic Entropy: count is 5, and 10 in the paper." in found
    assert "hybridgrad: tau is 0.5, and 1.0 in the paper." in found


def run(**changes: Any) -> GradedRun:
    return replace(example_run(n=3), **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": {"SAR": [0.1, 0.2]}}, r"scores\['SAR'\] of example 0 has 2 entries and correct has 3"),
        ({"other_graders": {"judge": [True]}}, "has 1 entries"),
        ({"generation_ms": [1.0]}, "generation_ms of example 0 has 1 entries"),
        ({"ablations": {"l2 norm": []}}, "has 0 entries"),
        ({"scores": {}}, "needs one question and one method"),
        ({"correct": []}, "needs one question and one method"),
        ({"title": " "}, "needs a title"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        run(**changes)


def test_shares_and_run_times_are_of_the_questions_that_were_put_to_a_method() -> None:
    whole = example_run(n=60)
    rows = range(0, 60, 2)
    scores = {name: [value if i in rows else None for i, value in enumerate(s)] for name, s in whole.scores.items()}
    times = {
        name: [value if i in rows else None for i, value in enumerate(s)] for name, s in whole.milliseconds.items()
    }
    half = replace(
        whole,
        scores={k: v[::2] for k, v in whole.scores.items()},
        correct=whole.correct[::2],
        milliseconds={k: v[::2] for k, v in whole.milliseconds.items()},
        generation_ms=(), mean_entropy=(), kinds=(), other_graders={}, ablations={},
    )  # fmt: skip
    some = summarize(replace(whole, scores=scores, milliseconds=times), count=50, splits=5)
    alone = summarize(half, count=50, splits=5)
    assert some.unscored["G-NLL"] == 30
    for measure in ("auroc", "aurc", "prr", "accuracy at 0.9", "run time"):
        expected = {name: found.value for name, found in alone.measured[measure].items()}
        assert {name: found.value for name, found in some.measured[measure].items()} == pytest.approx(expected)
        assert None not in expected.values()
    for alpha, covered in some.guaranteed.items():
        for name, found in covered.items():
            assert found.coverage.tolist() == alone.guaranteed[alpha][name].coverage.tolist()
