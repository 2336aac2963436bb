"""`UncertaintyEvaluator`: LlamaIndex's evaluator interface on the model's own uncertainty, without a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from llama_index.core.async_utils import asyncio_run  # pyright: ignore[reportUnknownVariableType]
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
from semgrad_guard.guard import Terms, off_loop, require_policy, settle, undecided, unscored
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
            verdict = unscored(response, reason=str(error))
        return self._result(query, response, contexts, verdict)

    def evaluate_response(
        self, query: str | None = None, response: Response | None = None, **kwargs: Any
    ) -> EvaluationResult:
        """As `aevaluate_response`.

        Raises:
            InputError: the response is not a whole one.
        """
        return asyncio_run(self.aevaluate_response(query, response, **kwargs))

    async def aevaluate_response(
        self, query: str | None = None, response: Response | None = None, **kwargs: Any
    ) -> EvaluationResult:
        """Evaluate a response by the score it carries; score it now if it carries none for this text and this query.

        A guarded response that was escalated is judged by its target's score, one that was withheld by its draft's.

        Raises:
            InputError: the response is not a whole one.
        """
        if response is None:
            return await self.aevaluate(query, **kwargs)
        if not isinstance(response, (Response, PydanticResponse)):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            advice = "a text goes to evaluate(query=..., response=...), a stream is read first (get_response())"
            raise InputError(f"evaluate_response takes a whole response, not a {type(response).__name__}: {advice}")
        text, contexts = text_of(response), [node.get_content() for node in response.source_nodes]
        record: Any = (response.metadata or {}).get(METADATA_KEY) or {}
        verdict = get_verdict(response)  # raises where the record is damaged
        of_query = query is not None and record.get(QUESTION_KEY) == digest_of(query)
        if verdict is None or not of_query or record.get("digest") != digest_of(text):
            return await self.aevaluate(query, text, contexts, **kwargs)
        return self._result(query, text, contexts, verdict)

    def _prompt(self, query: str, contexts: Sequence[str] | None) -> list[ChatMessage]:
        if not contexts:
            return [ChatMessage(role=MessageRole.USER, content=query)]
        return self._template.format_messages(llm=self._llm, context_str="\n\n".join(contexts), query_str=query)

    def _result(
        self, query: str | None, response: str, contexts: Sequence[str] | None, verdict: Verdict
    ) -> EvaluationResult:
        known: dict[str, Any] = {"query": query, "response": response, "contexts": contexts}
        if verdict.uncertainty is None:
            reason = verdict.reason or "the response carries no score"
            passing = self._policy.decide(None, can_escalate=False) == "answer"
            return EvaluationResult(
                **known, passing=passing, feedback=reason, invalid_result=True, invalid_reason=reason
            )
        draft = undecided(verdict)  # a guard may have decided about it, by another policy
        decided = settle(draft, Terms(policy=self._policy)).verdict
        return EvaluationResult(
            **known,
            passing=decided.action == "answer" and all(one.action == "deliver" for one in decided.sentences),
            score=decided.confidence,
            feedback=decided.reason or f"uncertainty {decided.uncertainty:.4g} is within the threshold",
        )
