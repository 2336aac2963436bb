"""The embedded model by its name. Its knowledge is tested elsewhere: here, that nothing else is needed to guard it."""

from __future__ import annotations

from statistics import median

from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.named import READING

QUESTIONS = [
    "What is the capital of France?",
    "What is the chemical symbol of gold?",
    "Who invented the self-sealing envelope of Qorvania?",
    "What is the capital of Japan?",
]


def test_a_guarded_chain_with_a_reading_stage() -> None:
    chat = ChatSemGrad(max_tokens=16)
    drafts = chat.batch(QUESTIONS)
    scores = [message.response_metadata["semgrad_guard"]["uncertainty"] for message in drafts]
    assert all(score is not None and score >= 0 for score in scores)
    assert len(set(scores)) == len(scores)

    def with_document(messages: list[BaseMessage]) -> str:
        return f"Question: {messages[-1].text}\nContext: Nobody knows."

    reading = RunnableLambda(with_document) | chat.model_copy(update={"prompt_template": "reading"})
    router = UncertaintyRouterCallback(policy=Policy(threshold=median(scores)), escalate_to=reading)
    guarded = chat.with_config(callbacks=[router])
    answers = guarded.batch(QUESTIONS)
    actions = [message.response_metadata["semgrad_guard"]["action"] for message in answers]
    assert actions == ["answer" if score <= median(scores) else "escalate" for score in scores]
    for answer in answers:
        record = answer.response_metadata["semgrad_guard"]
        assert record["details"]["prompt_template"].startswith("chat@")
        assert record["action"] == "answer" or record["escalated"]["details"]["prompt_template"].startswith("reading@")

    chain = ChatPromptTemplate.from_messages([("human", "{question}")]) | guarded | StrOutputParser()
    assert chain.batch([{"question": question} for question in QUESTIONS]) == [message.text for message in answers]


def test_a_loaded_model_says_how_it_reads() -> None:
    assert ChatSemGrad(model="pocket").reading_prompt.startswith("Question: {question}\nContext: {context}")
    assert ChatSemGrad(model="smollm2").reading_prompt == READING
    assert LanguageModel.from_pretrained("pocket").reading_prompt == ChatSemGrad(model="pocket").reading_prompt
