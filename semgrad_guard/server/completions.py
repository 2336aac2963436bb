"""Chat completions, whole or as a stream of chunks, each answer with its verdict.

The verdict is in `choices[i].logprobs.semgrad_guard`, which every client lets through, and at the top level as
`semgrad_guard` (a list where there are several answers). In a stream the last delta of a choice has it as well: clients
that put a message together from its deltas keep no other field of a chunk. A sentence that leaves while its answer is
being written, or with its end, has its verdict in the same places as `semgrad_guard_sentence`, but in no delta. The
text that replaces a withheld answer has no log-probabilities and no tokens; where the answer was to be JSON it is a
`refusal`, as in OpenAI's own answers.

Every rule is about chat completions: how a request is read, what is decided, and which parts of an answer leave. The
other protocols are translated to requests for these, and their completions or chunks back (`Translation`).

A stream is made of server-sent events: a comment keeps a waiting one alive, and a client that leaves ends the work.

Why: docs/decisions.md#0141
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from semgrad_guard.errors import InputError
from semgrad_guard.guard import Outcome, Piece, SentencePiece, ThoughtPiece
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import (
    ACTION_HEADER,
    ENFORCED_HEADER,
    ID_HEADER,
    KEY,
    SENTENCE_KEY,
    Answer,
    public_record,
    public_sentence,
    tool_call_fields,
)
from semgrad_guard.server.gate import ENDING, ClientGoneError, HttpError
from semgrad_guard.server.service import Call, Service

Json = dict[str, Any]


@dataclass(frozen=True)
class Translation:
    """A request for a chat completion; subclasses are requests of other protocols, which are translated.

    `body` is that of a chat completion. `names` are the client's names of fields that chat completions name otherwise.
    `end` is the last event of a stream; `prefix` begins the id of a response.
    """

    body: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    end: str = "data: [DONE]\n\n"
    prefix: ClassVar[str] = "chatcmpl-"

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The request with this body."""
        return cls(body)

    def whole(self, completion: Json) -> Json:
        """The response."""
        return completion

    def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """The events of a stream, of its chunks. One with a `type` is also named by it."""
        return chunks

    def failed(self, problem: HttpError) -> Json:
        """The event of an error after the beginning of a stream."""
        return problem.body


def require_none_of(given: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse fields of chat completions that another protocol names otherwise, or does not have.

    Raises:
        InputError: there is one; the message has the protocol's own name for it.
    """
    for name, instead in names.items():
        if given.get(name) is not None:
            raise InputError(f"unknown field: {name!r}; " + (f"use {instead!r}" if instead else "leave it out")).about(
                name
            )


def completion(call: Call, outcomes: Sequence[Outcome[Answer]], *, request_id: str) -> Json:
    """A whole completion."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", **_message(call, outcome)},
            "finish_reason": _finish(outcome),
            "logprobs": _logprobs(outcome),
        }
        for index, outcome in enumerate(outcomes)
    ]
    return {
        **_head(call, request_id, "chat.completion"),
        "choices": choices,
        "usage": usage(call, outcomes),
        KEY: _together(outcomes),
    }


LIMIT_HEADER = "x-semgrad-guard-max-tokens"
"""The operator's limit, where a request set a higher one."""


def limit_headers(call: Call) -> dict[str, str]:
    """The limit that was taken in place of the request's own; empty where that was not so."""
    served = call.served
    own = served.upstream is None or call.cuts is not None  # else the upstream got the request's limit
    lowered = call.request.lowered(served.options.max_tokens) if own else None
    return {} if lowered is None else {LIMIT_HEADER: str(lowered)}


def headers(outcomes: Sequence[Outcome[Answer]]) -> dict[str, str]:
    """The headers of an answer that is complete before it is sent."""
    fields = {ACTION_HEADER: ",".join(outcome.verdict.action for outcome in outcomes)}
    if not all(outcome.verdict.details.enforced for outcome in outcomes):
        fields[ENFORCED_HEADER] = "false"
    ids = [outcome.verdict.decision_id for outcome in outcomes if outcome.verdict.decision_id is not None]
    return {**fields, ID_HEADER: ",".join(ids)} if ids else fields


async def chunks(
    call: Call, steps: AsyncIterator[Step], *, request_id: str, on_usage: Callable[[Json], None]
) -> AsyncIterator[Json]:
    """The chunks of a stream. `on_usage` gets the tokens of all of it, whether or not the client wants them."""
    head, outcomes = _head(call, request_id, "chat.completion.chunk"), list[Outcome[Answer]]()
    sent = thought = ""
    async for step in steps:
        index = len(outcomes)
        if not sent and not thought:
            yield _chunk(head, index, {"role": "assistant", "content": ""})
        if isinstance(step, SentencePiece):
            sent += step.text
            yield _sentence_chunk(head, index, step)
            continue
        if isinstance(step, str):
            sent += step
            yield _chunk(head, index, {"content": step})
            continue
        if isinstance(step, ThoughtPiece):
            thought += step.text
            yield _chunk(head, index, {"reasoning_content": step.text})
            continue
        outcomes.append(step)
        for piece in _sentences_left(step, sent):
            sent += piece.text
            yield _sentence_chunk(head, index, piece)
        for delta in _rest(call, step, sent, thought):
            yield _chunk(head, index, delta)
        record = {KEY: public_record(step.verdict)}
        yield {**_chunk(head, index, record, finish=_finish(step), logprobs=_logprobs(step)), **record}
        sent = thought = ""
    used = usage(call, outcomes)
    on_usage(used)
    if (wanted := call.request.stream_options) is not None and wanted.include_usage:
        yield {**head, "choices": [], "usage": used}


def usage(call: Call, outcomes: Sequence[Outcome[Answer]]) -> Json:
    """The tokens of the prompt, and of the delivered answers.

    Where another server counts several answers together, and some were withheld, or does not count, the scored tokens
    are counted. Its count of a withheld answer's prompt is left out: it need not be about the prompt alone.
    """
    delivered = [(outcome.answer, outcome.verdict) for outcome in outcomes if outcome.answer is not None]
    together = {answer.together for answer, _ in delivered}
    if len(delivered) == len(outcomes) and len(together) == 1 and (whole := together.pop()) is not None:
        written = whole
    else:
        written = sum(_written(answer, verdict) for answer, verdict in delivered)
    shown = call.served.upstream is None or all(outcome.verdict.shows_draft for outcome in outcomes)
    read = max((outcome.verdict.details.prompt_tokens or 0 for outcome in outcomes), default=0) if shown else 0
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _written(answer: Answer, verdict: Verdict) -> int:
    if answer.completion_tokens is not None:
        return answer.completion_tokens
    return 0 if verdict.escalated else verdict.details.scored_tokens  # after an escalation they are the draft's


def _head(call: Call, request_id: str, kind: str) -> Json:
    return {
        "id": f"{Translation.prefix}{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": call.served.name,
        "system_fingerprint": None,
    }


def _chunk(head: Json, index: int, delta: Json, *, finish: str | None = None, logprobs: Json | None = None) -> Json:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return {**head, "choices": [choice]}


def _sentence_chunk(head: Json, index: int, piece: SentencePiece) -> Json:
    """A sentence with its verdict."""
    record = {SENTENCE_KEY: public_sentence(piece.sentence)}
    logprobs = {"content": None, "refusal": None, **record}
    return {**_chunk(head, index, {"content": piece.text}, logprobs=logprobs), **record}


def _sentences_left(outcome: Outcome[Answer], sent: str) -> Iterator[SentencePiece]:
    """The delivered sentences that have not been sent, in the form of those that leave before the end.

    A sentence ends with the first word behind it. If the last one that is delivered left in another form, that would
    tell whether a withheld one behind it is a single word.
    """
    text = outcome.verdict.text
    if outcome.answer is None or not text.startswith(sent):
        return
    for sentence in outcome.verdict.sentences:
        if sentence.action == "deliver" and sentence.end > len(sent):
            piece = text[len(sent) : sentence.end]
            sent += piece
            yield SentencePiece(piece, sentence)


def _message(call: Call, outcome: Outcome[Answer]) -> Json:
    if outcome.answer is None and call.request.wants_json:
        return {"content": None, "refusal": outcome.verdict.text}
    calls = _calls(outcome)
    content = outcome.verdict.text or (None if calls else "")
    return {"content": content, "refusal": None, **_reasoning(outcome), **({"tool_calls": calls} if calls else {})}


def _rest(call: Call, outcome: Outcome[Answer], sent: str, thought: str) -> list[Json]:
    """The parts of an outcome that have not been sent in pieces."""
    if outcome.answer is None and call.request.wants_json:
        return [{"refusal": outcome.verdict.text}]
    text = outcome.verdict.text
    rest = text.removeprefix(sent) if text.startswith(sent) else ""  # another server's reasoning went out before it
    calls = [{"index": index, **call} for index, call in enumerate(_calls(outcome))]
    return [
        *([] if thought else filter(None, [_reasoning(outcome)])),
        *([{"content": rest}] if rest else []),
        *([{"tool_calls": calls}] if calls else []),
    ]


def _reasoning(outcome: Outcome[Answer]) -> Json:
    """The reasoning before a delivered text, under the name that most servers use; withheld where the text is."""
    if outcome.answer is None:
        return {}
    thought = outcome.verdict.details.reasoning if outcome.verdict.escalated is None else outcome.answer.reasoning
    return {"reasoning_content": thought} if thought else {}


def _calls(outcome: Outcome[Answer]) -> list[Json]:
    return [] if outcome.answer is None else [tool_call_fields(call) for call in outcome.answer.tool_calls]


def _finish(outcome: Outcome[Answer]) -> str:
    return "stop" if outcome.answer is None else outcome.answer.finish_reason


def _logprobs(outcome: Outcome[Answer]) -> Json:
    content = None if outcome.answer is None else outcome.answer.logprobs
    return {"content": content, "refusal": None, KEY: public_record(outcome.verdict)}


def _together(outcomes: Sequence[Outcome[Answer]]) -> Json | list[Json]:
    records = [public_record(outcome.verdict) for outcome in outcomes]
    return records[0] if len(records) == 1 else records


T = TypeVar("T")
Step = Piece | SentencePiece | Outcome[Answer]
_BEAT = ": waiting\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; a client that leaves cancels it.

    Raises:
        ClientGoneError: the client has left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def streamed(
    request: Request,
    service: Service,
    call: Call,
    *,
    request_id: str,
    form: Translation,
    beat: float,
    report: Callable[[BaseException], HttpError],
) -> Response:
    """A stream. Its headers wait for its first step, up to the first beat: until then an error has a status.

    Args:
        request: the client's.
        service: answers it.
        call: the request as it was read.
        request_id: names it.
        form: the protocol of the request.
        beat: seconds after which a stream without an event sends a comment.
        report: the error that a client gets for an exception.
    """
    steps = service.steps(call)
    first = asyncio.ensure_future(anext(aiter(steps)))
    try:
        done, _ = await unless_gone(request, asyncio.wait({first}, timeout=beat))
    except (ClientGoneError, asyncio.CancelledError):
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    step = first.result() if done else None
    # Sentences may leave before: a header would tell that none did, and so of withheld ones behind them.
    whole = call.request.count == 1 and call.served.by_sentence is None
    verdict = headers([step]) if isinstance(step, Outcome) and whole else {}
    fields = {"cache-control": "no-store", "x-accel-buffering": "no", **limit_headers(call), **verdict}

    async def again() -> AsyncIterator[Step]:
        yield await first
        async for following in steps:
            yield following

    async def events() -> AsyncGenerator[str]:
        """Chunks as events; an error after the beginning is the last of them."""
        if not done:
            yield _BEAT
        on_usage = partial(service.metrics.used, call.served.name)
        try:
            async for event in form.events(chunks(call, again(), request_id=request_id, on_usage=on_usage)):
                yield _event(event)
        except Exception as error:  # noqa: BLE001 - the status has been sent: the stream holds the error
            yield _event(form.failed(report(error)))
        finally:
            await steps.aclose()
        yield form.end

    return _Events(events(), beat=beat, ending=lambda: _event(form.failed(ENDING)) + form.end, headers=fields)


class _Events(StreamingResponse):
    """A stream of events, with a comment whenever there was none for so long (`beat`).

    It ends as soon as its client has left, in every version of ASGI; and with `ending`, where the server ends before.
    """

    def __init__(
        self, events: AsyncGenerator[str], *, beat: float, ending: Callable[[], str], headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events, self._beat, self._ending = events, beat, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        gone = asyncio.ensure_future(_disconnected(receive))
        following = asyncio.ensure_future(anext(self._events, None))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while True:
                await asyncio.wait({following, gone}, timeout=self._beat, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not following.done():
                    await sent(_BEAT)
                    continue
                event = following.result()
                await sent(event or "", more=event is not None)
                if event is None:
                    return
                following = asyncio.ensure_future(anext(self._events, None))
        except OSError:  # the client has left
            return
        except asyncio.CancelledError:  # the server ends, and the time to finish is over
            await sent(self._ending(), more=False)
        finally:
            gone.cancel()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await self._events.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: Json) -> str:
    named = f"event: {value['type']}\n" if "type" in value else ""
    return f"{named}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
