"""`WritingModel`: a loaded model that writes answers to prompts, as its worker has it written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from semgrad_guard.engine.generation.certain_text import CertainText, PieceStreamer
from semgrad_guard.engine.generation.decoding import Decoder
from semgrad_guard.engine.generation.equal_rows import equal_rows_stand_alone
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.generation.running_batch import RunningBatch
from semgrad_guard.engine.loaded_model import LoadedModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt, render
from semgrad_guard.errors import InputError, PromptTooLongError


class WritingModel(LoadedModel):
    """Answers prompts in whole runs or in a running batch, in the calling thread."""

    _decoding: tuple[tuple[int, ...], Decoder] | None = None

    def write(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        objective: Objective,
        *,
        on_piece: Callable[[str], None] | None = None,
    ) -> list[Generation]:
        """Answer prompts in one run; `on_piece` is called with the pieces of the answer to the only one."""
        with self._scorer.lock:
            self.require_known(prompts)
            streamer = None
            if on_piece is not None:
                certain = CertainText(self._decoder.decode, options, prompts[0].thinking)
                streamer = PieceStreamer(certain, on_piece)
            written = self._decoder.run(prompts, options, objective, streamer=streamer)
            if streamer is not None:
                streamer.finish(written[0].text)
            return written

    @property
    def pads(self) -> bool:
        """Whether prompts of unequal length may be answered in one batch (`generate_batch`)."""
        return self._scorer.pads

    @property
    def stacks(self) -> bool:
        """Whether prompts of equal length may be answered in one batch.

        Where unequal ones may not, a short answer to made-up prompts tells, each time.
        """
        return self.pads or equal_rows_stand_alone(self._scorer)

    @property
    def fixed_positions(self) -> int | None:
        """Up to how many tokens, prompt and answer, a row of a batch does not depend on how long others are.

        None: any number. Rotary frequencies that change with the length are those of the longest row.
        """
        return self._scorer.architecture.fixed_positions

    @property
    def joins(self) -> bool:
        """Whether answers of this model may join and leave a running batch (`running_batch`)."""
        return self._scorer.joins

    def running_batch(self, objective: Objective | None = None) -> RunningBatch:
        """A batch that answers join and leave at any step. For a model that `joins`; for one thread.

        `objective` is that of later scoring, as in `generate`.
        """
        return RunningBatch(self._scorer, lambda: self._decoder, objective or Objective())

    def fitted(self, prompt: Prompt, options: GenerationOptions) -> GenerationOptions:
        """The options with `max_tokens` cut to the room that the context window leaves after a prompt.

        Raises:
            PromptTooLongError: it leaves nothing.
        """
        return self._fitted([prompt], options)

    @property
    def _decoder(self) -> Decoder:
        """One for the tokens that end an answer now; their owner may change them, in the generation config."""
        end_tokens = self._end_tokens
        if self._decoding is None or self._decoding[0] != end_tokens:
            self._decoding = end_tokens, self._decoder_ending(end_tokens)
        return self._decoding[1]

    def _decoder_ending(self, end_tokens: tuple[int, ...]) -> Decoder:
        return Decoder(
            self._scorer,
            self.tokenizer,
            end_tokens=end_tokens,
            # no method of this object: the decoder must not keep it alive
            render=partial(render, self.tokenizer, template_options=self._template_options),
            window=self.context_window,
        )

    def _fitted(self, prompts: Sequence[Prompt], options: GenerationOptions | None) -> GenerationOptions:
        """The options with `max_tokens` cut to the room that the context window leaves."""
        options = options or GenerationOptions()
        window, longest = self.context_window, max(len(prompt.ids) for prompt in prompts)
        if window is None:
            return options
        if longest >= window:
            raise PromptTooLongError(
                f"the prompt has {longest} tokens, which leaves no room for an answer in this model's context window "
                f"of {window}; shorten it or use a model with a larger window"
            )
        room = window - longest
        return options if options.max_tokens <= room else replace(options, max_tokens=room)

    def require_known(self, prompts: Sequence[Prompt]) -> None:
        """Return if the model has a row for every token. It looks at the model: within the turn that answers.

        Raises:
            InputError: the tokenizer does not belong to the model.
        """
        vocabulary, highest = self._scorer.vocabulary, max(max(prompt.ids) for prompt in prompts)
        if highest >= vocabulary:
            raise InputError(f"the tokenizer does not belong to this model: id {highest} >= {vocabulary}")
