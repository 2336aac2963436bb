"""The oracle of answers that are written in steps: whole runs of the model, by the loop of transformers."""

from __future__ import annotations

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.writing import BatchRequest


def whole_run(model: LanguageModel, question: str, options: GenerationOptions | None = None) -> Generation:
    """The answer to a question in a run of its own, in this thread."""
    prompt = model.render(question)
    (row,) = model.write_whole([BatchRequest(prompt, model.fitted(options, prompt))], most=1)
    if row.error is not None:
        raise row.error
    return model.running_batch().generations([row])[0]
