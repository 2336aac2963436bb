"""The flow for answers that are streamed: live where nothing may be withheld, else the outcome alone.

One generator serves calls and coroutines. It yields pieces of work, as the flow for whole answers does, and between
them the pieces of the answer, which `run_stream` and `arun_stream` hand out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.interruption import Pieces, Stop, Ticket, current_stop, stopping, waited
from semgrad_guard.engine.text_units import decided
from semgrad_guard.errors import AnswerInterruptedError
from semgrad_guard.guard.decision import settle
from semgrad_guard.guard.flow import UNWRITTEN, Ask, Draft, Outcome, concluded, not_written, one
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.question import Question
from semgrad_guard.guard.reported import ReportedScorer, bytes_of
from semgrad_guard.guard.timing import Steps, Work, adrive, ain_time, cancelling, drive, sealed
from semgrad_guard.guard.verdicts import current_recorder
from semgrad_guard.records import PromptForm, SentenceVerdict, Verdict

P = TypeVar("P")
"""A piece of a stream: of the text, of the thought before it, or anything else that a frontend shows."""
R = TypeVar("R")

StreamSteps = Generator[Work | P, Any, R]
"""Steps that yield pieces between their work, and end with a value."""


@dataclass(frozen=True)
class SentencePiece:
    """A sentence that is let through while its answer is being written: its text, and the verdict on it."""

    text: str
    sentence: SentenceVerdict


# Answers that are being written: steps whose pieces are the answer's, and whose value is its scored draft.


def answer_steps(submit: Callable[[Callable[[Piece], None]], Ticket[R]]) -> StreamSteps[Piece, R]:
    """The steps of an answer that a model of ours writes; the value is the result of its request.

    `submit` has it written, and the given listener gets the pieces. The worker holds the pieces and not these steps,
    so that an answer without a reader ends.
    """
    pieces, begun = Pieces[Piece](), list[Ticket[R]]()

    def begin() -> Ticket[R]:
        begun.append(submit(pieces.put))
        begun[0].add_done_callback(lambda _: pieces.end())
        return begun[0]

    try:
        request: Ticket[R] = yield Work(begin)
        while (some := (yield _waiting(pieces.next()))) is not None:
            yield from some
        return (yield _waiting(request))
    finally:
        for ticket in begun:
            ticket.cancel()


def _waiting(future: Future[Any]) -> Work:
    return Work(lambda: waited(future, current_stop()), lambda: ain_time(asyncio.wrap_future(future)))


class Iterated(Generic[P]):
    """Pieces from a generator, which is made with the first of them: one for calls, or one for coroutines."""

    def __init__(
        self, make: Callable[[], Iterator[P]] | None = None, amake: Callable[[], AsyncIterator[P]] | None = None
    ) -> None:
        self._make, self._amake = make, amake
        self._pieces: Any = None

    def next(self) -> Work:
        """The next piece; None behind the last."""

        def call() -> P | None:
            self._pieces = self._pieces or cast("Any", self._make)()
            return next(self._pieces, None)

        async def coroutine() -> P | None:
            self._pieces = self._pieces or cast("Any", self._amake)()
            return await anext(self._pieces, None)

        return Work(call, coroutine)

    def close(self) -> Work:
        """End the generator; harmless at any time."""

        def call() -> None:
            if (close := getattr(self._pieces, "close", None)) is not None:
                close()

        async def coroutine() -> None:
            if (close := getattr(self._pieces, "aclose", None)) is not None:
                await close()

        return Work(call, coroutine)


class Live(Iterated[P]):
    """An answer whose pieces come from a generator."""

    def draft(self) -> Work:
        """The whole answer with its score, once the pieces have ended."""
        raise NotImplementedError

    def steps(self) -> StreamSteps[P, Any]:
        """Its pieces, and then the draft."""
        try:
            while (piece := (yield self.next())) is not None:
                yield piece
            return (yield self.draft())
        finally:
            yield self.close()


def written(
    answer: StreamSteps[Any, R], stop: Stop, *, show: Callable[[Any], Iterable[P]] = lambda piece: (piece,)
) -> StreamSteps[P, R]:
    """The pieces of an answer as it is written, in the form that `show` gives them.

    A stream that is closed, or whose task is cancelled, stops the model.
    """
    with cancelling(stop):
        try:
            while True:
                with stopping(stop):  # not while the caller has a piece
                    piece = yield from _next(answer)
                if isinstance(piece, _Ended):
                    return cast("_Ended[R]", piece).value
                yield from show(piece)
        finally:
            yield from _end(answer)


def streamed(
    terms: Terms | None,
    answer: StreamSteps[Any, Draft[Any]],
    ask: Ask | None = None,
    *,
    show: Callable[[Any], Iterable[P]] = lambda step: (step,),
    stop: Stop | None = None,
    question: Question | None = None,
    is_recorded: bool = True,
) -> StreamSteps[P, None]:
    """The pieces of an answer as they come, where nothing may be withheld, and the outcome last.

    Else the sentences that are let through while the answer is being written, and the outcome, which begins with them.
    A call of a `question`, which has such terms, is noted in it. Without terms nothing is decided, and the draft goes
    out; unless it is a helper's, a recorder gets it.

    Raises:
        LowConfidenceError: the question has ended, or this call ends it.
        Exception: whatever drafting raises; the one in the outcome's place.
    """
    if terms is None:
        draft = yield from written(answer, stop or Stop(), show=show)
        if is_recorded and (recorder := current_recorder()) is not None:
            recorder.add(draft.verdict, draft.prompt)
        yield from show(Outcome(draft.verdict, draft.answer))
        return
    stop, left = terms.stop() if stop is None else stop, ""

    def let_through(piece: Any) -> Iterable[P]:
        nonlocal left
        if not isinstance(piece, SentencePiece):
            return ()
        left += piece.text
        return show(piece)

    if question is not None:
        question.require_open()
    try:
        draft = yield from written(answer, stop, show=let_through if terms.withholds else show)
        with stopping(stop), cancelling(stop):
            outcome = one((yield from concluded([draft], terms, ask, question=question)))
    except UNWRITTEN as error:
        if left:
            raise
        outcome = not_written(error, terms)
    if not outcome.verdict.text.startswith(left):
        raise AnswerInterruptedError(
            "the end of the answer does not follow the sentences that were delivered; ask again"
        )
    yield from show(outcome)


# The sentences that leave while their answer is still being written, by the rule for the whole answer: `settle` judges
# the part that has ended. A sentence depends on earlier ones alone (`calibration/sentence_gates.py`), so that what
# leaves early is the beginning of the text that the whole answer's verdict delivers.


class EarlySentences:
    """Hands on the sentences of one answer that these terms let through, as they end.

    `known` is the undecided verdict on those that have ended.
    """

    def __init__(self, terms: Terms, put: Callable[[Any], None]) -> None:
        self._terms, self._put = replace(terms, closing_line=""), put
        self.known: Verdict | None = None
        self._left = 0  # characters that have left

    def add(self, draft: Draft[Any]) -> bool:
        """Decide about those that have ended, scored; whether the model continues to write."""
        self.known = draft.verdict
        settled = settle(draft.verdict, self._terms, prompt=draft.prompt)
        verdict = settled.verdict
        if settled.kind == "deliver":
            for sentence in verdict.sentences:
                if sentence.action == "deliver" and sentence.end > self._left:
                    text, self._left = verdict.text[self._left : sentence.end], sentence.end
                    self._put(SentencePiece(text, sentence))
        return not any(sentence.action == "stop" for sentence in verdict.sentences)


class ReportedSentences:
    """Finds the sentences of one answer that these terms let through, as their log-probabilities arrive.

    `options` are those of the call, and `prompt` is the form of its prompt. `text` is the answer so far; once it
    `is_over`, the rest is not delivered, and the text ends behind the sentence that is not let through.
    """

    def __init__(
        self, scorer: ReportedScorer, terms: Terms, *, options: Mapping[str, Any], prompt: PromptForm | None
    ) -> None:
        self._scored, self._prompt = partial(scorer.verdict, options=options, prompt=prompt), prompt
        self._new = list[SentencePiece]()
        self._early = EarlySentences(terms, self._new.append)
        self._ends: list[int] = [0]
        self._entries = list[Any]()
        self._written, self._is_late = b"", False
        self.text, self.is_over = "", False

    @classmethod
    def of(
        cls,
        scorer: ReportedScorer | None,
        terms: Terms | None,
        *,
        options: Mapping[str, Any],
        prompt: PromptForm | None,
    ) -> ReportedSentences | None:
        """None where only the end of the answer decides."""
        if scorer is None or scorer.by_sentence is None or terms is None or current_recorder() is not None:
            return None
        if not terms.delivers_early:
            return None
        return cls(scorer, terms, options=options, prompt=prompt)

    def add(self, text: str, entries: Any) -> list[SentencePiece]:
        """The sentences that may leave now; `text` is the newest piece, and `entries` came with it."""
        if self.is_over:
            return []
        new = list[Any](entries or ())
        self.text += text
        self._entries += new
        self._written += b"".join(bytes_of(entry) or b"" for entry in new)
        self._is_late = self._is_late or len(self._written.strip()) < len(self.text.strip().encode("utf-8", "replace"))
        if self._is_late or not text:
            return []
        self._new.clear()
        if ends := decided(self.text, self._ends[-1]):
            self._ends += ends
            verdict = self._scored(self.text, self._entries, ended=list(pairwise(self._ends)))
            self.is_over = not self._early.add(Draft(verdict, None, self._prompt))
        if self.is_over:
            self.text = self.text[: self._ends[-1]]
        return list(self._new)


# Drivers.


def run_stream(steps: StreamSteps[P, Any]) -> Generator[P]:
    """The pieces of such steps, by calls."""
    failed = None
    try:
        while not isinstance(piece := drive(_next(steps)), _Ended):
            yield piece
    except Exception as error:  # noqa: BLE001 - raised below, where no frame holds a draft
        failed = sealed(error)
    finally:
        drive(_end(steps))
    if failed is not None:
        raise failed


async def arun_stream(steps: StreamSteps[P, Any]) -> AsyncGenerator[P]:
    """As `run_stream`, on the event loop; closing it, or cancelling its task, stops the model."""
    failed = None
    try:
        while not isinstance(piece := await adrive(_next(steps)), _Ended):
            yield piece
    except Exception as error:  # noqa: BLE001 - as above
        failed = sealed(error)
    finally:
        await adrive(_end(steps))
    if failed is not None:
        raise failed


@dataclass(frozen=True)
class _Ended(Generic[R]):
    """What follows the last piece: the value of the steps."""

    value: R


class _Closed(asyncio.CancelledError):
    """The reader has left. (After a `GeneratorExit`, steps within steps could do no more work.)"""


def _next(steps: StreamSteps[P, R], error: BaseException | None = None) -> Steps[P | _Ended[R]]:
    """The work before the next piece, and that piece. With an `error` the steps continue with it."""
    go_on = partial(next, steps) if error is None else partial(steps.throw, error)
    try:
        while isinstance(step := go_on(), Work):
            try:
                go_on = partial(steps.send, (yield step))
            except BaseException as raised:  # noqa: BLE001 - the steps decide
                go_on = partial(steps.throw, raised)
        return step
    except StopIteration as end:
        return _Ended(end.value)
    finally:
        del error, go_on  # they may hold an error, which refers to this frame


def _end(steps: StreamSteps[Any, Any]) -> Steps[None]:
    """The work by which steps end, wherever they are."""
    with suppress(_Closed):
        yield from _next(steps, _Closed())
