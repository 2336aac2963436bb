"""`WorkerQueue`: vLLM's engine writes a request's answers, its worker scores those that are done together.

`Round` holds what the worker scores together. `Part`: sentences of an answer leave while vLLM writes it; the server's
terms decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any, Generic, TypeVar

from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.sentence_evidence import OpenSentences
from semgrad_guard.engine.answers.writing import CertainText, Piece
from semgrad_guard.engine.prompts.thoughts import Codec
from semgrad_guard.errors import InputError, ScoringError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Draft, EarlySentences, ain_time
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.in_vllm.scoring_worker import (
    ELSEWHERE,
    METHOD,
    OPEN,
    READ,
    SCORE,
    SEGMENTS,
    SENTENCES,
    Begun,
    Call,
    Failed,
    Opening,
    Read,
    ScoredPart,
    ToRead,
    Written,
)
from semgrad_guard.server.scheduler import AnswerRequest, Batching, ForeignText, ModelQueue, Segment
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.vllm.engine import sampling_of
from semgrad_guard.vllm.shared_weights import library

A = TypeVar("A")
R = TypeVar("R")
_ENDED = "vLLM's engine has ended; no request can be answered. Start it again"


class Round(Generic[A, R]):
    """Answers that the worker scores together with others that were handed over meanwhile."""

    def __init__(self, score: Callable[[list[A]], Awaitable[Sequence[R | Failed]]]) -> None:
        self._score = score
        self._waiting: list[tuple[A, asyncio.Future[R | Failed]]] = []
        self._scoring: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def result(self, sent: A) -> R:
        """The result for one of them.

        Raises:
            SemGradGuardError: it cannot be scored.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((sent, future))
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._score_all())
        result = await future
        if isinstance(result, Failed):
            raise result.error()
        return result

    async def _score_all(self) -> None:
        """Score the answers that wait, until there are none; those that come meanwhile wait for the next round."""
        while self._waiting:
            await asyncio.sleep(0)  # those that are done in the same step of the engine
            taken, self._waiting = [one for one in self._waiting if not one[1].done()], []  # a caller may have left
            try:
                results = list(await self._score([sent for sent, _ in taken])) if taken else []
                if len(results) != len(taken):
                    raise ValueError(f"{len(results)} results for {len(taken)} answers")
            except Exception as error:  # noqa: BLE001 - raised by the callers
                results = [Failed.of(error)] * len(taken)
            for (_, future), result in zip(taken, results, strict=True):
                if not future.done():
                    future.set_result(result)
        self._scoring = None


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
    """The sentences that have ended in the answer of this name, and leave as far as they are let through (`let`).

    With so many `tokens` the answer ends, behind a sentence that ends it; None: none does.
    """

    def __init__(self, name: str, let: EarlySentences, scores: Round[Begun, ScoredPart | None]) -> None:
        self.open, self.let = OpenSentences(), let
        self.tokens: int | None = None
        self._name, self._scores = name, scores
        self._scoring: asyncio.Task[None] | None = None

    def goes_on(self, answer: BegunAnswer) -> bool:
        """After each step of vLLM's: have sentences scored that have ended; whether it shall write more.

        Raises:
            SemGradGuardError: they cannot be scored, or the caller has left.
        """
        if self._scoring is not None and self._scoring.done():
            self._scoring.result()
            self._scoring = None
        if self._scoring is None and self.open.is_due and self.tokens is None:
            self._scoring = asyncio.ensure_future(self._score(answer))
        return self.tokens is None

    async def end(self) -> None:
        """Wait for what is being scored; sentences behind it are scored with the whole answer.

        Raises:
            SemGradGuardError: as above.
        """
        if self._scoring is not None:
            await self._scoring

    async def close(self) -> None:
        """Hand on nothing more; harmless at any time."""
        if self._scoring is not None:
            self._scoring.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._scoring

    async def _score(self, answer: BegunAnswer) -> None:
        begun = Begun(name=self._name, tokens=answer.spelled, spans=tuple(self.open.spans), known=self.let.known)
        scored = await self._scores.result(begun)
        self.open.hand_over(self.open.known if scored is None else len(begun.spans))
        if scored is not None and not self.let.add(scored.draft):
            self.tokens = scored.tokens


class WorkerQueue(ModelQueue):
    """A `ModelQueue` in vLLM's server, where the engine batches. A cancelled request has vLLM write no further.

    Args:
        client: vLLM's engine client.
        name: the model's name.
        estimator: scores the answers, in the worker.
        codec: the model's tokens as text.
        limit: how many requests may be here at once; one more is refused.
    """

    def __init__(self, client: Any, name: str, estimator: Estimator, codec: Codec, *, limit: int) -> None:
        self.name, self.estimator_name, self.limit = name, estimator.name, limit
        self._client, self._running = client, 0
        self._codec = codec
        self._parts: Round[Begun, ScoredPart | None] = Round(partial(self._call, SENTENCES))
        self._finished: Round[Written, list[Draft[Answer]]] = Round(partial(self._call, SCORE))
        self._abandoned: list[str] = []  # names of answers whose callers have left

    @property
    def batching(self) -> Batching:
        return "steps"

    @property
    def depth(self) -> int:
        """Requests that are written and wait for their scores; vLLM alone knows which prompts wait."""
        return len(self._finished)

    @property
    def is_full(self) -> bool:
        return self._running >= self.limit

    async def open(self, settings: ServerSettings) -> None:
        """Have the worker make its scoring model.

        Raises:
            SemGradGuardError: it cannot be made, or a calibration is not of it.
            InputError: the worker cannot score.
        """
        await self._call(OPEN, Opening(settings=settings, name=self.name))

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        self.require_room()
        self._running += 1
        try:
            return await ain_time(self._answered(request))
        finally:
            self._running -= 1

    async def judged(self, text: ForeignText) -> Draft[None]:
        return await ain_time(self._call(ELSEWHERE, text))

    async def segments(self, text: ForeignText) -> list[Segment]:
        return await ain_time(self._call(SEGMENTS, text))

    # One request.

    async def _answered(self, request: AnswerRequest) -> list[Draft[Answer]]:
        names = tuple(f"semgrad-guard-{token_hex(8)}" for _ in range(request.count))
        abandoned, self._abandoned = tuple(self._abandoned), []
        try:
            read = await self._call(READ, ToRead(request=request, names=names, abandoned=abandoned))
            abandoned = ()  # the worker knows them
            terms, part = request.terms, None
            if terms is not None and request.on_piece is not None and terms.delivers_early and read.has_parts:
                part = Part(names[0], EarlySentences(terms, request.on_piece), self._parts)
            # Text that may turn out to be a call is not shown before it is known to be none.
            shown = None if request.form.tools or request.count > 1 else request.on_piece
            listener = shown if part is None else part.open.add
            answers = [BegunAnswer(self._codec, read, options, listener) for options in read.options]
            async with asyncio.TaskGroup() as group:
                for name, options, answer in zip(names, read.options, answers, strict=True):
                    group.create_task(self._write(answer, self._generate(name, read, options), part))
            tokens, known = part and part.tokens, part and part.let.known
            ids = tuple(tuple(answer.ids[:tokens]) for answer in answers)
            written = Written(names=names, answers=ids, stopped=tokens is not None, known=known)
            return await self._finished.result(written)
        except BaseException as error:
            self._abandoned += [*abandoned, *names]  # the worker learns it with the next request
            together: tuple[BaseException, ...] = getattr(error, "exceptions", ())  # of tasks that failed together
            if together:
                raise together[0] from None
            raise

    def _generate(self, name: str, read: Read, options: GenerationOptions) -> Any:
        """vLLM's outputs of one answer."""
        vllm = library("vllm.sampling_params")
        sampling = sampling_of(  # where an answer ends is seen once more where it is scored, and alone behind a thought
            options,
            stop=[] if read.thinking else list(options.stop),
            stop_token_ids=list(read.end_tokens),
            output_kind=vllm.RequestOutputKind.DELTA,
        )
        return self._client.generate({"prompt_token_ids": list(read.ids)}, sampling, name)

    async def _write(self, answer: BegunAnswer, outputs: Any, part: Part | None) -> None:
        """Take in the tokens of one answer; leaving early has vLLM end it."""
        try:
            async for output in outputs:
                (completion,) = output.outputs
                answer.add(completion.token_ids)
                if part is not None and not part.goes_on(answer):
                    break
            if part is not None:
                await part.end()
        except (ValueError, library("vllm.exceptions").VLLMClientError) as error:
            raise InputError(f"vLLM does not take this request: {error}") from error
        except library("vllm.v1.engine.exceptions").EngineDeadError as error:
            raise ScoringError(_ENDED) from error
        finally:
            await outputs.aclose()
            if part is not None:
                await part.close()

    async def _call(self, call: Call[A, R], sent: A) -> R:
        payload = call.sent.dump_json(sent).decode()
        try:
            (reply,) = await self._client.collective_rpc(METHOD, args=(call.name, payload))
        except Exception as error:
            if self._client.errored:
                raise ScoringError(_ENDED) from error
            raise InputError(
                "vLLM's worker cannot score: start `vllm serve` with --worker-extension-cls "
                f"semgrad_guard.server.in_vllm.scoring_worker.ScoringWorker ({type(error).__name__})"
            ) from error
        return call.read(reply)
