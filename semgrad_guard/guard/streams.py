"""The flow for answers that are streamed: live where nothing may be withheld, else the outcome alone.

One generator serves calls and coroutines. It yields pieces of work, as the flow for whole answers does, and between
them the pieces of the answer, which `run_stream` and `arun_stream` hand out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, cast

from semgrad_guard.engine.answers.request import Pieces, Ticket, waited
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.engine.sentences import Span, decided
from semgrad_guard.errors import AnswerCancelledError, AnswerInterruptedError
from semgrad_guard.guard.decision import settle
from semgrad_guard.guard.flow import UNWRITTEN, Ask, Draft, Outcome, concluded, not_written, one
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.question import Question
from semgrad_guard.guard.reported import ReportedScorer, bytes_of
from semgrad_guard.guard.timing import Steps, Work, adrive, ain_time, cancelling, drive, off_loop, sealed
from semgrad_guard.guard.verdicts import current_recorder, record_draft
from semgrad_guard.records import PromptForm, SentenceVerdict, Verdict

P = TypeVar("P")
"""A piece of a stream: of the text, of the thought before it, or anything else that a frontend shows."""
R = TypeVar("R")

StreamSteps = Generator[Work | P, Any, R]
"""Steps that yield pieces between their work, and end with a value."""
_END: Any = object()
"""Follows the last piece."""


@dataclass(frozen=True)
class SentencePiece:
    """A sentence that is let through while its answer is being written: its text, and the verdict on it."""

    text: str
    sentence: SentenceVerdict


class Live(Protocol):
    """An answer that is being written, which begins with the work for its first pieces."""

    def next(self) -> Work:
        """The next pieces, as soon as there are any; None behind the last."""
        ...

    def draft(self) -> Work:
        """The whole answer with its score, once the pieces have ended."""
        ...

    def close(self) -> Work:
        """Stop the model; harmless at any time."""
        ...


class LiveAnswer:
    """An answer that a model is writing: its pieces, then the result of its request, the scored draft (`Live`).

    `submit` has it written, and the given listener gets the pieces. The model stops where this has no holder any more.
    """

    def __init__(self, submit: Callable[[Callable[[Piece], None]], Ticket[Any]]) -> None:
        self._submit, self._pieces = submit, Pieces[Piece]()
        self._ticket: Ticket[Any] | None = None
        self._is_closed = False

    def next(self) -> Work:
        """The next pieces; None behind the last, or where an error has ended the answer."""

        def call() -> Sequence[Piece] | None:
            self._begun()
            return waited(self._pieces.next(), current_stop())

        return Work(call, lambda: self._awaited(lambda _: self._pieces.next()))

    def draft(self) -> Work:
        """The whole answer with its score."""
        return Work(lambda: self._begun().outcome(), lambda: self._awaited(lambda ticket: ticket))

    def close(self) -> Work:
        """Stop the model; harmless at any time."""
        return Work.at_once(self.stop)

    def stop(self) -> None:
        """As `close`, from any thread."""
        self._is_closed = True
        if self._ticket is not None:
            self._ticket.cancel()

    def __del__(self) -> None:
        self.stop()

    def _begun(self) -> Ticket[Any]:
        if self._is_closed:
            raise AnswerCancelledError("the stream was closed before its answer was complete")
        if self._ticket is None:
            pieces = self._pieces  # what the worker holds must not hold this
            self._ticket = self._submit(pieces.put)
            self._ticket.add_done_callback(lambda _: pieces.end())
        return self._ticket

    async def _awaited(self, future_of: Callable[[Ticket[Any]], Future[Any]]) -> Any:
        ticket = self._ticket or await off_loop(self._begun)
        return await ain_time(asyncio.wrap_future(future_of(ticket)))


class Iterated(Generic[P]):
    """Pieces from a generator, which is made with the first of them: one for calls, or one for coroutines."""

    def __init__(
        self, make: Callable[[], Iterator[P]] | None = None, amake: Callable[[], AsyncIterator[P]] | None = None
    ) -> None:
        self._make, self._amake = make, amake
        self._pieces: Any = None

    def next(self) -> Work:
        """The next piece, as `Live.next`."""

        def call() -> list[P] | None:
            self._pieces = self._pieces or cast("Any", self._make)()
            piece = next(self._pieces, _END)
            return None if piece is _END else [piece]

        async def coroutine() -> list[P] | None:
            self._pieces = self._pieces or cast("Any", self._amake)()
            piece = await anext(self._pieces, _END)
            return None if piece is _END else [piece]

        return Work(call, coroutine)

    def close(self) -> Work:
        """End the generator; harmless at any time."""

        async def aclose() -> None:
            if (closed := self._end("aclose")) is not None:
                await closed

        return Work(lambda: self._end("close"), aclose)

    def _end(self, name: str) -> Any:
        close = getattr(self._pieces, name, None)
        return None if close is None else close()


def written(
    live: Live, stop: Stop, *, show: Callable[[Any], Iterable[P]] = lambda piece: (piece,)
) -> StreamSteps[P, Any]:
    """The pieces of an answer as it is written, in the form that `show` gives them; its draft is the value.

    A stream that is closed, or whose task is cancelled, stops the model.
    """
    with cancelling(stop):
        try:
            while True:
                with stopping(stop):  # not while the caller has a piece
                    pieces = yield live.next()
                if pieces is None:
                    break
                for piece in pieces:
                    yield from show(piece)
            with stopping(stop):
                return (yield live.draft())
        finally:
            yield live.close()


def streamed(
    terms: Terms | None,
    live: Live,
    ask: Ask | None = None,
    *,
    show: Callable[[Any], Iterable[P]] = lambda step: (step,),
    stop: Stop | None = None,
    question: Question | None = None,
    is_recorded: bool = True,
) -> StreamSteps[P, None]:
    """The pieces as they come, where nothing may be withheld, and the outcome last.

    Else the sentences that are let through while the answer is being written, and the outcome, which begins with them.
    A call of a `question`, which has such terms, is noted in it. Without terms nothing is decided, and the draft goes
    out; unless it is a helper's, a recorder gets it.

    Raises:
        LowConfidenceError: the question has ended, or this call ends it.
        Exception: whatever drafting raises; the one in the outcome's place.
    """
    if terms is None:
        draft: Draft[Any] = yield from written(live, stop or Stop(), show=show)
        if is_recorded:
            record_draft(draft.verdict, draft.prompt, source=draft.source)
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
        draft = yield from written(live, stop, show=let_through if terms.withholds else show)
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
# the part that has ended. A sentence depends on earlier ones alone (`calibration/sentences.py`), so that what leaves
# early is the beginning of the text that the whole answer's verdict delivers.


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
        self._scorer, self._options, self._prompt = scorer, options, prompt
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
        ends = decided(self.text, self._ends[-1])
        self._new.clear()
        if ends:
            self._ends += ends
            spans = list(zip(self._ends, self._ends[1:], strict=False))
            self.is_over = not self._early.add(self._draft(spans))
        if self.is_over:
            self.text = self.text[: self._ends[-1]]
        return list(self._new)

    def _draft(self, ended: Sequence[Span]) -> Draft[None]:
        verdict = self._scorer.verdict(
            self.text, self._entries, options=self._options, prompt=self._prompt, ended=ended
        )
        return Draft(verdict, None, self._prompt)


# Drivers.


def run_stream(steps: StreamSteps[P, Any]) -> Generator[P]:
    """The pieces of such steps, by calls."""
    failed = None
    try:
        while (piece := drive(_next(steps))) is not _END:
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
        while (piece := await adrive(_next(steps))) is not _END:
            yield piece
    except Exception as error:  # noqa: BLE001 - as above
        failed = sealed(error)
    finally:
        await adrive(_end(steps))
    if failed is not None:
        raise failed


class _Closed(asyncio.CancelledError):
    """The reader has left. (After a `GeneratorExit`, steps within steps could do no more work.)"""


def _next(steps: StreamSteps[P, Any], error: BaseException | None = None) -> Steps[P]:
    """The work before the next piece, and that piece. With an `error` the steps continue with it."""
    value = None
    try:
        while True:
            step = steps.send(value) if error is None else steps.throw(error)
            if not isinstance(step, Work):
                return step
            value, error = None, None
            try:
                value = yield step
            except BaseException as raised:  # noqa: BLE001 - the steps decide
                error = raised
    except StopIteration:
        return _END
    finally:
        del error  # it refers to this frame


def _end(steps: StreamSteps[Any, Any]) -> Steps[None]:
    """The work by which steps end, wherever they are."""
    with suppress(_Closed):
        yield from _next(steps, _Closed())
