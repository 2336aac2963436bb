"""`GuardedChatModel`: a chat model in every respect, around local models and served ones."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.messages.tool import tool_call
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnablePassthrough
from pydantic import BaseModel, Field

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    LowConfidenceError,
    UncertaintyMiddleware,
    UncertaintyRouter,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import DeadlineExceededError, InputError, UnenforcedPolicyError
from tests.steps import until

from .agents import ASKED, counting_tool
from .served import ServedModel
from .support import EVERYTHING, NOTHING, QUESTION, Route, Wire, collect, text_of


class Server(ServedModel):
    """Calls the first tool that it gets, once; notes the options of its calls, and how many run at once."""

    delay: float = 0.0
    requests: list[dict[str, Any]] = Field(default_factory=list)
    running: list[int] = Field(default_factory=lambda: [0, 0])
    lock: Any = Field(default_factory=threading.Lock)

    def _answer(self, messages: list[BaseMessage], **options: Any) -> AIMessage:
        self.requests.append(options)
        with self.lock:
            self.running[0] += 1
            self.running[1] = max(self.running)
        time.sleep(self.delay)
        with self.lock:
            self.running[0] -= 1
        tools = options.get("tools") or []
        if not tools or messages[-1].type == "tool":
            return self.message
        names = tools[0]["function"]
        arguments = dict.fromkeys(names["parameters"]["properties"], "x")
        return AIMessage("", tool_calls=[tool_call(name=names["name"], args=arguments, id="1")])


class Word(BaseModel):
    """A word."""

    word: str


@pytest.fixture
def server() -> Server:
    return Server()


def test_retries_and_fallbacks(chat: ChatSemGrad, route: Route) -> None:
    strict = GuardedChatModel(chat, NOTHING, mode="raise")
    sure = GuardedChatModel(chat, EVERYTHING)
    fallen = strict.with_retry(stop_after_attempt=2, retry_if_exception_type=(OSError,)).with_fallbacks(
        [sure], exceptions_to_handle=(LowConfidenceError,)
    )
    pieces = route(fallen, QUESTION, {})
    assert text_of(pieces) == text_of(route(sure, QUESTION, {}))
    (record,) = [p.response_metadata["semgrad_guard"] for p in pieces if "semgrad_guard" in p.response_metadata]
    assert (record["status"], record["action"]) == ("scored", "answer")


def test_fields_can_be_configured(chat: ChatSemGrad) -> None:
    guard = GuardedChatModel(chat, NOTHING).configurable_fields(abstain_message=ConfigurableField(id="words"))
    assert guard.invoke(QUESTION).text == "I don't know."
    assert guard.with_config(configurable={"words": "No."}).invoke(QUESTION).text == "No."
    loose = GuardedChatModel(chat, NOTHING).configurable_fields(policy=ConfigurableField(id="policy"))
    assert loose.invoke(QUESTION, {"configurable": {"policy": EVERYTHING}}).text == chat.invoke(QUESTION).text


def test_a_changed_copy_holds_to_its_own_rules(chat: ChatSemGrad) -> None:
    guard = GuardedChatModel(chat, EVERYTHING)
    guard.invoke(QUESTION)
    assert guard.model_copy(update={"policy": NOTHING}).invoke(QUESTION).text == "I don't know."
    assert guard.model_copy(update={"callbacks": []}).invoke(QUESTION).text == chat.invoke(QUESTION).text
    assert GuardedChatModel(chat, NOTHING).model_copy(update={"callbacks": []}).invoke(QUESTION).text == "I don't know."


@pytest.mark.parametrize(
    "wrap", [lambda c: c.with_retry(), lambda c: c.with_fallbacks([c]), lambda c: c | StrOutputParser()]
)
def test_what_is_no_chat_model_is_refused_with_the_remedy(chat: ChatSemGrad, wrap: Any) -> None:
    with pytest.raises(InputError, match=r"GuardedChatModel\(model, policy\)\.with_retry\(\)"):
        GuardedChatModel(wrap(chat), NOTHING)
    with pytest.raises(InputError, match="a policy"):
        GuardedChatModel(chat)
    with pytest.raises(UnenforcedPolicyError):
        GuardedChatModel(chat.with_config(callbacks=[UncertaintyRouterCallback(NOTHING)]), NOTHING)


def test_the_old_name_keeps_working(chat: ChatSemGrad) -> None:
    assert UncertaintyRouter(llm=chat, policy=NOTHING).invoke(QUESTION).text == "I don't know."
    assert isinstance(UncertaintyRouter(chat, NOTHING), GuardedChatModel)


def test_an_agent_around_a_served_model(server: Server, language_model: LanguageModel) -> None:
    runs: list[str] = []
    tool = counting_tool("speak", runs)
    policy = Policy(threshold=1e308, on_unscored="answer")
    agent: Any = create_agent(GuardedChatModel(server, policy, scorer=language_model), [tool])
    messages = agent.invoke(ASKED)["messages"]
    assert runs == ["speak"]
    assert messages[-1].text == "Vienna"
    called = get_verdict(messages[1])
    assert called is not None
    assert (called.status, called.reason) == (
        "unscored",
        "the answer calls tools, and how its server wrote the calls is not known",
    )
    strict: Any = create_agent(GuardedChatModel(server, NOTHING, scorer=language_model), [tool])
    assert strict.invoke(ASKED)["messages"][-1].text == "I don't know."
    assert runs == ["speak"]


def test_a_middleware_scores_a_served_model(server: Server, language_model: LanguageModel) -> None:
    for policy, expected in ((EVERYTHING, "Vienna"), (NOTHING, "I don't know.")):
        agent: Any = create_agent(server, [], middleware=[UncertaintyMiddleware(policy, scorer=language_model)])
        message = agent.invoke(ASKED)["messages"][-1]
        verdict = get_verdict(message)
        assert verdict is not None
        assert (message.text, verdict.status) == (expected, "scored")


def test_a_scorer_that_knows_no_tools_says_so(server: Server, language_model: LanguageModel) -> None:
    guard = GuardedChatModel(server, Policy(threshold=1e308, on_unscored="answer"), scorer=language_model)
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[tool_call(name="speak", args={}, id="1")])]
    for model, question in (
        (guard.bind_tools([counting_tool("speak", [])], tool_choice="auto"), QUESTION),
        (guard, history),
    ):
        verdict = get_verdict(model.invoke(question))
        assert verdict is not None
        assert verdict.status == "unscored"
        assert "tools" in str(verdict.reason)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}],
        [{"type": "text", "text": "Look:"}, {"type": "image", "url": "https://example.org/x.png"}],
    ],
)
def test_a_prompt_that_is_no_text_is_unscored(
    server: Server, language_model: LanguageModel, route: Route, content: Any
) -> None:
    guard = GuardedChatModel(server, Policy(threshold=1e308, on_unscored="answer"), scorer=language_model)
    pieces = route(guard, [HumanMessage(content)], {})
    assert text_of(pieces) == "Vienna"
    verdict = get_verdict(pieces[-1])
    assert verdict is not None
    assert verdict.status == "unscored"
    assert "reads text only" in str(verdict.reason)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("limit", "together"), [(None, 4), (2, 2)])
def test_batches_of_a_served_model_run_side_by_side(
    language_model: LanguageModel, asynchronous: bool, limit: int | None, together: int
) -> None:
    server = Server(delay=0.3)
    guard = GuardedChatModel(server, EVERYTHING, scorer=language_model)
    config: Any = {} if limit is None else {"max_concurrency": limit}
    inputs = [f"{QUESTION} {i}" for i in range(4)]
    found = asyncio.run(guard.abatch(inputs, config)) if asynchronous else guard.batch(inputs, config)
    assert [m.text for m in found] == ["Vienna"] * 4
    assert server.running[1] == together


def test_all_of_n_answers_are_judged(server: Server, language_model: LanguageModel) -> None:
    messages: Any = [[HumanMessage(QUESTION)]]
    for policy, reply in ((EVERYTHING, "Vienna"), (NOTHING, "I don't know.")):
        guard = GuardedChatModel(server, policy, scorer=language_model)
        (generations,) = guard.generate(messages, n=2).generations
        assert [generation.text for generation in generations] == [reply] * 2


def test_structured_output_of_a_served_model(server: Server, language_model: LanguageModel) -> None:
    policy = Policy(threshold=1e308, on_unscored="answer")
    guard = GuardedChatModel(server, policy, scorer=language_model)
    assert guard.with_structured_output(Word).invoke(QUESTION) == Word(word="x")
    strict = GuardedChatModel(server, NOTHING, scorer=language_model)
    with pytest.raises(LowConfidenceError):
        strict.with_structured_output(Word).invoke(QUESTION)
    raw: Any = strict.with_structured_output(Word, include_raw=True).invoke(QUESTION)
    assert (raw["raw"].text, raw["parsed"]) == ("I don't know.", None)


def test_structured_output_of_a_local_model(chat: ChatSemGrad) -> None:
    long = ChatSemGrad.from_model(chat.language_model, max_tokens=100)
    colour = {"title": "Colour", "type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"]}
    assert GuardedChatModel(long, EVERYTHING).with_structured_output(colour).invoke(QUESTION) == {"c": "red"}
    with pytest.raises(LowConfidenceError):
        GuardedChatModel(long, NOTHING).with_structured_output(colour).invoke(QUESTION)


# Targets.


def test_a_chat_model_is_asked_in_the_calls_own_form(chat: ChatSemGrad, server: Server) -> None:
    guard = GuardedChatModel(chat, NOTHING, escalate_to=server)
    guard.invoke(QUESTION, stop=["."], max_tokens=7, response_format={"type": "text"})
    assert server.requests == [{"stop": ["."], "max_tokens": 7, "response_format": {"type": "text"}}]


def test_a_chat_model_is_asked_with_the_calls_tools(server: Server, language_model: LanguageModel) -> None:
    runs: list[str] = []
    target, policy = Server(), Policy(threshold=-1.0, on_unscored="escalate")
    agent: Any = create_agent(
        GuardedChatModel(server, policy, scorer=language_model, escalate_to=target), [counting_tool("speak", runs)]
    )
    assert agent.invoke(ASKED)["messages"][-1].text == "Vienna"
    assert runs == ["speak"]
    assert [request["tools"][0]["function"]["name"] for request in target.requests] == ["speak", "speak"]


def test_structured_output_with_a_local_target(chat: ChatSemGrad, larger: LanguageModel) -> None:
    long, second = (ChatSemGrad.from_model(m, max_tokens=100) for m in (chat.language_model, larger))
    colour = {"title": "Colour", "type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"]}
    guard = GuardedChatModel(long, NOTHING, escalate_to=second)
    assert guard.with_structured_output(colour).invoke(QUESTION) == {"c": "red"}


def test_an_agents_graph_as_target(chat: ChatSemGrad, server: Server, route: Route) -> None:
    runs: list[str] = []
    target: Any = create_agent(server, [counting_tool("speak", runs)])
    assert text_of(route(GuardedChatModel(chat, NOTHING, escalate_to=target), QUESTION, {})) == "Vienna"
    assert runs == ["speak"]


def test_a_rag_chain_as_target(chat: ChatSemGrad, server: Server, route: Route) -> None:
    retriever = RunnableLambda(lambda question: [Document(f"about {question}")])
    prompt = ChatPromptTemplate.from_template("{context} {question}")
    chain: Any = (
        {"context": RunnableLambda(lambda d: d["question"]) | retriever, "question": lambda d: d["question"]}
        | prompt
        | server
    )
    with pytest.raises(
        InputError, match=r"RunnableLambda\(lambda messages: \{'question': messages\[-1\]\.text\}\) \| chain"
    ):
        GuardedChatModel(chat, NOTHING, escalate_to=prompt.partial(context="x") | server)
    remedied = RunnableLambda(lambda messages: {"question": messages[-1].text}) | chain
    assert text_of(route(GuardedChatModel(chat, NOTHING, escalate_to=remedied), QUESTION, {})) == "Vienna"


def test_a_prompt_with_a_place_for_messages_as_target(chat: ChatSemGrad, server: Server) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), MessagesPlaceholder("messages")])
    assert GuardedChatModel(chat, NOTHING, escalate_to=prompt | server).invoke(QUESTION).text == "Vienna"
    passing = RunnablePassthrough() | server
    assert GuardedChatModel(chat, NOTHING, escalate_to=passing).invoke(QUESTION).text == "Vienna"


def test_a_failing_target_may_lead_to_an_abstention(chat: ChatSemGrad, route: Route) -> None:
    def broken(messages: Any) -> str:
        raise LookupError("closed")

    guard = GuardedChatModel(chat, NOTHING, escalate_to=RunnableLambda(broken), on_error="abstain")
    assert text_of(route(guard, QUESTION, {})) == "I don't know."


# Time.


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_late_server_is_left_behind(language_model: LanguageModel, asynchronous: bool) -> None:
    slow = Server(delay=2.0)
    raising = GuardedChatModel(slow, EVERYTHING, scorer=language_model, timeout=0.2)
    with pytest.raises(DeadlineExceededError):
        asyncio.run(raising.ainvoke(QUESTION)) if asynchronous else raising.invoke(QUESTION)
    calm = GuardedChatModel(slow, EVERYTHING, scorer=language_model, timeout=0.2, on_error="abstain")
    message = asyncio.run(calm.ainvoke(QUESTION)) if asynchronous else calm.invoke(QUESTION)
    assert message.text == "I don't know."
    until(lambda: slow.running[1] >= 1)


def test_token_handlers_of_the_served_model_stay_quiet(server: Server, language_model: LanguageModel) -> None:
    wire = Wire()
    model = server.model_copy(update={"callbacks": [wire]})
    assert collect(GuardedChatModel(model, NOTHING, scorer=language_model).astream(QUESTION))
    assert "Vienna" not in "".join(wire.tokens)
    assert FakeListChatModel(responses=["x"]).invoke(QUESTION).text == "x"
