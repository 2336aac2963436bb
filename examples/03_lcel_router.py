"""A router in a chain: doubtful questions go to a second model, and are withheld if that is not sure either.

    python examples/03_lcel_router.py [--model smollm2]

Both models here are the same one; the second is shown the question in other words. In real use it would be larger:
`ChatSemGrad(model="Qwen/Qwen2.5-7B-Instruct")`. The thresholds come from a few questions and promise nothing;
`semgrad-guard calibrate` makes one that does.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, LowConfidenceError, UncertaintyRouterCallback, get_verdict
from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

QUESTIONS = [
    {"question": question}
    for question in (
        "What is the capital of France?",
        "What is the chemical symbol of gold?",
        "What is the capital of Mongolia?",
        "What is the capital of Atlantis?",
    )
]

chat = ChatSemGrad(model=MODEL, max_tokens=24)
prompt = ChatPromptTemplate.from_template("{question}")

# A threshold for the example: between the two surest answers and the rest.
scores = sorted(get_verdict(answer).uncertainty for answer in (prompt | chat).batch(QUESTIONS))
policy = Policy(threshold=(scores[1] + scores[2]) / 2)

reword = RunnableLambda(lambda messages: [HumanMessage("Do you know this? " + messages[-1].text)])
sure = UncertaintyRouterCallback(policy, abstain_message="Nobody knows.")
second = reword | ChatSemGrad(model=MODEL, max_tokens=12, router=sure)


def guarded(**options: Any) -> ChatSemGrad:
    """The first model, which asks a router with these options before it returns."""
    return ChatSemGrad(model=MODEL, max_tokens=24, router=UncertaintyRouterCallback(policy, **options))


router = guarded(escalate_to=second)

print("The verdict is next to the answer:")
for question, answer in zip(QUESTIONS, (prompt | router).batch(QUESTIONS), strict=True):
    verdict = get_verdict(answer)
    print(f"  {question['question']}  {verdict.action}: {answer.text}  ({verdict.uncertainty:.1e})")

print("A chain that wants text only:")
chain = prompt | router | StrOutputParser()
print(" ", "".join(chain.stream(QUESTIONS[0])))

print("Annotated, it streams live; the decision comes with the last chunk:")
live = prompt | guarded(mode="annotate")
for chunk in live.stream(QUESTIONS[-1]):
    print(f"  {chunk.text!r}", get_verdict(chunk).action if get_verdict(chunk) else "")

print("As an error, it makes LangChain's own fallbacks go by confidence:")
person = RunnableLambda(lambda question: "I have passed your question on to a person.")
certain = guarded(mode="raise")
fallback = prompt | certain.with_fallbacks([person], exceptions_to_handle=(LowConfidenceError,)) | StrOutputParser()
print(" ", fallback.invoke(QUESTIONS[-1]))
