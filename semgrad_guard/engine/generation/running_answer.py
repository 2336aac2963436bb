"""One answer of a running batch: the request for it, and its tokens as they are written."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from transformers.cache_utils import Cache

from semgrad_guard.engine.generation.decoding import Decoder, Written
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.generation.visible import CertainText, Piece
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.replay.batch import growing_cache
from semgrad_guard.engine.replay.captured_states import Capture


@dataclass(frozen=True)
class BatchRequest:
    """A prompt to be answered; `listener` gets every piece of text and thought, as soon as it is certain.

    An answer that is not `scored` is drawn for the score of another one (`RunningBatch.samples`).
    """

    prompt: Prompt
    options: GenerationOptions
    listener: Callable[[Piece], None] | None = None
    scored: bool = True

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Requests that are equal in this read the same prompt."""
        return tuple(self.prompt.ids), self.prompt.semantic_token.offset


class RunningAnswer:
    """An answer that is being written. `error` is the error that ended it, where it cannot be written.

    `passes` are the captures that hold it, with its row; `behind` is how many columns of its prompt they include.
    `before` is the cache of the columns before those, once it is done, and `keys` that of all columns, where it is read
    by sentence. `milliseconds` is its share of the steps.
    """

    def __init__(self, request: BatchRequest, decoder: Decoder) -> None:
        self.prompt, self.options, self._listener = request.prompt, request.options, request.listener
        self.scored, self.reads, self.milliseconds = request.scored, request.reads, 0.0
        self.replayed = False  # whether its states are incomplete, and are computed again for its score
        self.ids: list[int] = []
        self.ended, self.done, self.reused = False, False, 0
        self.passes: list[tuple[Capture, int]] = []
        self.before: Cache = growing_cache()
        self.keys: Cache | None = None
        self.behind, self.epoch = 0, object()
        self.error: BaseException | None = None
        self._certain = CertainText(decoder.decode, request.options, request.prompt.thinking)
        self._processors = decoder.processors(request.options, [request.prompt], len(request.prompt.ids))
        self._stop, self._end_tokens = decoder.stop_strings(request.options.stop), decoder.end_tokens

    @property
    def written(self) -> Written:
        """Its tokens."""
        return Written(self.prompt, self.options, tuple(self.ids), self.ended, self.reused)

    def choose(self, logits: torch.Tensor, likeliest: int) -> int:
        """The next token, from the head's output [V] and its likeliest token."""
        if not self._processors:
            return likeliest
        ids = torch.tensor([[*self.prompt.ids, *self.ids]], device=logits.device)
        scores: Any = self._processors(cast(Any, ids), cast(Any, logits[None].float()))
        return int(scores.argmax())

    def write(self, logits: torch.Tensor, likeliest: int) -> None:
        """Write one more token, chosen from the head's output [V]; an answer that cannot continue is done (`take`)."""
        try:
            self._take(self.choose(logits, likeliest))
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.fail(error)

    def take(self, token: int) -> None:
        """One more token, however it was chosen. An answer that cannot continue is done, with its error."""
        try:
            self._take(token)
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The answer ends here, with an error."""
        self.error, self.done = error, True

    def end(self, tokens: int) -> None:
        """The answer ends here, with so many of its tokens."""
        del self.ids[tokens:]
        self.ended = self.done = True

    def let_go(self, scored: int) -> None:
        """Hold no outputs of the passes that wrote only the first `scored` tokens, which need them no longer."""
        first, *later = self.passes  # the first has read the prompt, and is always needed
        written = accumulate((len(capture.finals()) for capture, _ in later), initial=1)
        count = sum(tokens <= scored for tokens in list(written)[1:])
        if count:
            self.passes = [first, (Capture.of_scored(later[:count]), 0), *later[count:]]

    def finish(self, answer: Generation) -> None:
        """Send the rest of the whole text to the listener; where that fails, this answer alone has an error."""
        try:
            if self._listener is not None and self.error is None:
                for piece in self._certain.rest(answer.text, answer.reasoning):
                    self._listener(piece)
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.error = error

    def _take(self, token: int) -> None:
        if token in self._end_tokens:
            self.ended = self.done = True
            return
        self.ids.append(token)
        if self._listener is not None:
            for piece in self._certain.add(token):
                self._listener(piece)
        self.done = len(self.ids) >= self.options.max_tokens or self._stop.end(self.ids)
