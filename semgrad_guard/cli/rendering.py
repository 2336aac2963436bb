"""Verdicts, scores and calibrations in a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from semgrad_guard.calibration import Calibration, Drift
from semgrad_guard.calibration.calibration_record import promise, report, shortfall
from semgrad_guard.calibration.thresholds import upwards
from semgrad_guard.cli.terminal import OUT, is_verbose, printable, show_line
from semgrad_guard.grading.by_name import right_means
from semgrad_guard.questions.data import QuestionFile
from semgrad_guard.records import Verdict

if TYPE_CHECKING:
    from semgrad_guard.cli.grading import Files
    from semgrad_guard.grading.candidates import Outcome
    from semgrad_guard.paper.probe_record import Probe

ROWS_SHOWN = 20
_COLOURS = {"answer": "green", "escalate": "yellow", "abstain": "yellow"}


def verdict_view(verdict: Verdict) -> RenderableType:
    """The text in a panel and, below it, how sure the model is and the decision."""
    colour = _COLOURS[verdict.action]
    body = Text(printable(verdict.text) or "(no text)")
    if verdict.draft is not None:
        body.append(f"\nwithheld: {printable(verdict.draft) or '(no text)'}", style="dim")
    title = {"answer": "answer", "abstain": "abstained", "escalate": "escalated"}[verdict.action]
    if verdict.action == "abstain" and any(one.action == "deliver" for one in verdict.sentences):
        title = "judged by sentence"  # a guard delivers a part of it
    alpha, requested = verdict.details.alpha, verdict.details.requested_alpha
    promised: list[tuple[str, str | Text]] = []
    if verdict.details.unfamiliar:
        promised = [("promise", f"none: {printable('; '.join(verdict.details.unfamiliar))}")]
    elif alpha is not None and requested is not None:
        wish = f"at most {100 * requested:g}% was asked for"
        promised = [("promise", f"at most {upwards(alpha)} are wrong; {wish}")]
    panel = Panel(body, title=title, title_align="left", border_style=colour, box=box.ROUNDED)
    facts = _pairs(
        ("action", Text(verdict.action, style=f"bold {colour}") + Text(f"  {_why(verdict)}", style="dim")),
        ("uncertainty", f"{figure(verdict.uncertainty)}  ({verdict.estimator}, higher is less certain)"),
        ("confidence", percent(verdict.confidence) if verdict.confidence is not None else "unknown: no calibration"),
        *promised,
        ("model", verdict.details.model),
    )
    return Group(panel, *([_sentences(verdict)] if verdict.sentences else []), facts)


def _sentences(verdict: Verdict) -> RenderableType:
    """The sentences in their order, each with its score; of a withheld one only the place."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("uncertainty", justify="right", no_wrap=True)
    table.add_column("action", no_wrap=True)
    if calibrated := verdict.details.calibration_id is not None:
        table.add_column("promised", no_wrap=True)
    table.add_column("sentence", ratio=1, no_wrap=True, overflow="ellipsis")
    for one in verdict.sentences:
        text = _one_line(verdict.text[one.start : one.end]) if one.end > one.start else "(withheld)"
        promised = ["yes" if one.promised else "no"] if calibrated else []
        style = "" if one.action == "deliver" else "dim"
        table.add_row(figure(one.uncertainty), one.action, *promised, Text(text, style=style))
    return table


def scores_view(rows: Sequence[tuple[str, Verdict]], *, decided: bool) -> RenderableType:
    """A table of texts that came from anywhere, (question, verdict); long files are cut.

    Of a text that was judged by sentence every sentence is shown.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("question", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("response", ratio=2, no_wrap=True, overflow="ellipsis")
    table.add_column("uncertainty", justify="right", no_wrap=True)
    if decided:
        table.add_column("P(correct)", justify="right", no_wrap=True)
        table.add_column("action", no_wrap=True)
    for question, verdict in rows[:ROWS_SHOWN]:
        cells = [Text(_one_line(question)), Text(_one_line(verdict.text)), figure(verdict.uncertainty)]
        if decided:
            cells += [percent(verdict.confidence), Text(verdict.action, style=_COLOURS[verdict.action])]
        table.add_row(*cells)
    below: list[RenderableType] = []
    for question, verdict in rows[:ROWS_SHOWN]:
        below += [Text(_one_line(question), style="bold"), _sentences(verdict)] if verdict.sentences else []
    if len(rows) > ROWS_SHOWN:
        below.append(Text(f"… and {len(rows) - ROWS_SHOWN} more: --output FILE or --json gives them all."))
    if strange := [verdict for _, verdict in rows if verdict.details.unfamiliar]:
        why = printable("; ".join(strange[0].details.unfamiliar))
        below.append(Text(f"Nothing is promised about {len(strange)} of these {len(rows)} texts. The first: {why}."))
    return Group(table, *below)


def drift_line(found: Drift) -> str:
    """One sentence on whether scores have moved since calibration."""
    test = f"{found.n} scores, p = {found.p_value:.2g}, level {found.level:g}"
    if found.moved:
        return f"Drift: the scores have moved since calibration ({test}). The promise may no longer hold: recalibrate."
    return f"Drift: none seen ({test})."


def calibration_view(outcome: Outcome) -> RenderableType:
    """The promise, its effect on the answers, and P(correct) along the scores."""
    calibration, auroc, sentences = outcome.calibration, outcome.auroc, report(outcome.calibration)
    left_out = {"promise", "assumption"}
    if calibration.threshold is not None and not is_verbose():  # what would help is for those who need help
        left_out |= {"chance", "scores"}
    own, bound = calibration.sentences, calibration.binding
    meaning = None if bound is None or bound.grader is None else right_means(bound.grader)
    unit = "answer" if own is None else "sentence"
    wrong = (
        f"{calibration.n_wrong} of {calibration.n if calibration.by_hand is None else calibration.n_tested} answers "
    )
    wrong += "wrong" if own is None else f"hold a wrong sentence, or none; {own.wrong} of {own.n} sentences wrong"
    undecided = f", {outcome.no_verdict} {unit}s without a verdict among them" if outcome.no_verdict else ""
    if calibration.n_abstained:
        undecided += f"; {calibration.n_abstained} more abstain, which is neither right nor wrong"
    unscored = f", {calibration.n_unscored} without a score" if calibration.n_unscored else ""
    undefined = f"undefined: all {unit}s are {'wrong' if calibration.n_wrong else 'right'}"
    facts = _pairs(
        ("questions", f"{wrong}{undecided}{unscored}"),
        *([] if not outcome.n_cut else [("cut off", _cut(outcome))]),
        *([] if meaning is None else [("right", meaning)]),  # of a grader that does not look at the whole answer
        ("AUROC", undefined if auroc is None else f"{auroc:.3f} (1: every wrong {unit} is less certain)"),
        *_outcome(calibration),
        *((name, text) for name, text in sentences.items() if name not in left_out),
    )
    parts: list[RenderableType] = [_promise(outcome), facts]
    if calibration.confidence_map is not None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("uncertainty", justify="right")
        table.add_column("P(correct)", justify="right")
        table.add_column("action")
        for score, confidence in confidence_rows(calibration):
            action = "answer" if calibration.lets_through(score) else "abstain"
            shown = action if own is None else "deliver" if action == "answer" else own.on_doubt
            table.add_row(figure(score), percent(confidence), Text(shown, style=_COLOURS[action]))
        parts += [Text(), table]
    return Group(*parts)


def show_calibration(outcome: Outcome, questions: QuestionFile, files: Files, *, as_json: bool) -> None:
    """The result, on the terminal or as JSON."""
    if as_json:
        long: dict[str, Any] = dict.fromkeys(("scores", "grid", "confidence_map"), True)
        long["choice"] = True if outcome.calibration.choice is None else {"weights", "questions"}
        rows = confidence_rows(outcome.calibration)
        document = {
            "calibration": outcome.calibration.model_dump(mode="json", exclude=long),
            "effect": None if outcome.effect is None else asdict(outcome.effect),
            "no_verdict": outcome.no_verdict,
            "cut_off": {"answers": outcome.n_cut, "wrong": outcome.n_cut_wrong},
            "auroc": outcome.auroc,
            "aurc": outcome.aurc,
            "confidence": [{"uncertainty": score, "confidence": confidence} for score, confidence in rows],
            "broken_lines": [str(problem) for problem in questions.problems],
            "duplicates": list(questions.duplicates),
            "output": str(files.output),
            "answers": str(files.answers),
        }
        typer.echo(json.dumps(document))
        return
    OUT.print(calibration_view(outcome))
    show_line(f"The calibration {outcome.calibration.id} is in {files.output},")
    show_line(f"the answers are in {files.answers}.")


def probe_view(found: Probe) -> RenderableType:
    """The last prompt tokens with their scores, which of them is t*, and why."""
    graded = found.graded
    chosen = found.semantic_token.offset if found.semantic_token.offset is not None else found.own_token
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("token", "text", "SPS", *(["AUROC of SemGrad"] if graded else []), ""):
        table.add_column(heading, justify="left" if heading in ("text", "") else "right", no_wrap=True)
    count = len(found.tokens)
    for column, (name, preserved) in enumerate(zip(found.tokens, found.by_token, strict=True)):
        offset = column - count
        cells = [str(offset), Text("(differs)", style="dim") if name is None else Text(repr(name)), f"{preserved:.3f}"]
        if graded:
            known = graded.by_token[column]
            cells.append("-" if known is None else f"{known:.3f}")
        marks = ["t*"] * (offset == chosen) + ["the template's"] * (offset == found.own_token)
        table.add_row(*cells, Text(", ".join(marks), style="bold green"))
    facts = [
        ("questions", f"{found.questions} with paraphrases, {found.without_paraphrases} without"),
        ("layers", f"{found.upper_layers[0]} to {found.upper_layers[-1]}, averaged"),
    ]
    if graded:
        facts.append(("answers", f"{graded.right} of {graded.answers} right ({graded.grader})"))
        relation = "no correlation: the AUROC is undefined (all right, or all wrong), or does not vary"
        if graded.pearson is not None and graded.spearman is not None:
            rank = f"rank correlation {graded.spearman:.2f}"
            relation = f"r = {graded.pearson:.2f}, {rank}, over all layers and tokens"
        facts.append(("SPS and AUROC", relation))
    reason = Text(f"t* = {chosen}: {printable(found.semantic_token.reason)}.")
    return Group(table, _pairs(*facts), Text(), reason)


def _cut(outcome: Outcome) -> str:
    bound = outcome.calibration.binding
    rule = None if bound is None else bound.on_cut
    unscored = {"abstain": " (they have no score)", "unscored": " (within their first sentence they have no score)"}
    wrong = f"{outcome.n_cut} of the graded answers, {outcome.n_cut_wrong} of them wrong"
    return f"{wrong}{unscored.get(rule or '', '')}: raise --max-tokens"


def confidence_rows(calibration: Calibration) -> list[tuple[float, float]]:
    """(uncertainty, P(correct)) at the calibration scores' lowest, at their quartiles, and at their highest."""
    scores = calibration.scores
    picked = sorted({scores[round(q * (len(scores) - 1))] for q in (0, 0.25, 0.5, 0.75, 1)})
    return [(score, confidence) for score in picked if (confidence := calibration.confidence(score)) is not None]


def figure(value: float | None) -> str:
    """Four digits that count."""
    return "none" if value is None else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share."""
    return "" if value is None else f"{value:.1%}"


def _promise(outcome: Outcome) -> Panel:
    calibration, cut = outcome.calibration, ""
    text = promise(calibration)
    if calibration.threshold is not None:
        text += f" This assumes: {calibration.assumption}."
        return Panel(text, title="The promise holds", title_align="left", border_style="green", box=box.ROUNDED)
    if outcome.n_cut:
        cut = f"Answers cut off: {outcome.n_cut}, {outcome.n_cut_wrong} of them wrong: raise --max-tokens."
    helps = shortfall(calibration, cut=cut)
    body = Text(f"{text}\n\nNothing will be let through. {helps}")
    return Panel(
        body, title="No threshold keeps the promise", title_align="left", border_style="yellow", box=box.ROUNDED
    )


def _outcome(calibration: Calibration) -> list[tuple[str, str]]:
    if calibration.threshold is None:
        return [("threshold", "none")]
    answered = "of the questions are answered"
    if calibration.sentences is not None:
        answered = f'of the answers deliver something, with on_doubt="{calibration.sentences.on_doubt}"'
    return [
        ("threshold", f"uncertainty at most {figure(calibration.threshold)}"),
        ("coverage", f"{percent(calibration.coverage)} {answered}"),
    ]


def _pairs(*pairs: tuple[str, str | Text]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in pairs:
        table.add_row(f" {name}", value if isinstance(value, Text) else Text(printable(value)))
    return table


def _why(verdict: Verdict) -> str:
    if verdict.reason is not None:
        return verdict.reason
    if verdict.threshold is None:
        return "nothing is withheld without a calibration or a threshold"
    return f"at or below the threshold {figure(verdict.threshold)}"


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())
