"""The report: one HTML file without any outside request, and a CSV file for every table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from semgrad_guard.files import atomic_write
from semgrad_guard.paper import figures, published
from semgrad_guard.paper.drawing import inline_svg, require_drawable
from semgrad_guard.paper.guarantee import DELTA, SPLITS
from semgrad_guard.paper.results import GradedRun, require_distinct
from semgrad_guard.paper.summary import LEVEL, RESAMPLES, RunSummary, promises, standing, summarize
from semgrad_guard.paper.tables import all_tables, guaranteed_tables
from semgrad_guard.questions.data_files import make_folder, require_writable
from semgrad_guard.questions.run_record import flat

FILE = "report.html"
TABLES = "tables"
_TITLE = "How well the guard knows"
_GENERATOR = "semgrad-guard evaluate"
_UNSEEN = ("Cc", "Cs", "Cn")
_NARROW = 3
"""Up to so many columns leave room for intervals on the same line."""


@dataclass(frozen=True)
class Figure:
    """A drawing in the page, with its caption."""

    svg: Markup
    caption: str


def write_report(
    runs: GradedRun | Sequence[GradedRun],
    folder: str | Path,
    *,
    count: int = RESAMPLES,
    splits: int = SPLITS,
) -> Path:
    """Write `report.html` and `tables/*.csv` into a folder, which is made if it is not there.

    Args:
        runs: one graded run, or several with titles of their own (models x data sets).
        folder: where to.
        count: bootstrap resamples behind every interval.
        splits: random halves behind the coverage at a guaranteed error rate.

    Returns:
        The path of the HTML file.

    Raises:
        InputError: two runs of one title, or a folder that cannot be written.
        MissingExtraError: matplotlib is absent.
    """
    given = [runs] if isinstance(runs, GradedRun) else list(runs)
    require_distinct(given)
    make_folder(Path(folder) / TABLES)
    target = Path(folder) / FILE
    require_drawable(target.with_suffix(".svg"))
    require_writable(target)
    summaries = [summarize(run, count=count, splits=splits) for run in given]
    promised, tables = guaranteed_tables(summaries), all_tables(summaries)
    for table in (*promised, *tables):
        _write(target.parent / TABLES / f"{table.key}.csv", table.csv())
    environment = Environment(
        loader=PackageLoader("semgrad_guard", "paper"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [
        {
            "summary": summary,
            "id": f"run-{number}",
            "right": _right(summary.run.settings),
            "promises": promises(summary),
            "standing": standing(summary),
            "promised": table,
            "figures": _figures(summary, f"run{number}"),
            "settings": [
                (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
                for name, value in flat(summary.run.settings)
            ],
            "deviations": published.deviations(summary.run.settings),
        }
        for number, (summary, table) in enumerate(zip(summaries, promised, strict=True), start=1)
    ]
    page = environment.get_template("report.html.jinja").render(
        title=_TITLE,
        generator=_GENERATOR,
        sections=sections,
        main=tables[0],
        tables=tables[1:],
        narrow=_NARROW,
        ours=published.OURS,
        source=published.SOURCE,
        delta=DELTA,
        level=LEVEL,
        count=count,
        splits=splits,
        folder=TABLES,
    )
    return _write(target, page)


def _right(settings: Mapping[str, Any]) -> str:
    """What a right answer is by the run's grader, and how many answers had no verdict."""
    means, without = settings.get("right means"), settings.get("no verdict: counted as wrong")
    meaning = f"Right by {settings.get('grader')} means: {means}." if means else ""
    return f"{meaning} {without} answers have no verdict, and count as wrong." if without else meaning


def is_report(path: Path) -> bool:
    """Whether a file is a report of ours."""
    return f'<meta name="generator" content="{_GENERATOR}">'.encode() in path.read_bytes()


def _figures(summary: RunSummary, name: str) -> list[Figure]:
    run = summary.run
    drawn = [
        (
            figures.risk_coverage_figure(run),
            f"Risk against coverage, {run.title}. The lower a curve, the fewer of the answers let through are wrong.",
        ),
        (
            figures.reliability_figure(run, summary.confidence),
            f"Reliability, {run.title}: P(correct) as said against the share that is right, with exact 95% intervals; "
            "larger dots stand for more answers. On the diagonal it is honest.",
        ),
    ]
    if any(value is not None for value in run.mean_entropy):
        caption = (
            f"The balance of {published.OURS}, {run.title} (Figure 5 of the paper). Left: mean token entropy of all "
            "and of right answers. Right: AUROC as tau and beta change; the thick line is beta 1."
        )
        drawn.append((figures.entropy_figure(run), caption))
    return [_figure(figure, f"{name}f{number}", caption) for number, (figure, caption) in enumerate(drawn, start=1)]


def _figure(figure: Any, name: str, caption: str) -> Figure:
    return Figure(Markup(inline_svg(figure, name, description=_visible(caption))), caption)  # noqa: S704 - ours


def _visible(value: Any) -> Any:
    """Text without characters that a page must not hold (controls, lone surrogates), written as escapes instead."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(
        c.encode("unicode_escape").decode() if category(c) in _UNSEEN and c not in "\n\t" else c for c in value
    )


def _write(path: Path, text: str) -> Path:
    return atomic_write(path, text.encode(errors="backslashreplace"))
