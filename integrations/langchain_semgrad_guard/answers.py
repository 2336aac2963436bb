"""The answers to several calls under one set of rules: from results to drafts, from outcomes to results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from langchain_core.callbacks import CallbackManager
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from langchain_semgrad_guard.rules import Rules
from langchain_semgrad_guard.targets import Asked, Said, escalating
from semgrad_guard.guard import Draft, Outcome, Terms, Waiting
from semgrad_guard.records import PromptForm


@dataclass(frozen=True, eq=False)
class Call:
    """One list of messages to answer, its options, the rules for it, and who hears runs inside its run."""

    messages: list[BaseMessage]
    stop: list[str] | None
    options: Mapping[str, Any]
    rules: Rules | None = None
    heard: CallbackManager = field(default_factory=lambda: CallbackManager(handlers=[]))
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its options as a target is told them: tools as the caller described them, not in one provider's form."""

    @property
    def source(self) -> str | None:
        """The id of its run, if that is known."""
        return None if self.heard.parent_run_id is None else str(self.heard.parent_run_id)

    @property
    def withholds(self) -> bool:
        """Whether its answer may be kept back."""
        return self.rules is not None and self.rules.terms.withholds


class Answers:
    """What is made of one group of calls. A call has one answer, or as many as its result holds (`n`)."""

    def __init__(self, rules: Rules, calls: Sequence[Call]) -> None:
        self.rules, self._calls = rules, calls
        self._results: Sequence[ChatResult | Exception] = ()
        self._drafts: list[tuple[Call, AIMessage | None]] = []

    def terms(self, limit: float | None) -> Terms:
        """The rules' terms; the model's own limit where they set none."""
        terms = self.rules.terms
        return terms if limit is None or terms.timeout is not None else replace(terms, timeout=limit)

    def drafts(
        self, results: Sequence[ChatResult | Exception], form: Callable[[Call], PromptForm | None]
    ) -> list[Draft[AIMessage] | Exception]:
        """The results' messages as drafts, call by call; an error stands for its call."""
        self._results = results
        drafts: list[Draft[AIMessage] | Exception] = []
        for call, result in zip(self._calls, results, strict=True):
            if isinstance(result, Exception):
                self._drafts.append((call, None))
                drafts.append(result)
                continue
            prompt = form(call)
            for generation in result.generations:
                message = cast("AIMessage", generation.message)
                self._drafts.append((call, message))
                drafts.append(self.rules.draft(message, prompt, call.source))
        return drafts

    def ask(self, waiting: Sequence[Waiting[AIMessage]]) -> Sequence[Said]:
        """What the target says."""
        if self.rules.target is None:
            return ()
        with escalating(self.rules.owner):
            return self.rules.target.ask([self._asked(each) for each in waiting])

    async def aask(self, waiting: Sequence[Waiting[AIMessage]]) -> Sequence[Said]:
        """Like `ask`, without blocking the event loop."""
        if self.rules.target is None:
            return ()
        with escalating(self.rules.owner):
            return await self.rules.target.aask([self._asked(each) for each in waiting])

    def delivered(self, outcomes: Sequence[Outcome[AIMessage] | Exception]) -> list[ChatResult | Exception]:
        """One result for each call, in results of our own: the drafts' objects may sit in a cache."""
        pairs = iter(zip(self._drafts, outcomes, strict=True))
        return [self._delivered(result, pairs) for result in self._results]

    def message(self, outcome: Outcome[AIMessage]) -> AIMessage:
        """The message of a stream's outcome."""
        return self.rules.delivered(outcome, outcome.answer)

    def _asked(self, waiting: Waiting[AIMessage]) -> Asked:
        call, _ = self._drafts[waiting.index]
        return Asked(call.messages, call.stop, call.told, call.heard, waiting.answer, waiting.verdict)

    def _delivered(self, result: ChatResult | Exception, pairs: Any) -> ChatResult | Exception:
        drafts = [None] if isinstance(result, Exception) else result.generations
        generations: list[ChatGeneration] = []
        error: Exception | None = None
        for generation, ((_, draft), outcome) in zip(drafts, pairs, strict=False):
            if isinstance(outcome, Exception):
                error = error or outcome
                continue
            message = self.rules.delivered(outcome, draft)
            whole = outcome.answer is draft and outcome.verdict.draft is None
            info = generation.generation_info if generation is not None and whole else None
            generations.append(ChatGeneration(message=message, generation_info=info))
        output = None if isinstance(result, Exception) else result.llm_output
        return error or ChatResult(generations=generations, llm_output=output)
