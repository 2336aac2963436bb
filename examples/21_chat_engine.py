"""A LlamaIndex chat engine that withholds doubtful answers, and remembers only the texts the user saw.

    python examples/21_chat_engine.py [--model smollm2]

The threshold lies between the scores of two questions, for brevity: it promises nothing. An annotated stream is live,
and its verdict comes last.
"""

from __future__ import annotations

from argparse import ArgumentParser
from statistics import median

from llama_index.core.chat_engine import SimpleChatEngine

from llama_index_semgrad_guard import GuardedChatEngine, SemGradLLM, get_verdict
from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

llm = SemGradLLM(model=MODEL, max_tokens=24)
questions = ["What is the capital of France?", "What is the capital of Mongolia?"]
scores = {question: get_verdict(llm.complete(question)).uncertainty for question in questions}
policy = Policy(threshold=median(scores.values()))
for question in sorted(questions, key=scores.__getitem__):  # the surer one first
    chat = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), policy=policy)
    response = chat.chat(question)
    print(f"{response.metadata['semgrad_guard']['action']}: {response}")
    print("  remembered:", " | ".join(message.content or "" for message in chat.chat_history))

live = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), policy=policy, mode="annotate")
stream = live.stream_chat(question)
print("streamed: ", end="")
for piece in stream.response_gen:
    print(piece, end="")
record = stream.metadata["semgrad_guard"]
print(f"\n  advice: {record['action']}, uncertainty {record['uncertainty']:.2e}")
