"""Routers, and their targets: LlamaIndex's engines and LLMs, functions, and a person."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, MessageRole
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent

from llama_index_semgrad_guard.records import Prompt, decided_of, fields_of, text_of
from semgrad_guard import Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Reply, Router, Steps, Work, external, off_loop


class UncertaintyRouterCallback(Router):
    """Decides about every answer of the LLMs that have it, before the answer leaves them.

        router = UncertaintyRouterCallback(Policy(threshold=0.004), escalate_to=larger_llm)
        llm = SemGradLLM(model="pocket", router=router)

    `escalate_to` is an engine, an LLM or a function. It gets what the LLM was asked, a text or messages; an engine gets
    the user's last message. For a `guarded` engine it answers the engine's question. Other arguments: as in
    `Router`.

    Raises:
        InputError: an argument is not as described.
    """

    @classmethod
    def _require_target(cls, target: Any) -> None:
        is_known = isinstance(target, LLM | BaseQueryEngine | BaseChatEngine)
        if not is_known and (isinstance(target, type) or not callable(target)):
            raise InputError(f"escalate_to is an engine, an LLM or a function of the question, not {target!r:.60}")


_RESPONSES = (Response, AgentChatResponse, ChatResponse, CompletionResponse)


def work_of(target: Any, question: Prompt) -> Work:
    """The work of a target, which answers instead: an engine, an LLM, or a function of the question."""

    def steps() -> Steps[list[Any]]:
        answer = yield _called(target, question)
        if isinstance(answer, _STREAMS):
            yield whole(answer)
        return [_reply(answer)]

    return Work.of(steps)


def _called(target: Any, question: Prompt) -> Work:
    if isinstance(target, LLM):
        if isinstance(question, str):
            return Work(lambda: target.complete(question), lambda: target.acomplete(question))
        return Work(lambda: target.chat(question), lambda: target.achat(question))
    if isinstance(target, BaseQueryEngine | BaseChatEngine):
        if not isinstance(question, str):  # an engine finds the rest by itself
            users = [message for message in question if message.role == MessageRole.USER]
            question = (users or list(question))[-1].content or ""
        text = question
        if isinstance(target, BaseQueryEngine):
            return Work(lambda: target.query(text), lambda: target.aquery(text))
        return Work(lambda: target.chat(text), lambda: target.achat(text))
    return Work.calling(target, question, instead="the asynchronous method")


def _reply(answer: Any) -> Reply[Any]:
    if isinstance(answer, (str, Verdict)):
        return Reply(answer)
    if isinstance(answer, (*_RESPONSES, *_STREAMS)):
        return Reply(decided_of(answer) or external(text_of(answer), **_counts(answer)), answer)
    raise InputError(f"the escalation target returned a {type(answer).__name__}; expected a text or a response")


def _counts(answer: Any) -> dict[str, Any]:
    """An LLM's own counts of its tokens; LlamaIndex's integrations keep them in `raw` or among the further fields."""
    if not isinstance(answer, ChatResponse | CompletionResponse):
        return {}
    usage = fields_of(fields_of(answer.raw).get("usage")) or fields_of(answer.additional_kwargs)  # pyright: ignore[reportUnknownMemberType]
    read = usage.get("prompt_tokens", usage.get("input_tokens"))  # in OpenAI's words, or in Anthropic's
    written = usage.get("completion_tokens", usage.get("output_tokens"))
    counts = {"prompt_tokens": read, "answer_tokens": written}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


_STREAMS = (StreamingResponse, AsyncStreamingResponse, StreamingAgentChatResponse)


def whole(response: Any) -> Work:
    """The text of a response, a stream read to its end."""

    def call() -> str:
        if isinstance(response, AsyncStreamingResponse):
            raise InputError("the engine streams asynchronously; call the asynchronous method")
        if isinstance(response, StreamingResponse):
            response.response_txt = "".join(response.response_gen)
        return text_of(response)

    async def coroutine() -> str:
        if isinstance(response, AsyncStreamingResponse):
            response.response_txt = "".join([piece async for piece in response.async_response_gen()])
        return await off_loop(call) if isinstance(response, StreamingResponse) else text_of(response)

    return Work(call, coroutine)


async def ask_person(ctx: Context, question: str, verdict: Verdict) -> str:
    """Ask the person who runs a workflow: send an `InputRequiredEvent`, and wait for a `HumanResponseEvent`.

    The event holds `prefix` (a line to show), `question`, `draft` (the withheld answer, where drafts are kept) and
    `record`. The step that calls this runs again when the response is there: give it a step of its own.
    """
    draft = verdict.draft or verdict.text
    prefix = f"{question}\nDraft ({verdict.reason}): {draft}\nYour answer: "
    fields: Any = {"prefix": prefix, "question": question, "draft": draft, "record": verdict.metadata()}
    answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(**fields), timeout=None)
    return str(answer.get("response"))
