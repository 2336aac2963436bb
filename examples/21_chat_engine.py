"""A LlamaIndex chat engine that withholds doubtful answers, and remembers only the texts the user saw.

    python examples/21_chat_engine.py [--model smollm2]

The threshold lies between the scores of two questions, for brevity: it promises nothing. An annotated stream is live,
and its verdict comes with the last piece.
"""

from __future__ import annotations

from argparse import ArgumentParser
from statistics import median

from llama_index.core.chat_engine import SimpleChatEngine

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, get_verdict, guarded
from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

scored = SemGradLLM(model=MODEL, max_tokens=24)
questions = ["What is the capital of France?", "What is the capital of Mongolia?"]
scores = {question: get_verdict(scored.complete(question)).uncertainty for question in questions}
policy = Policy(threshold=median(scores.values()))
router = UncertaintyRouterCallback(policy)
llm = SemGradLLM(model=MODEL, max_tokens=24, router=router)
for question in sorted(questions, key=scores.__getitem__):  # the surer one first
    chat = guarded(SimpleChatEngine.from_defaults(llm=llm), router)
    response = chat.chat(question)
    print(f"{response.metadata['semgrad_guard']['action']}: {response}")
    print("  remembered:", " | ".join(message.content or "" for message in chat.chat_history))

live = SemGradLLM(model=MODEL, max_tokens=24, router=UncertaintyRouterCallback(policy, mode="annotate"))
print("streamed: ", end="")
for piece in live.stream_complete(question):
    print(piece.delta, end="")
record = piece.raw["semgrad_guard"]
print(f"\n  advice: {record['action']}, uncertainty {record['uncertainty']:.2e}")
