"""Other servers in front of or after the guard: an upstream that writes drafts, and a target for escalations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from semgrad_guard.calibration.binding import LIMITS, call_options, cutting_options
from semgrad_guard.engine.prompts.thoughts import HeldText
from semgrad_guard.errors import InputError, UpstreamError
from semgrad_guard.guard import (
    Draft,
    Live,
    Piece,
    Reply,
    ReportedSentences,
    SentencePiece,
    TargetReply,
    Terms,
    ThoughtPiece,
    Work,
    external,
)
from semgrad_guard.guard.reported import prompt_of
from semgrad_guard.server.answers import KEY, Answer, Cuts, pieces_of
from semgrad_guard.server.protocol import CUTS, Forwarded
from semgrad_guard.server.remote import RemoteServer, RemoteText, SentBody, SentUsage, answers_in
from semgrad_guard.server.scheduler import ForeignText, ReportedQueue, Scheduler

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
        """The fields for the other server, without those that depend on whether it streams.

        Raises:
            InputError: one of them would cut a draft off that is to be decided on as a whole.
        """
        body = _forwarded(request.body)
        if request.cuts is not None:
            limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
            body = {name: value for name, value in body.items() if name not in CUTS}
            if cutting := cutting_options(body):
                name = cutting[0][:64]
                raise InputError(
                    f"this server decides on whole answers; cut them with stop and max_tokens, not {name}"
                ).about(name)
            body[limit] = request.limit
        given = {name: value for name, value in body.items() if value is not None or name not in self.usual}
        if not isinstance(self.scheduler, ReportedQueue):
            return given
        wanted, top = self.scheduler.scorer.request, given.get("top_logprobs")
        if isinstance(top, int) and top > wanted["top_logprobs"]:
            wanted["top_logprobs"] = top
        return {**self.usual, **given, **wanted}

    async def answer(self, request: UpstreamRequest) -> Sequence[Draft[Answer]]:
        """The scored drafts of a request."""
        own = request.read.request
        body = {**self.sent(request), "model": own.model, "n": own.count, "stream": False}
        body = await self.server.chat(body, words=request.cuts is None)
        return [await self.scored(request, answer) for answer in answers_in(body, own.count)]

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

        A client gets the log-probabilities that it requested.
        """
        foreign = ForeignText(
            text=answer.text,
            conversation=request.read.conversation,
            form=request.read.form,
            cut=answer.finish_reason == "length",
            reasoning=answer.reasoning,
            reason=self._unscored(request, answer),
            entries=answer.logprobs,
            options=call_options(self.sent(request)),
            is_part=is_part,
        )
        scored = await self.scheduler.judged(foreign)
        thought = answer.reasoning or scored.verdict.details.reasoning
        facts = {"reasoning": thought or None, "options": foreign.options, "prompt_tokens": answer.prompt_tokens}
        verdict = scored.verdict.revised(tool_calls=answer.tool_calls, **facts)
        answer = replace(answer, text=verdict.text)
        if request.cuts:
            answer = replace(answer, pieces=_pieces(answer) or await self.scheduler.pieces(answer.text))
        answer = replace(answer, logprobs=_logprobs_for(request.body, answer.logprobs))
        return Draft(verdict, answer, scored.prompt)

    def _unscored(self, request: UpstreamRequest, answer: Answer) -> str | None:
        """Why an answer cannot be scored: the text of calls is not known, or not the prompt that a copy would score."""
        if answer.tool_calls:
            return "a tool call from elsewhere cannot be scored"
        if isinstance(self.scheduler, ReportedQueue):
            return None
        changed = [name for name in call_options(request.body) if name.rpartition(".")[2] in _OF_THE_PROMPT]
        if changed and request.read.unread is None:
            return f"{', '.join(changed)} of the request changed the prompt, and the scorer does not know how"
        return request.read.unread


def _logprobs_for(body: Mapping[str, Any], found: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The log-probabilities that a client's request is about, of those that came."""
    if not body.get("logprobs") or found is None or any(entry.get("logprob") is None for entry in found):
        return None
    top = body.get("top_logprobs") or 0
    return [{**entry, "top_logprobs": list(entry.get("top_logprobs") or ())[:top]} for entry in found]


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


class RemoteAnswer(Live[Piece | SentencePiece]):
    """An answer that another server is writing: its pieces, then its scored draft. Closing it hangs up."""

    def __init__(self, upstream: Upstream, request: UpstreamRequest) -> None:
        super().__init__(amake=self._shown)
        self._upstream, self._request = upstream, request
        body = {**upstream.sent(request), "model": request.read.request.model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        self._chunks = upstream.server.chat_stream(body, words=request.cuts is None)
        self._written = RemoteText()
        self._usage: SentUsage | None = None
        self._held, self._early = HeldText(), upstream.early(request)

    async def _shown(self) -> AsyncGenerator[Piece | SentencePiece]:
        written = self._written
        async with aclosing(self._chunks):
            async for chunk in self._chunks:
                thought, entries = len(written.reasoning or ""), len(written.logprobs)
                sent = SentBody.read(chunk)
                self._usage = sent.usage or self._usage
                if any(choice.index != 0 for choice in sent.choices or ()):
                    raise UpstreamError("the upstream sent several answers, and one was requested")
                piece = "".join(map(written.add, sent.choices or ()))
                if self._early is not None and not written.calls:
                    for sentence in self._early.add(piece, written.logprobs[entries:]):
                        yield sentence
                    if self._early.is_over:
                        written.text = self._early.text
                        return
                if more := (written.reasoning or "")[thought:]:
                    yield ThoughtPiece(more)
                if piece:
                    written.text += piece
                    if shown := self._held.add(piece):  # the scorer finds the answer in the held text
                        yield shown

    def draft(self) -> Work:
        """The whole answer with its score."""
        return Work.awaited(self._scored)

    async def _scored(self) -> Draft[Answer]:
        is_part = self._early is not None and self._early.is_over
        return await self._upstream.scored(self._request, self._written.answer(self._usage), is_part=is_part)


@dataclass(frozen=True, eq=False)
class RemoteTarget:
    """Another server that answers in the place of drafts that are not let through; its answers are not scored."""

    server: RemoteServer
    model: str

    async def ask(
        self, body: Mapping[str, Any], count: int, *, estimator: str, limit: int
    ) -> Sequence[TargetReply[Answer]]:
        """So many answers of up to `limit` tokens, or errors in their place; `estimator` is that of the drafts."""
        sent: dict[str, Any] = {**_forwarded(body), "model": self.model, "stream": False}
        sent |= {name: limit for name in LIMITS if isinstance(sent.get(name), int) and sent[name] > limit}
        sent.pop("logprobs", None)
        sent.pop("top_logprobs", None)
        return await asyncio.gather(*(self._asked(sent, estimator) for _ in range(count)))

    async def _asked(self, sent: Mapping[str, Any], estimator: str) -> TargetReply[Answer]:
        try:
            (answer,) = answers_in(await self.server.chat(sent), 1)
        except Exception as error:  # noqa: BLE001 - in the place of this answer; `on_error` decides
            return error
        used = {"prompt_tokens": answer.prompt_tokens, "answer_tokens": answer.completion_tokens}
        return Reply(external(answer.text, tool_calls=answer.tool_calls, estimator=estimator, **used), answer)


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
