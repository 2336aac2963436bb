"""Other servers in front of or after the guard: an upstream that writes drafts, and a target for escalations."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from semgrad_guard.calibration.call_options import call_options, cutting_options
from semgrad_guard.engine.prompts.responses import HeldText
from semgrad_guard.errors import InputError, UpstreamError
from semgrad_guard.guard import (
    Draft,
    Iterated,
    Piece,
    Reply,
    ReportedSentences,
    SentencePiece,
    TargetReply,
    Terms,
    ThoughtPiece,
    Waiting,
    Work,
    external,
)
from semgrad_guard.guard.reported import prompt_of
from semgrad_guard.server.answers import KEY, Answer, Cuts, pieces_of
from semgrad_guard.server.protocol import CUTS, Forwarded
from semgrad_guard.server.remote import (
    RemoteServer,
    SentCall,
    SentChunk,
    SentFunction,
    SentMessage,
    SentNames,
    SentUsage,
    answers_in,
    call_of,
    read,
)
from semgrad_guard.server.scheduler import ReportedQueue, Scheduler, logprobs_for
from semgrad_guard.server.writing import ForeignText

_KEPT_BACK = frozenset({"semgrad_guard", "stream", "stream_options", "model", "n"})
_OF_THE_PROMPT = frozenset(
    (
        *("add_generation_prompt", "add_special_tokens", "continue_final_message", "truncate_prompt_tokens"),
        *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "documents", "functions", "transforms"),
        *("reasoning_effort", "reasoning", "thinking", "think", "enable_thinking", "thinking_budget"),
        *("reasoning_budget", "web_search_options", "plugins"),
        *("system", "template", "prompt", "context", "images", "raw", "suffix"),  # Ollama's
    )
)
"""Fields that change the prompt that the other server renders. The scorer would score another prompt."""


@dataclass(frozen=True, eq=False)
class Upstream:
    """Another server that writes the drafts, and their scorer: a local model, or the log-probabilities that it reports.

    `usual` are the options of the calls that a calibration was made with: a request that leaves one out gets it.
    """

    server: RemoteServer
    scheduler: Scheduler | ReportedQueue
    usual: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def sent(self, request: UpstreamRequest) -> dict[str, Any]:
        """The fields for the other server.

        Raises:
            InputError: as `UpstreamRequest.sent`.
        """
        given = {name: value for name, value in request.sent.items() if value is not None or name not in self.usual}
        if not isinstance(self.scheduler, ReportedQueue):
            return given
        wanted, top = self.scheduler.scorer.request, given.get("top_logprobs")
        if isinstance(top, int) and top > wanted["top_logprobs"]:
            wanted["top_logprobs"] = top
        return {**self.usual, **given, **wanted}

    async def drafts(self, request: UpstreamRequest) -> Sequence[Draft[Answer]]:
        """The scored drafts of a request."""
        body = {**self.sent(request), "model": request.model, "n": request.count, "stream": False}
        body = await self.server.chat(body, words=request.cuts is None)
        answers = answers_in(body, request.count)
        return [await self.scored(request, answer) for answer in answers]

    def live(self, request: UpstreamRequest) -> RemoteAnswer:
        """An answer that is being written there."""
        return RemoteAnswer(self, request)

    def early(self, request: UpstreamRequest) -> ReportedSentences | None:
        """The sentences that may leave before their answer ends; None where a copy of the model scores, or the answer
        may be cut at its end."""
        own, cuts = request.read.request, request.cuts or Cuts()
        if not isinstance(self.scheduler, ReportedQueue) or own.tools or own.wants_json or cuts.may_end(request.limit):
            return None
        return ReportedSentences.of(
            self.scheduler.scorer,
            request.terms,
            options=call_options(self.sent(request)),
            prompt=prompt_of(request.read.conversation, request.read.form.tools),
        )

    async def scored(self, request: UpstreamRequest, answer: Answer, *, is_part: bool = False) -> Draft[Answer]:
        """An answer with its score; `is_part`: it was ended behind a doubtful sentence.

        The text of calls is not known, so that they cannot be scored.
        """
        calls = "a tool call from elsewhere cannot be scored" if answer.tool_calls else None
        if isinstance(self.scheduler, ReportedQueue):
            return self._reported(self.scheduler, request, answer, calls, is_part=is_part)
        changed = [name for name in call_options(request.body) if name.rpartition(".")[2] in _OF_THE_PROMPT]
        reason = calls or request.read.unread
        if changed and reason is None:
            reason = f"{', '.join(changed)} of the request changed the prompt, and the scorer does not know how"
        foreign = ForeignText(
            text=answer.text,
            conversation=request.read.conversation,
            form=request.read.form,
            cut=answer.finish_reason == "length",
            reasoning=answer.reasoning,
            reason=reason,
        )
        scored = await self.scheduler.judged(foreign)
        thought = answer.reasoning or scored.verdict.details.reasoning
        facts = {"reasoning": thought or None, "options": call_options(request.sent)}
        verdict = scored.verdict.revised(tool_calls=answer.tool_calls, **facts)
        answer = replace(answer, text=verdict.text)
        if request.cuts:
            pieces = _pieces(answer) or await self.scheduler.pieces(answer.text)
            answer = replace(answer, pieces=pieces)
        return Draft(verdict, answer, scored.prompt)

    def _reported(
        self, queue: ReportedQueue, request: UpstreamRequest, answer: Answer, unscored: str | None, *, is_part: bool
    ) -> Draft[Answer]:
        """An answer with the score of its log-probabilities; a client gets those that it requested."""
        read, options = request.read, call_options(self.sent(request))
        prompt = prompt_of(read.conversation, read.form.tools)
        if unscored is not None:
            verdict = queue.scorer.unscored(answer.text, unscored, options=options, tool_calls=answer.tool_calls)
        else:
            verdict = queue.scorer.verdict(
                answer.text,
                answer.logprobs,
                options=options,
                prompt=prompt,
                cut=answer.finish_reason == "length",
                reasoning=answer.reasoning,
                is_part=is_part,
            )
        if request.cuts:
            answer = replace(answer, pieces=_pieces(answer) or tuple(_WORDS.findall(answer.text)))
        return Draft(verdict, replace(answer, logprobs=logprobs_for(request.body, answer.logprobs)), prompt)


_WORDS = re.compile(r"\s*\S+|\s+$")


def _pieces(answer: Answer) -> tuple[str, ...]:
    """The text that each token adds, by the log-probabilities; empty where these do not begin with the text."""
    tokens = [entry.get("token") for entry in answer.logprobs or ()]
    written = tuple(token for token in tokens if isinstance(token, str))
    if (spelled := "".join(written)) == answer.text:
        return written
    return pieces_of(written, [(0, len(answer.text))]) if spelled.startswith(answer.text) else ()


@dataclass(frozen=True, kw_only=True)
class UpstreamRequest:
    """A client's request to another server: the body as it came, and as this one reads it.

    Where answers may be withheld there are `cuts`, which are made here, and the other server ends an answer after
    `limit` tokens whatever the client requests.
    """

    body: Mapping[str, Any]
    read: Forwarded
    cuts: Cuts | None
    limit: int
    terms: Terms | None = None

    @property
    def model(self) -> str:
        """The other server's name for the model."""
        return self.read.request.model

    @property
    def count(self) -> int:
        """How many answers the client wants."""
        return self.read.request.count

    @property
    def sent(self) -> dict[str, Any]:
        """The fields for the other server, without those that depend on whether it streams.

        Raises:
            InputError: one of them would cut a draft off that is to be decided on as a whole.
        """
        body = _forwarded(self.body)
        if self.cuts is None:
            return body
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        body = {name: value for name, value in body.items() if name not in CUTS}
        if cutting := cutting_options(body):
            raise InputError(
                f"this server decides on whole answers; cut them with stop and max_tokens, not {cutting[0][:64]}"
            ).about(cutting[0][:64])
        return body | {limit: self.limit}


class RemoteAnswer(Iterated[Piece | SentencePiece]):
    """An answer that another server is writing: its pieces, then its scored draft (`Live`). Closing it hangs up."""

    def __init__(self, upstream: Upstream, request: UpstreamRequest) -> None:
        super().__init__(amake=self._shown)
        self._upstream, self._request = upstream, request
        body = {**upstream.sent(request), "model": request.model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        self._chunks = upstream.server.chat_stream(body, words=request.cuts is None)
        self._text, self._calls, self._places = "", list[SentFunction](), dict[int | None, int]()
        self._finish, self._usage = "stop", SentUsage()
        self._logprobs: list[dict[str, Any]] = []
        self._reasoning: str | None = None
        self._held = HeldText()
        self._early = upstream.early(request)

    async def _shown(self) -> AsyncGenerator[Piece | SentencePiece]:
        async with aclosing(self._chunks):
            async for chunk in self._chunks:
                known, entries = len(self._reasoning or ""), len(self._logprobs)
                piece = self._taken(read(SentChunk, chunk))
                if self._early is not None and not self._calls:
                    for sentence in self._early.add(piece, self._logprobs[entries:]):
                        yield sentence
                    if self._early.is_over:
                        self._text = self._early.text
                        return
                if thought := (self._reasoning or "")[known:]:
                    yield ThoughtPiece(thought)
                if piece:
                    self._text += piece
                    if shown := self._held.add(piece):  # the scorer finds the answer in the held text
                        yield shown

    def draft(self) -> Work:
        """The whole answer with its score."""
        return Work.awaited(self._scored)

    async def _scored(self) -> Draft[Answer]:
        answer = Answer(
            text=self._text,
            tool_calls=tuple(map(call_of, self._calls)),
            finish_reason=self._finish,
            logprobs=self._logprobs or None,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            reasoning="" if self._reasoning is None and self._usage.reasoned else self._reasoning,
        )
        is_part = self._early is not None and self._early.is_over
        return await self._upstream.scored(self._request, answer, is_part=is_part)

    def _taken(self, chunk: SentChunk) -> str:
        """The text of one chunk; its other fields are kept."""
        self._usage = chunk.usage or self._usage
        pieces: list[str] = []
        for choice in chunk.choices or ():
            if choice.index != 0:
                raise UpstreamError("the upstream sent several answers, and one was requested")
            delta = choice.delta or SentMessage()
            self._finish = choice.finish_reason or self._finish
            if (thought := delta.thought) is not None:
                self._reasoning = (self._reasoning or "") + thought
            self._logprobs += (choice.logprobs and choice.logprobs.content) or []
            for call in delta.tool_calls or ():
                self._add(call)
            pieces.append(delta.content or delta.refusal or "")
        return "".join(pieces)

    def _add(self, sent: SentCall) -> None:
        """Add a piece to its call. Some servers number no call (Gemini's), or all alike: a new id is a new call."""
        place = self._places.get(sent.index, -1)
        if place < 0 or (sent.id and self._calls[place].id not in ("", sent.id)):
            place = self._places[sent.index] = len(self._calls)
            self._calls.append(SentFunction())
        known, more = self._calls[place], sent.function or SentNames()
        self._calls[place] = SentFunction(
            id=sent.id or known.id,
            name=known.name + (more.name or ""),
            arguments=known.arguments + (more.arguments or ""),
        )


@dataclass(frozen=True, eq=False)
class RemoteTarget:
    """Another server that answers in the place of drafts that are not let through; its answers are not scored."""

    server: RemoteServer
    model: str

    async def ask(self, body: Mapping[str, Any], waiting: Sequence[Waiting[Answer]]) -> Sequence[TargetReply[Answer]]:
        """One answer for each draft that waits, or an error in its place."""
        sent = {**_forwarded(body), "model": self.model, "stream": False}
        sent.pop("logprobs", None)
        sent.pop("top_logprobs", None)
        return await asyncio.gather(*(self._asked(sent) for _ in waiting))

    async def _asked(self, sent: Mapping[str, Any]) -> TargetReply[Answer]:
        try:
            return self._reply(await self.server.chat(sent))
        except Exception as error:  # noqa: BLE001 - in the place of this answer; `on_error` decides
            return error

    def _reply(self, reply: Mapping[str, Any]) -> Reply[Answer]:
        (answer,) = answers_in(reply, 1)
        verdict_or_text = external(answer.text, tool_calls=answer.tool_calls) if answer.tool_calls else answer.text
        return Reply(verdict_or_text, answer)


def _forwarded(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that another server gets as they came, also those that are not known here.

    Clients send back messages with the verdicts that they got from us, which other servers would refuse.
    """
    sent = {name: value for name, value in body.items() if name not in _KEPT_BACK}
    if isinstance(turns := sent.get("messages"), list):
        sent["messages"] = [
            {name: value for name, value in cast("dict[str, Any]", turn).items() if name != KEY}
            if isinstance(turn, dict)
            else turn
            for turn in cast("list[Any]", turns)
        ]
    return sent
