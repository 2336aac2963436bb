"""The report: one HTML file without any outside request, with its figures, and a CSV file for every table.

The figures are risk and coverage, reliability, HybridGrad's balance, and the maps of a probe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from semgrad_guard.errors import InputError
from semgrad_guard.files import atomic_write, make_folder, require_writable
from semgrad_guard.metrics import Floats, aurc, auroc, risk_coverage
from semgrad_guard.paper.coverage import DELTA, SPLITS
from semgrad_guard.paper.drawing import (
    INK,
    LINES,
    MUTED,
    ORACLE,
    OURS_COLOUR,
    RANDOM,
    RIGHT,
    dress,
    dress_risk,
    inline_svg,
    new_figure,
    percent_axis,
    plain,
    require_drawable,
    styled,
)
from semgrad_guard.paper.results import OURS, SOURCE, GradedRun, deviations, require_distinct
from semgrad_guard.paper.summary import LEVEL, RESAMPLES, RunSummary, promises, reliability, standing, summarize
from semgrad_guard.paper.tables import all_tables, guaranteed_tables
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
            "deviations": deviations(summary.run.settings),
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
        ours=OURS,
        source=SOURCE,
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
            risk_coverage_figure(run),
            f"Risk against coverage, {run.title}. The lower a curve, the fewer of the answers let through are wrong.",
        ),
        (
            reliability_figure(run, summary.confidence),
            f"Reliability, {run.title}: P(correct) as said against the share that is right, with exact 95% intervals; "
            "larger dots stand for more answers. On the diagonal it is honest.",
        ),
    ]
    if any(value is not None for value in run.mean_entropy):
        caption = (
            f"The balance of {OURS}, {run.title} (Figure 5 of the paper). Left: mean token entropy of all "
            "and of right answers. Right: AUROC as tau and beta change; the thick line is beta 1."
        )
        drawn.append((entropy_figure(run), caption))
    return [
        Figure(Markup(inline_svg(figure, f"{name}f{number}", description=_visible(caption))), caption)  # noqa: S704 - ours
        for number, (figure, caption) in enumerate(drawn, start=1)
    ]


def _visible(value: Any) -> Any:
    """Text without characters that a page must not hold (controls, lone surrogates), written as escapes instead."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(
        c.encode("unicode_escape").decode() if category(c) in _UNSEEN and c not in "\n\t" else c for c in value
    )


def _write(path: Path, text: str) -> Path:
    return atomic_write(path, text.encode(errors="backslashreplace"))


TAUS = np.geomspace(0.01, 100.0, 25)
BETAS = (0.1, 0.5, 1.0, 2.0, 10.0)

_POINTS = 160
"""Points of a curve: enough for a page, and a page with many curves stays small."""
_PANELS, _TITLE_WIDTH = 4, 18
"""Panels in a row, and the width of their titles in characters."""


@styled
def risk_coverage_figure(run: GradedRun) -> Any:
    """Error rate among the answered against the share answered: HybridGrad, the four best others, the rest in grey."""
    figure = new_figure(7.4, 4.4)
    axes = figure.add_subplot()
    areas = {method: area for method, s in run.scores.items() if (area := aurc(s, run.correct)) is not None}
    best = sorted((m for m in areas if m != OURS), key=lambda m: (areas[m], m))[: len(LINES)]
    named = [*best, OURS] if OURS in areas else best
    curves = {method: _curve(run, method) for method in run.scores}
    for method in (m for m in run.scores if m not in named):
        axes.plot(*curves[method], color=MUTED, linewidth=0.8, alpha=0.6)
    for method, (colour, marker, dash) in zip(best, LINES, strict=False):
        look = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 5}
        axes.plot(*curves[method], markevery=0.12, label=plain(method), **look)
    if OURS in named:
        look = {"color": OURS_COLOUR, "linewidth": 3, "marker": "o", "zorder": 5}
        axes.plot(*curves[OURS], markevery=0.12, label=OURS, **look)
    wrong, note = 1.0 - run.accuracy, {"textcoords": "offset points", "fontsize": 8.5, "color": MUTED}
    axes.plot([0, 1], [wrong, wrong], **RANDOM)
    axes.annotate("random order", (0.99, wrong), (0, 3), ha="right", **note)
    shares = np.linspace(0.005, 1, _POINTS)
    axes.plot(shares, np.maximum(0.0, 1 - run.accuracy / shares), **ORACLE)
    at = min(0.98, run.accuracy + 0.6 * wrong)
    axes.annotate("oracle", (at, max(0.0, 1 - run.accuracy / at)), (4, -2), va="top", **note)
    # The first few answers, where one error is a high rate, do not stretch the axis.
    risks = [float(y[len(y) // 10 :].max(initial=0.0)) for _, y in curves.values()]
    dress_risk(axes, top=min(1.02, max(0.05, 1.3 * max([wrong, *risks]))))
    rest = len(run.scores) - len(named)
    if named:  # none where no answer has a score
        axes.legend(frameon=False, fontsize=9, ncols=2, title=f"grey: {rest} other methods" if rest else None)
    return figure


@styled
def reliability_figure(run: GradedRun, confidence: Mapping[str, Floats]) -> Any:
    """Share of right answers against P(correct), with exact 95 % intervals: HybridGrad and the three best others.

    Areas grow with the number of answers. `confidence` is each method's cross-fitted P(correct), [answers], nan without
    a score.
    """
    aurocs = {method: auroc(scores, run.correct) or 0.0 for method, scores in run.scores.items()}
    best = sorted(aurocs, key=lambda m: (m != OURS, -aurocs[m]))[:4]
    methods = [method for method in best if np.isfinite(confidence[method]).any()]
    rows = max(1, math.ceil(len(methods) / _PANELS))
    figure = new_figure(7.4, 2.3 * rows + 0.5)
    panels = figure.subplots(rows, min(_PANELS, max(1, len(methods))), squeeze=False).ravel()
    for axes in panels[len(methods) :]:  # the rest of the last row stays empty
        axes.set_visible(False)
    for axes, method in zip(panels, methods, strict=False):
        found = reliability(confidence[method], run.correct)
        dress(axes, title=method, width=_TITLE_WIDTH)
        axes.plot([0, 1], [0, 1], **{**RANDOM, "linewidth": 1.1})
        spread = np.abs(np.stack([found.accuracy - found.low, found.high - found.accuracy]))
        axes.errorbar(found.confidence, found.accuracy, yerr=spread, color=RIGHT, fmt="none", elinewidth=1.2)
        sizes = 6 + 160 * found.count / found.count.sum()
        axes.scatter(found.confidence, found.accuracy, s=sizes, color=RIGHT, zorder=3, clip_on=False)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        percent_axis(axes.xaxis)
        percent_axis(axes.yaxis)
    figure.supxlabel("P(correct) as said", fontsize=10)
    figure.supylabel("share that is right", fontsize=10)
    return figure


@styled
def entropy_figure(run: GradedRun) -> Any:
    """HybridGrad's balance (Figure 5 of the paper): mean token entropy, and AUROC over tau for several beta.

    Either half has a note if the run lacks its data.
    """
    figure = new_figure(7.4, 3.4)
    left, right = figure.subplots(1, 2)
    _entropy_histogram(left, run)
    _entropy_curves(right, run)
    return figure


def hybrid(semgrad: Floats, paragrad: Floats, mean_entropy: Floats, *, tau: float, beta: float) -> Floats:
    """HybridGrad from its parts: (1 - a) SemGrad + beta a ParaGrad, a = exp(-mean entropy / tau); nan where one is."""
    a = np.exp(-mean_entropy / tau)
    return (1.0 - a) * semgrad + beta * a * paragrad


@styled
def sps_figure(sps: ArrayLike, *, title: str, tokens: Sequence[str] | None = None) -> Any:
    """The heat map of the Semantic Preservation Score (Figures 2 and 4 of the paper); a ring marks the highest score.

    Args:
        sps: [layers, tokens], the last column is the prompt's last token.
        title: above the picture.
        tokens: labels of the columns; "-3, -2, -1" without them.
    """
    values = _table(sps)
    layers, width = values.shape
    figure = new_figure(max(4.2, 0.48 * width + 1.8), max(3.6, 0.13 * layers + 1.8))
    axes = figure.add_subplot()
    mesh = axes.pcolormesh(values, cmap="viridis", edgecolors="face", linewidth=0.2)
    row, column = np.unravel_index(int(np.nanargmax(values)), values.shape)
    axes.plot(column + 0.5, row + 0.5, marker="o", markersize=9, fillstyle="none", color="#d55e00", markeredgewidth=2)
    dress(axes, title=title, x="prompt token, from the end", y="decoder layer", grid=False)
    labels = [str(t - width) for t in range(width)] if tokens is None else [plain(t, width=24) for t in tokens]
    turned = max(len(label) for label in labels) > 4
    axes.set_xticks(np.arange(width) + 0.5, labels, rotation=45 if turned else 0, ha="right" if turned else "center")
    step = max(1, layers // 8)
    axes.set_yticks(np.arange(0, layers, step) + 0.5, [str(layer) for layer in range(0, layers, step)])
    figure.colorbar(mesh, ax=axes, label=f"SPS (highest: {values[row, column]:.2f}, ringed)")
    return figure


@styled
def sps_auroc_figure(sps: ArrayLike, auroc: ArrayLike, *, title: str) -> Any:
    """SemGrad's AUROC against SPS (Figure 3 of the paper), a point per hidden state, with Pearson's correlation.

    The last five tokens have markers of their own, earlier ones dots; nan is left out.
    """
    x, y = _table(sps), _table(auroc)
    if x.shape != y.shape:
        raise InputError(f"SPS is {x.shape} and AUROC {y.shape}: both must be [layers, tokens] of the same states")
    figure = new_figure(5.2, 3.8)
    axes = figure.add_subplot()
    looks = [(OURS_COLOUR, "o"), *((colour, marker) for colour, marker, _ in LINES)]
    known = np.isfinite(x) & np.isfinite(y)
    for back in range(x.shape[1], 0, -1):
        rows = known[:, -back]
        colour, marker = looks[back - 1] if back <= len(looks) else (INK, ".")
        label = f"token -{back}" if back <= len(looks) else ("earlier" if back == x.shape[1] else None)
        axes.plot(x[rows, -back], y[rows, -back], marker, color=colour, markersize=5, alpha=0.75, label=label)
    dress(axes, title=title, x="Semantic Preservation Score", y="AUROC of SemGrad with this state")
    axes.legend(frameon=False, fontsize=8.5)
    if known.sum() < 3 or np.ptp(x[known]) == 0 or np.ptp(y[known]) == 0:
        correlation = "no correlation: too few states, or all alike"
    else:
        correlation = f"r = {np.corrcoef(x[known], y[known])[0, 1]:.2f} over {int(known.sum())} states"
    axes.text(0.98, 0.02, correlation, transform=axes.transAxes, ha="right", va="bottom", fontsize=9)
    return figure


def _curve(run: GradedRun, method: str) -> tuple[Floats, Floats]:
    curve = risk_coverage(run.scores[method], run.correct)
    if not len(curve.risk):
        return np.empty(0), np.empty(0)
    kept = np.unique(np.linspace(0, len(curve.risk) - 1, _POINTS).round().astype(int))
    return curve.coverage[kept], curve.risk[kept]


def _entropy_histogram(axes: Any, run: GradedRun) -> None:
    dress(axes, title="Mean token entropy", x="nats", y="answers")
    entropy, correct = _column(run.mean_entropy), np.array(run.correct)
    known = np.isfinite(entropy)
    if not known.any():
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
        return
    edges = np.linspace(0.0, float(entropy[known].max()) or 1.0, 31)
    axes.margins(y=0.12)
    axes.hist(entropy[known], bins=edges, color=RIGHT, alpha=0.3, label="all answers")
    axes.hist(entropy[known & correct], bins=edges, color=RIGHT, alpha=0.9, label="right answers")
    if (known & correct).any():
        levels = np.percentile(entropy[known & correct], [50, 75])
        for label, level, align, shift in zip(("50%", "75%"), levels, ("right", "left"), (-2, 2), strict=True):
            axes.axvline(level, color=INK, linestyle=(0, (4, 3)), linewidth=1.1)
            where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": align, "va": "top"}
            axes.annotate(label, (level, 1.0), (shift, -1), fontsize=8, **where)
    title = {"title": "lines: percentiles of\nright answers", "title_fontsize": 8}
    axes.legend(frameon=False, fontsize=8.5, loc="center right", **title)


def _entropy_curves(axes: Any, run: GradedRun) -> None:
    dress(axes, title="AUROC of HybridGrad", x="tau (small: SemGrad, large: ParaGrad)")
    parts = [run.scores.get("SemGrad"), run.scores.get("ParaGrad"), run.mean_entropy or None]
    if any(part is None for part in parts):
        axes.text(0.5, 0.5, "needs SemGrad, ParaGrad\nand the mean entropy", ha="center", transform=axes.transAxes)
        return
    semgrad, paragrad, entropy = (_column(part or ()) for part in parts)
    if auroc(hybrid(semgrad, paragrad, entropy, tau=1.0, beta=1.0).tolist(), run.correct) is None:
        axes.text(0.5, 0.5, "not defined: all answers are\nright, or all wrong", ha="center", transform=axes.transAxes)
        return
    axes.set_xscale("log")
    looks = [*LINES[:2], (OURS_COLOUR, "o", "-"), *LINES[2:]]
    for beta, (colour, marker, dash) in zip(BETAS, looks, strict=True):
        levels = [auroc(hybrid(semgrad, paragrad, entropy, tau=tau, beta=beta).tolist(), run.correct) for tau in TAUS]
        look = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4, "markevery": 4}
        axes.plot(TAUS, levels, linewidth=2.6 if beta == 1.0 else 1.3, label=f"beta {beta:g}", **look)
    for name, scores, side, align in (("SemGrad", semgrad, 0.0, "left"), ("ParaGrad", paragrad, 1.0, "right")):
        level = auroc(scores.tolist(), run.correct)
        axes.axhline(level, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1)
        where = {"xytext": (0, 2), "xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": align}
        axes.annotate(name, (side, level), fontsize=8, color=MUTED, **where)
    percent_axis(axes.yaxis, digits=None)
    axes.legend(frameon=False, fontsize=8)


def _column(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _table(values: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).any():
        raise InputError(f"a map of hidden states is [layers, tokens] with finite numbers; this one is {table.shape}")
    return table
