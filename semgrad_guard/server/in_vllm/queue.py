"""`WorkerQueue`: vLLM's engine writes a request's answers, its worker scores those that are done together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from secrets import token_hex
from typing import Any, TypeVar

from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.prompts.reasoning import HeldText
from semgrad_guard.engine.scoring.segments import Segment
from semgrad_guard.engine.sentences import By
from semgrad_guard.engine.worker import Batching
from semgrad_guard.errors import InputError, QueueFullError, ScoringError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Draft, ain_time
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.in_vllm.messages import (
    ELSEWHERE,
    METHOD,
    OPEN,
    READ,
    SCORE,
    SEGMENTS,
    Call,
    Failed,
    Opening,
    Read,
    ScoredDraft,
    ToRead,
    Written,
)
from semgrad_guard.server.settings import ServerSettings
from semgrad_guard.server.writing import AnswerRequest, ForeignText
from semgrad_guard.vllm.engine import sampling_of
from semgrad_guard.vllm.shared_weights import library

A = TypeVar("A")
R = TypeVar("R")
_RETRY = 5
"""Seconds after which a refused client may try again."""
_ENDED = "vLLM's engine has ended; no request can be answered. Start it again"


class WorkerQueue:
    """A `ModelQueue` in vLLM's server. A cancelled request has vLLM write no further.

    Args:
        client: vLLM's engine client.
        name: the model's name.
        estimator: scores the answers, in the worker.
        limit: how many requests may be here at once; one more is refused.
    """

    served = False

    def __init__(self, client: Any, name: str, estimator: Estimator, *, limit: int) -> None:
        self.name, self.estimator_name, self.limit = name, estimator.name, limit
        self._client, self._running = client, 0
        self._waiting: list[tuple[Written, asyncio.Future[list[ScoredDraft] | Failed]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._abandoned: list[str] = []  # names of answers whose callers have left

    @property
    def batching(self) -> Batching:
        """vLLM's own."""
        return "steps"

    @property
    def depth(self) -> int:
        """Requests that are written and wait for their scores; vLLM alone knows which prompts wait."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        return self._running >= self.limit

    @property
    def is_alive(self) -> bool:
        """Whether vLLM's engine is."""
        return not self._client.errored

    async def open(self, settings: ServerSettings) -> None:
        """Have the worker make its scoring model.

        Raises:
            SemGradGuardError: it cannot be made, or a calibration is not of it.
            InputError: the worker cannot score.
        """
        await self._call(OPEN, Opening(settings=settings, name=self.name))

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """As `ModelQueue.answer`."""
        if self.is_full:
            raise QueueFullError(
                f"{self._running} requests are with {self.name} already, which is the limit. Try again in {_RETRY} s",
                retry_after=_RETRY,
            )
        self._running += 1
        try:
            return await ain_time(self._answered(request))
        finally:
            self._running -= 1

    async def judged(self, text: ForeignText) -> Draft[None]:
        """As `ModelQueue.judged`."""
        return _draft(await ain_time(self._call(ELSEWHERE, text)))

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        """As `ModelQueue.segments`."""
        segments = await ain_time(self._call(SEGMENTS, (text, by)))
        return [(Segment(piece, start, end, None), value) for piece, start, end, value in segments]

    def close(self) -> None:
        """Nothing is held here: vLLM ends its requests itself."""

    # One request.

    async def _answered(self, request: AnswerRequest) -> list[Draft[Answer]]:
        names = tuple(f"semgrad-guard-{token_hex(8)}" for _ in range(request.count))
        try:
            abandoned, self._abandoned = tuple(self._abandoned), []
            read = await self._call(READ, ToRead(request=request, names=names, abandoned=abandoned))
            # Text that may turn out to be a call, or reasoning, is not shown before it is known to be neither.
            on_piece = None if request.form.tools or request.count > 1 or read.thinks else request.on_piece
            async with asyncio.TaskGroup() as group:
                named = zip(names, read.options, strict=True)
                tasks = [group.create_task(self._written(name, read, options, on_piece)) for name, options in named]
            answers = tuple(task.result() for task in tasks)
            scored = await self._scored(Written(request=request, names=names, answers=answers))
        except BaseException as error:
            self._abandoned += names  # the worker learns it with the next request
            together: tuple[BaseException, ...] = getattr(error, "exceptions", ())  # of tasks that failed together
            if together:
                raise together[0] from None
            raise
        return [_draft(draft) for draft in scored]

    async def _written(
        self, name: str, read: Read, options: GenerationOptions, on_piece: Callable[[str], None] | None
    ) -> tuple[int, ...]:
        """The tokens of one answer; leaving early has vLLM end it."""
        vllm, ids, held = library("vllm.sampling_params"), list[int](), HeldText()
        sampling = sampling_of(  # where an answer ends is seen once more where it is scored
            options,
            stop=list(options.stop),
            stop_token_ids=list(read.end_tokens),
            output_kind=vllm.RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(read.ids)}
        outputs = self._client.generate(prompt, sampling, name)
        try:
            async for output in outputs:
                (completion,) = output.outputs
                ids += completion.token_ids
                if on_piece is not None and (shown := held.add(completion.text)):
                    on_piece(shown)
        except (ValueError, library("vllm.exceptions").VLLMClientError) as error:
            raise InputError(f"vLLM does not take this request: {error}") from error
        except library("vllm.v1.engine.exceptions").EngineDeadError as error:
            raise ScoringError(_ENDED) from error
        finally:
            await outputs.aclose()
        return tuple(ids)

    async def _scored(self, written: Written) -> list[ScoredDraft]:
        """The drafts, scored together with others that were finished meanwhile."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((written, future))
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._score_all())
        drafts = await future
        if isinstance(drafts, Failed):
            raise drafts.error()
        return drafts

    async def _score_all(self) -> None:
        """Score the answers that wait, until there are none; those that come meanwhile wait for the next round."""
        try:
            while self._waiting:
                await asyncio.sleep(0)  # those that are done in the same step of the engine
                taken, self._waiting = self._waiting, []
                taken = [one for one in taken if not one[1].done()]  # a caller may have left
                try:
                    results = await self._call(SCORE, [written for written, _ in taken]) if taken else []
                except Exception as error:  # noqa: BLE001 - raised by the callers
                    results = [Failed.of(error)] * len(taken)
                for (_, future), result in zip(taken, results, strict=True):
                    if not future.done():
                        future.set_result(result)
        finally:
            self._scoring = None

    async def _call(self, call: Call[A, R], sent: A) -> R:
        payload = call.sent.dump_json(sent).decode()
        try:
            (reply,) = await self._client.collective_rpc(METHOD, args=(call.name, payload))
        except Exception as error:
            if self._client.errored:
                raise ScoringError(_ENDED) from error
            raise InputError(
                "vLLM's worker cannot score: start `vllm serve` with --worker-extension-cls "
                f"semgrad_guard.server.in_vllm.worker.ScoringWorker ({type(error).__name__})"
            ) from error
        return call.read(reply)


def _draft(scored: ScoredDraft) -> Draft[Any]:
    return Draft(scored.verdict, scored.answer, scored.prompt)
