"""Which router decides, how it carries its decisions out, which models it refuses, and what its targets get."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManager
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.config import set_config_context

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    LowConfidenceError,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    asking,
    guarded,
)
from semgrad_guard import HybridGrad, LanguageModel, Policy, Verdict
from semgrad_guard.errors import BindingMismatchError, DeadlineExceededError, InputError, UnenforcedPolicyError

from . import support
from .scripted import CANARY, SURE, THRESHOLD, WITHHELD, Scripted, router
from .support import EVERYTHING, NOTHING, QUESTION, Ear, Route, Tracer, record_of, shown, text_of, unpickled, verdict_of

POLICY = Policy(threshold=THRESHOLD)


def test_a_field_or_a_config(route: Route) -> None:
    one = router()
    for model, config in [
        (GuardedChatModel(Scripted(), one), {}),
        (GuardedChatModel(Scripted()), {"callbacks": [one]}),
        (GuardedChatModel(Scripted(), one), {"callbacks": [one, one]}),
        (GuardedChatModel(Scripted(), one), {"callbacks": [unpickled(one), copy.deepcopy(one)]}),
        (GuardedChatModel(Scripted(), callbacks=[one]), {}),
        (GuardedChatModel(Scripted(), callbacks=[one]), {"callbacks": CallbackManager([one], [one])}),
    ]:
        assert text_of(route(model, QUESTION, config)) == WITHHELD
    assert text_of(route(GuardedChatModel(Scripted(script=SURE), one), QUESTION, {})) == SURE


def test_two_routers(route: Route) -> None:
    for model, config in [
        (GuardedChatModel(Scripted(), router()), {"callbacks": [router()]}),
        (GuardedChatModel(Scripted()), {"callbacks": [router(), router(mode="annotate")]}),
    ]:
        with pytest.raises(UnenforcedPolicyError, match="2 routers"):
            route(model, QUESTION, config)


@pytest.mark.parametrize("mode", ["enforce", "annotate", "raise"])
def test_models_that_would_not_ask_are_refused(mode: Any, route: Route) -> None:
    for model in (Scripted(), FakeListChatModel(responses=["no"]), FakeListLLM(responses=["no"])):
        with pytest.raises(UnenforcedPolicyError, match="would ignore the router"):
            route(model, QUESTION, {"callbacks": [router(mode=mode)]})


@pytest.mark.parametrize("claim", [True, "asks its router", {"semgrad_guard": True}])
def test_no_value_of_a_caller_claims_to_ask(claim: Any, route: Route) -> None:
    model = Scripted().bind(semgrad_guard=claim)
    config = {
        "callbacks": [router()],
        "metadata": {"semgrad_guard": claim, "lc_source": "x"},
        "tags": ["semgrad_guard"],
    }
    with pytest.raises(UnenforcedPolicyError):
        route(model, QUESTION, config)


def test_a_helper_asks_none(route: Route) -> None:
    helper = GuardedChatModel(Scripted(), False)
    assert CANARY in text_of(route(helper, QUESTION, {"callbacks": [router()]}))


def test_a_call_without_a_run_is_refused(chat: ChatSemGrad) -> None:
    for call in (chat._generate, lambda messages: list(chat._stream(messages))):
        with pytest.raises(UnenforcedPolicyError, match="without a run"):
            call([])


def test_modes(route: Route) -> None:
    (record,) = support.metadata_of(route(GuardedChatModel(Scripted(), router(mode="annotate")), QUESTION, {}))
    assert (record["action"], record["details"]["enforced"]) == ("abstain", False)
    with pytest.raises(LowConfidenceError) as caught:
        route(GuardedChatModel(Scripted(), router(mode="raise")), QUESTION, {})
    assert caught.value.verdict.uncertainty is not None
    assert caught.value.verdict.text == ""


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: router(escalate_to=lambda _: "x"), "must be a Runnable"),
        (lambda: GuardedChatModel(Scripted(), POLICY), "router is UncertaintyRouterCallback"),
        (lambda: ChatSemGrad(router=POLICY), "router is UncertaintyRouterCallback"),
        (lambda: GuardedChatModel("gpt", router()), "takes a chat model"),
        (lambda: GuardedChatModel(ChatSemGrad(), router()), "decides by itself"),
        (lambda: GuardedChatModel(Scripted(callbacks=[router()]), router()), "listeners"),
        (lambda: GuardedChatModel(Scripted().with_config(callbacks=[router()]), router()), "listeners"),
        (lambda: GuardedChatModel(Scripted().with_listeners(on_end=print), router()), "listeners"),
        (lambda: GuardedChatModel(Scripted().with_retry(), router()), "put it around the guard"),
        (lambda: router(foo=1), "UncertaintyRouterCallback takes no foo"),
        (lambda: UncertaintyMiddleware(router(), foo=1), "UncertaintyMiddleware takes no foo"),
        (lambda: ChatSemGrad.from_model("gpt"), "a LanguageModel that is loaded"),
        (lambda: verdict_of("x"), r"leave StrOutputParser\(\) out"),
        (lambda: GuardedChatModel(Scripted(), router(), by="word"), "by: "),
        (lambda: GuardedChatModel(Scripted(), router(), estimator=5), "5 is no estimator"),
        (lambda: ChatSemGrad(by="word"), "by: "),
        (lambda: ChatSemGrad(top_logprobs=21), "top_logprobs: "),
        (lambda: ChatSemGrad(estimator=5), "5 is no estimator"),
        (lambda: guarded(RunnableLambda(_elsewhere), POLICY), "router is UncertaintyRouterCallback"),
        (lambda: guarded(_elsewhere, router()), "must be a Runnable"),
        (lambda: guarded(RunnableLambda(_elsewhere), router(), abstain="No."), "abstain is a function"),
        (lambda: asking(POLICY).__enter__(), "router is Router"),
        (lambda: UncertaintyMiddleware(None), "router is UncertaintyRouterCallback"),
        (lambda: GuardedChatModel(Scripted(), router(), carry=("nowhere:x",)), "no such variable"),
        (lambda: GuardedChatModel(Scripted(), router(), carry=("os:sep",)), "not a context variable"),
    ],
)
def test_bad_arguments(made: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        made()


def test_a_router_in_the_context(chat: ChatSemGrad) -> None:
    with set_config_context({"callbacks": [UncertaintyRouterCallback(NOTHING, abstain_message=WITHHELD)]}) as context:
        assert context.run(chat.invoke, QUESTION).text == WITHHELD


def test_copies_and_pickles_decide_as_one(tiny: str) -> None:
    rules = UncertaintyRouterCallback(NOTHING, RunnableLambda(_elsewhere), abstain_message=WITHHELD)
    model = ChatSemGrad(model=tiny, max_tokens=3, router=rules)
    served = GuardedChatModel(Scripted(), rules)
    for one in (model, served):
        for again in (unpickled(one), copy.deepcopy(one), copy.copy(one), one.model_copy(deep=True)):
            assert again.router == rules
            assert again.invoke(QUESTION, {"callbacks": [rules]}).text == "elsewhere"


def _elsewhere(_: Any) -> str:
    return "elsewhere"


def test_a_routers_calibration_chooses_the_estimator(chat: ChatSemGrad) -> None:
    from semgrad_guard import Calibration
    from semgrad_guard.pocket import CALIBRATION_PATH

    policy = Policy.from_calibration(Calibration.load(CALIBRATION_PATH))
    message = ChatSemGrad(router=UncertaintyRouterCallback(policy)).invoke("What is the capital of France?")
    verdict = verdict_of(message)
    assert (verdict.action, verdict.promised, verdict.details.calibration_id) == ("answer", True, policy.calibration_id)


def test_errors_of_own_functions_take_no_draft_along() -> None:
    def fail(verdict: Verdict, **_: Any) -> Any:
        raise KeyError("own")

    for options in ({"notify": fail}, {"abstain_message": fail}, {"log": SimpleNamespace(write=fail)}):
        rules = UncertaintyRouterCallback(POLICY, **options)
        with pytest.raises(KeyError, match="own") as caught:
            GuardedChatModel(Scripted(), rules).invoke(QUESTION)
        assert CANARY not in record_of(caught.value)


class Failing(HybridGrad):
    def __call__(self, evidence: Any) -> Any:
        raise KeyError("own")


def test_errors_of_the_models_thread_take_no_draft_along(chat: ChatSemGrad, draft: str, route: Route) -> None:
    ear = Ear()
    with pytest.raises(KeyError) as caught:
        route(chat.model_copy(update={"estimator": Failing(), "router": router()}), QUESTION, {"callbacks": [ear]})
    assert not [one for one in (record_of(caught.value), *ear.events) if draft in one]
    assert "in __call__" in caught.value.__notes__[0]


@pytest.mark.parametrize("is_question", [False, True])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, DeadlineExceededError])
async def test_a_task_that_ends_early_takes_no_draft_along(kind: type[BaseException], is_question: bool) -> None:
    ear, is_late = Ear(), kind is DeadlineExceededError

    async def wait(_: Any) -> None:
        if not is_late:
            task.cancel()
        await asyncio.sleep(60)

    rules = UncertaintyRouterCallback(POLICY, RunnableLambda(wait), timeout=0.3 if is_late else None)
    model = GuardedChatModel(Scripted(), rules)
    chain: Any = guarded(model, rules) if is_question else model
    task = asyncio.ensure_future(chain.ainvoke(QUESTION, {"callbacks": [ear]}))
    with pytest.raises(kind) as caught:
        await task
    assert not [one for one in (record_of(caught.value), *ear.events) if CANARY in one]


def test_concurrent_calls_with_routers_of_their_own_do_not_mix(chat: ChatSemGrad, draft: str) -> None:
    """In tasks, some of them streamed."""
    strict = [UncertaintyRouterCallback(NOTHING, abstain_message=f"No, {i}.") for i in range(6)]
    routers = [one for rules in strict for one in (rules, UncertaintyRouterCallback(EVERYTHING))]

    async def ask(rules: UncertaintyRouterCallback, streamed: bool) -> str:
        if not streamed:
            return (await chat.ainvoke(QUESTION, {"callbacks": [rules]})).text
        return "".join([chunk.text async for chunk in chat.astream(QUESTION, {"callbacks": [rules]})])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(rules, i % 3 == 0) for i, rules in enumerate(routers)))

    assert asyncio.run(ask_all()) == [text for i in range(6) for text in (f"No, {i}.", draft)]


# Targets.

TARGETS: dict[str, Any] = {
    "chat model": lambda: Scripted(script=SURE),
    "bound": lambda: Scripted(script=SURE).bind(seed=3).with_config(tags=["x"]),
    "agent": lambda: create_agent(Scripted(script=SURE), []),
    "function": lambda: RunnableLambda(lambda messages: SURE if messages[-1].text else ""),
    "chain": lambda: RunnableLambda(lambda messages: messages[-1].text) | Scripted(script=SURE) | StrOutputParser(),
    "mapping": lambda: RunnableLambda(lambda messages: {"answer": SURE}),
}


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target: str, route: Route) -> None:
    pieces = route(GuardedChatModel(Scripted(), router(TARGETS[target]())), QUESTION, {})
    assert text_of(pieces) == SURE


@pytest.mark.parametrize("reply", ["  ", 3, {"messages": []}])
def test_replies_that_are_none(reply: Any, route: Route) -> None:
    rules = router(RunnableLambda(lambda _: reply), on_error="abstain")
    assert text_of(route(GuardedChatModel(Scripted(), rules), QUESTION, {})) == "WITHHELD"


def test_the_verdict_and_the_tokens_are_those_of_both(chat: ChatSemGrad, larger: LanguageModel, route: Route) -> None:
    second = ChatSemGrad.from_model(larger, max_tokens=9)
    first = chat.model_copy(update={"router": UncertaintyRouterCallback(NOTHING, second)})
    message = first.invoke(QUESTION)
    verdict = verdict_of(message)
    assert verdict.details.escalated_from is not None
    assert (verdict.action, verdict.uncertainty) == ("escalate", verdict_of(second.invoke(QUESTION)).uncertainty)
    used = [one.invoke(QUESTION).usage_metadata for one in (chat, second)]
    assert message.usage_metadata["output_tokens"] == sum(one["output_tokens"] for one in used if one)  # type: ignore[index]


def test_a_targets_own_count_of_tokens_is_kept() -> None:
    used: Any = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    target = RunnableLambda(lambda _: AIMessage(SURE, usage_metadata=used))
    verdict = verdict_of(GuardedChatModel(Scripted(), router(target)).invoke(QUESTION))
    assert (verdict.details.prompt_tokens, verdict.details.answer_tokens) == (7, 3)


def test_a_guarded_target_decides_by_itself(chat: ChatSemGrad, route: Route) -> None:
    for policy, text in ((NOTHING, "neither"), (EVERYTHING, chat.invoke(QUESTION).text)):
        second = chat.model_copy(update={"router": UncertaintyRouterCallback(policy, abstain_message="neither")})
        assert text_of(route(GuardedChatModel(Scripted(), router(second)), QUESTION, {})) == text


def test_only_tracers_see_the_target() -> None:
    ear, tracer = Ear(), Tracer()
    guard = GuardedChatModel(Scripted(), router(Scripted(script=SURE)))
    list(guard.stream(QUESTION, {"callbacks": [ear, tracer]}))
    assert ear.names == ["on_chat_model_start", "on_llm_new_token", "on_llm_end"]
    (own,) = tracer.roots
    (inner,) = own.child_runs
    assert SURE in shown(inner.outputs)
    assert CANARY not in "".join(tracer.events)
    assert not tracer.run_map, "every run has ended"


def test_a_calibration_that_does_not_follow(chat: ChatSemGrad) -> None:
    second = chat.model_copy(update={"router": UncertaintyRouterCallback(support.policy_for_another_model())})
    with pytest.raises(BindingMismatchError, match="not after this"):
        UncertaintyRouterCallback(support.policy_for_another_model(), second)
