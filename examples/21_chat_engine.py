"""A LlamaIndex chat engine that withholds what it is not sure of, and remembers only what the user saw.

    python examples/21_chat_engine.py

Bare thresholds keep the example short: they promise nothing. An annotated stream is live, and its verdict comes last.
"""

from __future__ import annotations

from llama_index.core.chat_engine import SimpleChatEngine

from llama_index_semgrad_guard import GuardedChatEngine, SemGradLLM
from semgrad_guard import Policy

llm = SemGradLLM(model="pocket", max_tokens=24)
question = "What is the capital of Mongolia?"
for threshold in (1e308, 0.0):  # lets every scored answer through, and lets hardly any through
    chat = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), policy=Policy(threshold=threshold))
    response = chat.chat(question)
    print(f"{response.metadata['semgrad_guard']['action']}: {response}")
    print("  remembered:", " | ".join(message.content or "" for message in chat.chat_history))

live = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), policy=Policy(threshold=0.0), mode="annotate")
stream = live.stream_chat(question)
print("streamed: ", end="")
for piece in stream.response_gen:
    print(piece, end="")
record = stream.metadata["semgrad_guard"]
print(f"\n  advice: {record['action']}, uncertainty {record['uncertainty']:.2e}")
