"""`semgrad-guard probe`: where a model keeps the meaning of a prompt, and which token SemGrad should use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import loading, options, terminal
from semgrad_guard.cli.command import code_of_run
from semgrad_guard.cli.terminal import OUT, note, progress, say, show_line
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import QuestionFile, with_paraphrases
from semgrad_guard.questions.data_files import Output, beside, read_by, require_outputs, sole_writer
from semgrad_guard.questions.job_record import is_record
from semgrad_guard.questions.prompts import Phrasing

if TYPE_CHECKING:
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.paper.probe_record import Probe
    from semgrad_guard.paper.probing import ProbePlan


def probe(  # a command's options are its arguments
    *,
    data: Annotated[
        Path,
        options.option(
            'Questions with "paraphrases" and, best, "answers"; "-" reads them from stdin.',
            options.DATA,
            "FILE",
            reads=options.stream,
        ),
    ],
    output: Annotated[Path, options.option("Where to save the record.", options.DATA, "FILE", reads=options.path)],
    column: options.Columns = None,
    model: options.Model = POCKET,
    dtype: options.Dtype = None,
    device: options.Device = None,
    template_option: options.Template = None,
    no_answers: Annotated[
        bool,
        options.flag("Only measure the meaning; let the model answer nothing.", options.ANSWERS, "--no-answers"),
    ] = False,
    system: options.System = None,
    as_json: options.AsJson = False,
) -> None:
    """Find where a model keeps the meaning of a prompt, and which prompt token SemGrad should use.

    Questions and their paraphrases give the Semantic Preservation Score of every layer and late token; answers, where
    the file has references, tell where SemGrad works. The record has the token to use and the reason, and
    LanguageModel takes it: semantic_token=TokenChoice.load(FILE).
    """
    from semgrad_guard.engine.scores.semantic_preservation import SemanticPreservation
    from semgrad_guard.paper.drawing import is_drawn, require_drawable
    from semgrad_guard.paper.probe_record import Probe
    from semgrad_guard.paper.probing import ProbePlan

    # Next to the record the state of an interrupted run, and pictures.
    states, kept, heat_map, scatter = (
        beside(output, suffix) for suffix in (".states.safetensors", ".answers.jsonl", ".sps.png", ".auroc.png")
    )
    phrasing, sources = loading.phrasing("plain", system)
    source = loading.source_of(model, dtype=dtype, device=device, template_option=template_option)
    require_drawable(heat_map)
    outputs = [
        Output(output, "record of a probe", read_by(Probe.load)),
        Output(states, "file of a probe's sums", read_by(SemanticPreservation.read)),
        Output(kept, "record of answers", is_record()),
        *(Output(path, "picture of a probe", is_drawn) for path in (heat_map, scatter)),
    ]
    require_outputs(outputs, inputs=[data, Path(model), *sources])
    questions = loading.read_data(data, column, needs="question")
    if left_out := len(questions.rows) - len(with_paraphrases(questions.rows)):
        note(f"{left_out} of {len(questions.rows)} questions have no paraphrases; SPS leaves them out.")
    plan = ProbePlan(batch_size=loading.BATCH, system=phrasing.system)
    with sole_writer(output):
        language_model = loading.load(source)
        try:
            found = _probe(questions, plan, language_model, states, None if no_answers else kept)
        except KeyboardInterrupt as error:
            message = f"Finished work is kept next to {output}. Run the same command again to continue."
            say(message, label=terminal.in_words(error))
            raise typer.Exit(terminal.exit_code(error)) from error
        found.save(output)
        drawn = _draw(found, heat_map, scatter)
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        from semgrad_guard.cli.rendering import probe_view

        OUT.print(probe_view(found))
        show_line(f"The record is {output}.")
        show_line(f"Pictures: {', '.join(map(str, drawn))}.")
    raise typer.Exit(code_of_run(broken=questions.problems))


def _probe(questions: QuestionFile, plan: ProbePlan, model: LanguageModel, states: Path, kept: Path | None) -> Probe:
    from semgrad_guard.grading import GRADERS, default_grader
    from semgrad_guard.guard import template_name
    from semgrad_guard.paper.probing import probe

    return probe(
        questions.rows,
        model=model,
        plan=plan,
        data=questions.path.name,
        states_path=states,
        answers_path=kept,
        grader=GRADERS[default_grader(template_name(model, Phrasing().name()))],
        phase=progress,
    )


def _draw(found: Probe, heat_map: Path, scatter: Path) -> list[Path]:
    from semgrad_guard.paper.drawing import save
    from semgrad_guard.paper.figures import sps_auroc_figure, sps_figure

    maps = found.maps
    drawn = [save(sps_figure(maps.sps, title=maps.title, tokens=maps.tokens), heat_map)]
    if maps.auroc is not None:
        drawn.append(save(sps_auroc_figure(maps.sps, maps.auroc, title=maps.title), scatter))
    return drawn
