"""`UncertaintyEvaluator`: LlamaIndex's evaluator interface on the model's own uncertainty, without a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.evaluation import BaseEvaluator, EvaluationResult
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType

from llama_index_semgrad_guard.engines import QUESTION_KEY
from llama_index_semgrad_guard.llm import SemGradLLM
from llama_index_semgrad_guard.records import get_verdict, text_of
from semgrad_guard import METADATA_KEY, Policy, Verdict
from semgrad_guard.errors import EmptyResponseError, InputError
from semgrad_guard.guard import Terms, off_loop, settle, undecided
from semgrad_guard.guard.policy import require_policy
from semgrad_guard.records import digest_of


class UncertaintyEvaluator(BaseEvaluator):
    """Tells how sure the model is of a response, and whether the policy would let it through.

        UncertaintyEvaluator(llm, Policy.from_calibration(calibration)).evaluate(query=..., response=...).score

    `score` is the calibrated P(correct), None for a bare policy; `passing` is the policy's decision; `feedback` is the
    reason why it does not pass, and how uncertain the response is. A response without a score is an invalid result that
    passes only if `on_unscored` is "answer".

    Args:
        llm: scores responses of any author, and writes `contexts` into the prompt as its query engine would.
        policy: which scores pass. A calibrated policy is checked against each score's own record.
        text_qa_template: the prompt that responses with contexts were made from; default: LlamaIndex's own.
    """

    def __init__(self, llm: SemGradLLM, policy: Policy, *, text_qa_template: BasePromptTemplate | None = None) -> None:
        if not isinstance(llm, SemGradLLM):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no checker
            raise InputError(f"a {type(llm).__name__} scores nothing; pass a SemGradLLM on the weights that answered")
        self._llm, self._policy = llm, require_policy(policy)
        self._template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._template}

    def _update_prompts(self, prompts_dict: PromptDictType) -> None:
        self._template = prompts_dict.get("text_qa_template", self._template)

    async def aevaluate(
        self,
        query: str | None = None,
        response: str | None = None,
        contexts: Sequence[str] | None = None,
        sleep_time_in_seconds: int = 0,
        **kwargs: Any,
    ) -> EvaluationResult:
        """Score a response's text as the answer to the query, within its contexts if there are any.

        Raises:
            InputError: query or response is missing.
            PromptTooLongError: the prompt and the response do not fit the context window.
            BindingMismatchError: the policy was calibrated for something else.
        """
        if query is None or response is None:
            raise InputError("query and response must be given")
        await asyncio.sleep(sleep_time_in_seconds)
        try:
            verdict = await off_loop(partial(self._llm.score, self._prompt(query, contexts), response))
        except EmptyResponseError as error:
            return self._invalid(query, response, contexts, str(error))
        return self._result(query, response, contexts, verdict)

    def evaluate_response(
        self, query: str | None = None, response: Response | None = None, **kwargs: Any
    ) -> EvaluationResult:
        """As `aevaluate_response`.

        Raises:
            InputError: the response is not a whole one.
        """
        known = self._known(query, response)
        return known or self.evaluate(query, **_parts(response), **kwargs)

    async def aevaluate_response(
        self, query: str | None = None, response: Response | None = None, **kwargs: Any
    ) -> EvaluationResult:
        """Evaluate a response by the score it carries; score it now if it carries none for this text and this query.

        A guarded response that was escalated is judged by its target's score, one that was withheld by its draft's.

        Raises:
            InputError: the response is not a whole one.
        """
        known = self._known(query, response)
        return known or await self.aevaluate(query, **_parts(response), **kwargs)

    def _known(self, query: str | None, response: Response | None) -> EvaluationResult | None:
        if response is None:
            return None
        if not isinstance(response, (Response, PydanticResponse)):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            advice = "a text goes to evaluate(query=..., response=...), a stream is read first (get_response())"
            raise InputError(f"evaluate_response takes a whole response, not a {type(response).__name__}: {advice}")
        record: Any = (response.metadata or {}).get(METADATA_KEY)
        if isinstance(record, Mapping):  # it may be about another text or another query
            fields = cast("Mapping[str, Any]", record)
            of_query = query is not None and fields.get(QUESTION_KEY) == digest_of(query)
            if not of_query or fields.get("digest") != digest_of(text_of(response)):
                return None
        verdict = get_verdict(response)  # raises where the record is damaged
        return None if verdict is None else self._result(query, **_parts(response), verdict=verdict)

    def _prompt(self, query: str, contexts: Sequence[str] | None) -> list[ChatMessage]:
        if not contexts:
            return [ChatMessage(role=MessageRole.USER, content=query)]
        return self._template.format_messages(llm=self._llm, context_str="\n\n".join(contexts), query_str=query)

    def _result(
        self, query: str | None, response: str | None, contexts: Sequence[str] | None, verdict: Verdict
    ) -> EvaluationResult:
        if verdict.uncertainty is None:
            return self._invalid(query, response, contexts, verdict.reason or "the response carries no score")
        draft = undecided(verdict)  # a guard may have decided about it, by another policy
        decided = settle(draft, Terms(policy=self._policy)).verdict
        return EvaluationResult(
            query=query,
            response=response,
            contexts=contexts,
            passing=decided.action == "answer" and all(one.action == "deliver" for one in decided.sentences),
            score=decided.confidence,
            feedback=decided.reason or f"uncertainty {decided.uncertainty:.4g} is within the threshold",
        )

    def _invalid(
        self, query: str | None, response: str | None, contexts: Sequence[str] | None, reason: str
    ) -> EvaluationResult:
        return EvaluationResult(
            query=query,
            response=response,
            contexts=contexts,
            passing=self._policy.decide(None, can_escalate=False) == "answer",
            feedback=reason,
            invalid_result=True,
            invalid_reason=reason,
        )


def _parts(response: Response | PydanticResponse | None) -> dict[str, Any]:
    """A response's text and contexts, as `evaluate` takes them."""
    if response is None:
        return {}
    return {"response": text_of(response), "contexts": [node.get_content() for node in response.source_nodes]}
