"""The oracle of answers that are written in steps: whole runs of the model, by the loop of transformers."""

from __future__ import annotations

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.writing import WrittenAnswer


def whole_run(model: LanguageModel, question: str, options: GenerationOptions | None = None) -> Generation:
    """The answer to a question in a run of its own, in this thread."""
    prompt = model.render(question)
    row = WrittenAnswer(model, prompt, model.fitted(options, prompt))
    batch = model.running_batch()
    batch.write_whole([row])
    if row.error is not None:
        raise row.error
    return batch.generations([row])[0]
