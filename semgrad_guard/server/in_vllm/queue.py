"""`WorkerQueue`: vLLM's engine writes a request's answers, its worker scores those that are done together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from secrets import token_hex
from typing import Any, TypeVar

from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.prompts.reasoning import HeldText
from semgrad_guard.engine.scoring.segments import By, Segment
from semgrad_guard.errors import InputError, QueueFullError, ScoringError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Draft, ain_time
from semgrad_guard.records import Message
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.batching import Batching
from semgrad_guard.server.in_vllm.messages import (
    ELSEWHERE,
    METHOD,
    OPEN,
    READ,
    SCORE,
    SEGMENTS,
    Asked,
    Call,
    Elsewhere,
    Failed,
    Opening,
    Read,
    ScoredDraft,
    ToRead,
    Written,
)
from semgrad_guard.server.settings import ServerSettings
from semgrad_guard.server.writing import AnswerRequest
from semgrad_guard.vllm.sampling import sampling_of
from semgrad_guard.vllm.shared_weights import library

A = TypeVar("A")
R = TypeVar("R")
_RETRY = 5
"""Seconds after which a client that was sent away may ask again."""
_ENDED = "vLLM's engine has ended; nothing is answered any more. Start it again"


class WorkerQueue:
    """A `ModelQueue` in vLLM's server. Whoever is cancelled has vLLM write no further.

    Args:
        client: vLLM's engine client.
        name: the model's name.
        estimator: scores the answers, in the worker.
        limit: how many requests may be here at once; one more is refused.
    """

    served = False

    def __init__(self, client: Any, name: str, estimator: Estimator, *, limit: int) -> None:
        self.name, self.estimator, self.limit = name, estimator, limit
        self._client, self._running = client, 0
        self._waiting: list[tuple[Written, asyncio.Future[list[ScoredDraft] | Failed]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._let_go: list[str] = []  # names of answers that nobody waits for any more

    @property
    def batching(self) -> Batching:
        """vLLM's own."""
        return "steps"

    @property
    def depth(self) -> int:
        """Requests that are written and wait for their scores; which prompts wait is vLLM's to know."""
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
            InputError: the worker knows nothing of scoring.
        """
        await self._ask(OPEN, Opening(settings=settings, name=self.name))

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """The scored drafts of a request.

        Raises:
            QueueFullError: too many are here already.
            SemGradGuardError: whatever answering raises.
        """
        if self.is_full:
            said = f"{self._running} requests are with {self.name} already, which is the limit. Ask again in {_RETRY} s"
            raise QueueFullError(said, retry_after=_RETRY)
        self._running += 1
        try:
            return await ain_time(self._answered(request))
        finally:
            self._running -= 1

    async def scored(
        self,
        conversation: tuple[Message, ...],
        text: str,
        *,
        form: AnswerForm | None = None,
        cut: bool = False,
        reasoned: bool = False,
    ) -> Draft[None]:
        """A text from elsewhere as the answer to a conversation, with its score."""
        asked = Elsewhere(conversation=conversation, text=text, form=form or AnswerForm(), cut=cut, reasoned=reasoned)
        return _draft(await ain_time(self._ask(ELSEWHERE, asked)))

    async def segments(
        self, conversation: tuple[Message, ...], text: str, *, by: By
    ) -> list[tuple[Segment, float | None]]:
        """A text's sentences or clauses, each with an uncertainty of its own; None where it has none.

        Raises:
            InputError: the estimator compares whole answers.
        """
        asked = Elsewhere(conversation=conversation, text=text, by=by)
        found = await ain_time(self._ask(SEGMENTS, asked))
        return [(Segment(piece, start, end, None), value) for piece, start, end, value in found]

    async def unscored(self, text: str, reason: str, form: AnswerForm | None = None) -> Draft[None]:
        """A text from elsewhere that cannot be scored, with the reason."""
        asked = Elsewhere(text=text, reason=reason, form=form or AnswerForm())
        return _draft(await ain_time(self._ask(ELSEWHERE, asked)))

    def close(self) -> None:
        """Nothing is held here: vLLM ends its requests itself."""

    # One request.

    async def _answered(self, request: AnswerRequest) -> list[Draft[Answer]]:
        asked = Asked(**{each.name: getattr(request, each.name) for each in fields(Asked)})
        names = tuple(f"semgrad-guard-{token_hex(8)}" for _ in range(request.count))
        try:
            let_go, self._let_go = tuple(self._let_go), []
            read = await self._ask(READ, ToRead(asked=asked, names=names, let_go=let_go))
            # Text that may turn out to be a call, or reasoning, is not shown before it is known to be none.
            heard = None if request.form.tools or request.count > 1 or read.thinks else request.heard
            async with _first_error(), asyncio.TaskGroup() as group:
                each = zip(names, read.options, strict=True)
                tasks = [group.create_task(self._written(name, read, options, heard)) for name, options in each]
            answers = tuple(task.result() for task in tasks)
            scored = await self._scored(Written(asked=asked, names=names, answers=answers))
        except BaseException:
            self._let_go += names  # the worker is told with the next request
            raise
        return [_draft(each) for each in scored]

    async def _written(
        self, name: str, read: Read, options: GenerationOptions, heard: Callable[[str], None] | None
    ) -> tuple[int, ...]:
        """The tokens of one answer; leaving early has vLLM let go of it."""
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
                if heard is not None and (shown := held.add(completion.text)):
                    heard(shown)
        except (ValueError, library("vllm.exceptions").VLLMClientError) as error:
            raise InputError(f"vLLM does not take this request: {error}") from error
        except library("vllm.v1.engine.exceptions").EngineDeadError as error:
            raise ScoringError(_ENDED) from error
        finally:
            await outputs.aclose()
        return tuple(ids)

    async def _scored(self, written: Written) -> list[ScoredDraft]:
        """The drafts, scored together with others that were done meanwhile."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((written, future))
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._score_all())
        found = await future
        if isinstance(found, Failed):
            raise found.error()
        return found

    async def _score_all(self) -> None:
        """Score what waits, as long as there is something; what is done meanwhile waits for the next time."""
        try:
            while self._waiting:
                await asyncio.sleep(0)  # those that are done in the same step of the engine
                taken, self._waiting = self._waiting, []
                taken = [each for each in taken if not each[1].done()]  # somebody may have gone
                try:
                    found = await self._ask(SCORE, [written for written, _ in taken]) if taken else []
                except Exception as error:  # noqa: BLE001 - raised by whoever waits
                    found = [Failed.of(error)] * len(taken)
                for (_, future), each in zip(taken, found, strict=True):
                    if not future.done():
                        future.set_result(each)
        finally:
            self._scoring = None

    async def _ask(self, call: Call[A, R], sent: A) -> R:
        payload = call.sent.dump_json(sent).decode()
        try:
            (said,) = await self._client.collective_rpc(METHOD, args=(call.name, payload))
        except Exception as error:
            if self._client.errored:
                raise ScoringError(_ENDED) from error
            raise InputError(
                "vLLM's worker cannot score: start `vllm serve` with --worker-extension-cls "
                f"semgrad_guard.server.in_vllm.worker.ScoringWorker ({type(error).__name__})"
            ) from error
        return call.read(said)


@asynccontextmanager
async def _first_error() -> AsyncGenerator[None]:
    """Of several tasks that failed together, the first error."""
    try:
        yield
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None


def _draft(found: ScoredDraft) -> Draft[Any]:
    return Draft(found.verdict, found.answer, found.prompt)
