"""The oracle of answers that are written in steps: whole runs of the model, by the loop of transformers."""

from __future__ import annotations

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.objective import Objective


def whole_run(
    model: LanguageModel, question: str, options: GenerationOptions | None = None, objective: Objective | None = None
) -> Generation:
    """The answer to a question in a run of its own, in this thread."""
    prompt = model.render(question)
    return model.write([prompt], model.fitted(options, prompt), objective or Objective())[0]
