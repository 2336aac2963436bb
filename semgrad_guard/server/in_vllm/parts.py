"""`Parts`: sentences leave while vLLM writes their answer. The worker scores them, and the server's terms decide."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager

from semgrad_guard.engine.answers.batching import is_time
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.sentences import OpenSentences
from semgrad_guard.engine.answers.text import CertainText, Piece
from semgrad_guard.engine.prompts.responses import Codec
from semgrad_guard.guard import EarlySentences
from semgrad_guard.server.in_vllm.messages import Begun, Failed, Read, ScoredPart
from semgrad_guard.server.in_vllm.rounds import Round


class BegunAnswer:
    """The tokens of an answer that vLLM writes; `listener` gets its pieces as soon as they are certain."""

    def __init__(
        self, codec: Codec, read: Read, options: GenerationOptions, listener: Callable[[Piece], None] | None
    ) -> None:
        self.ids = list[int]()
        self._certain, self._end_tokens = CertainText(codec.decode, options, read.thinking), read.end_tokens
        self._listener = listener

    def add(self, tokens: Sequence[int]) -> None:
        """Some tokens more."""
        for token in tokens:
            self.ids.append(token)
            if self._listener is not None and token not in self._end_tokens:
                for piece in self._certain.add(token):
                    self._listener(piece)

    @property
    def spelled(self) -> tuple[int, ...]:
        """The tokens without the one that ended the answer."""
        return tuple(self.ids[:-1] if self.ids and self.ids[-1] in self._end_tokens else self.ids)


class Part:
    """The sentences that have ended in an answer, and leave as far as they are let through (`let`).

    With so many `tokens` the answer ends, behind a sentence that ends it; None: none does.
    """

    def __init__(self, let: EarlySentences) -> None:
        self.open, self.let = OpenSentences(), let
        self.tokens: int | None = None
        self._turn: asyncio.Future[bool] | None = None
        self._has_ended = False

    @property
    def waits(self) -> bool:
        """Whether sentences wait to be scored, none being scored now."""
        return self.open.is_due and self._turn is not None and not self._turn.done()

    async def turn(self) -> bool:
        """Wait until sentences are to be scored; False: the answer has ended, and they are scored with the rest."""
        if self._has_ended:
            return False
        self._turn = asyncio.get_running_loop().create_future()
        return await self._turn

    def add(self, scored: ScoredPart) -> bool:
        """Hand on what is let through of it; whether vLLM continues to write."""
        goes_on = self.let.add(scored.draft.draft)
        self.tokens = None if goes_on else scored.tokens
        return goes_on

    def begin(self) -> None:
        """Have those scored that wait."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(True)

    def end(self) -> None:
        """The answer has ended."""
        self._has_ended = True
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(False)


class Parts:
    """Those of all answers that are being written; `score` scores the sentences of some of them together."""

    def __init__(self, score: Callable[[list[Begun]], Awaitable[Sequence[ScoredPart | Failed | None]]]) -> None:
        self._round: Round[Begun, ScoredPart | None] = Round(score)
        self._writing: list[Part | None] = []

    @contextmanager
    def writing(self, part: Part | None) -> Generator[None]:
        """While an answer is being written, with or without such a part."""
        self._writing.append(part)
        try:
            yield
        finally:
            self._writing.remove(part)
            if part is not None:
                part.end()

    def step(self, part: Part) -> None:
        """One step of an answer: have sentences scored together with those of others that soon will have ended."""
        part.open.waited += part.waits
        due = [one for one in self._writing if one is not None and one.waits]
        if is_time([one.open.waited for one in due], len(self._writing)):
            for one in due:
                one.begin()

    async def let_through(self, name: str, part: Part, answer: BegunAnswer) -> None:
        """Hand on the sentences of an answer, until it ends.

        Raises:
            SemGradGuardError: they cannot be scored, or the caller has left.
        """
        while await part.turn():
            begun = Begun(name=name, tokens=answer.spelled, spans=tuple(part.open.spans), known=part.let.known)
            scored = await self._round.result(begun)
            part.open.hand_over(part.open.known if scored is None else len(begun.spans))
            if scored is not None and not part.add(scored):
                return
