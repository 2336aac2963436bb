"""A `SemGradLLM` whose texts and uncertainties a test sets; everything above it is the real package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llama_index_semgrad_guard import SemGradLLM
from llama_index_semgrad_guard.records import Chunk
from semgrad_guard import GenerationOptions, LanguageModel, Verdict

WAY = {(False, False): "sync", (True, False): "async", (False, True): "stream", (True, True): "async stream"}
"""How an engine is called, by (asynchronous, streaming): two factors, so that matrices can be covered by pairs."""
BOTH = (False, True)

Script = Callable[[str], tuple[str, float]]
"""The reply to a prompt, given as one text, and how uncertain it is."""


class Scripted(SemGradLLM):
    """Answers by its script; the tiny model behind it only lends the records their form."""

    script: Any = None
    texts: list[str] = []  # noqa: RUF012 - a pydantic field
    uncertainties: dict[int, float] = {}  # noqa: RUF012 - a pydantic field

    @classmethod
    def saying(cls, model: LanguageModel, script: Script, **fields: Any) -> Scripted:
        return cls.from_model(model, script=script, **fields)

    def _scripted(self, conversation: Any) -> Any:
        generation = self.language_model.generate("?", GenerationOptions(max_tokens=1))
        prompt = conversation if isinstance(conversation, str) else "\n".join(turn.content for turn in conversation)
        text, uncertainty = self.script(prompt)
        text = "".join(list(text))  # an object of its own, as a model's text is
        tokenizer: Any = self.language_model.tokenizer
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._known(replace(generation, text=text, response_ids=ids), uncertainty)

    def _known(self, generation: Any, uncertainty: float) -> Any:
        self.texts.append(generation.text)  # kept, so that no other text gets its place in memory
        self.uncertainties[id(generation.text)] = uncertainty
        return generation

    def _answer(self, conversation: Any, options: Any) -> Any:
        written = self._scripted(conversation)
        generation = options.readable(self.language_model, written)
        return self._known(generation, self.uncertainties[id(written.text)]), self._record(generation, options)

    async def _aanswer(self, conversation: Any, options: Any) -> Any:
        return self._answer(conversation, options)

    def _streamed(self, conversation: Any, options: Any) -> Any:
        made, text, pieces = self._scripted(conversation), "", []
        uncertainty, generation = self.uncertainties[id(made.text)], options.readable(self.language_model, made)
        for start in range(0, len(generation.text), 3):
            piece = generation.text[start : start + 3]
            pieces.append(piece)
            text += piece
            yield Chunk(text, piece, "")
        whole = self._known(replace(generation, text=text), uncertainty)
        record = self._record(whole, options, text=text, pieces=pieces)
        yield Chunk(text, "", "", record=record, calls=options.calls(self.language_model, made))

    def _assess(self, generation: Any, options: Any) -> Verdict:
        verdict = super()._assess(generation, options)
        changes = {"status": "scored", "uncertainty": self.uncertainties[id(generation.text)], "text": generation.text}
        return verdict.model_copy(update=changes)
