"""Prompts of several kinds, made from the questions and documents of the examples: what chains really send."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random

from semgrad_guard.records import PromptForm

_EXAMPLES = Path(__file__).parents[2] / "examples"

Turn = tuple[str, str]


@cache
def questions() -> tuple[str, ...]:
    lines = (_EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["question"] for line in lines)


@cache
def passages() -> tuple[str, ...]:
    """Paragraphs of 20 to 90 words."""
    lines = (_EXAMPLES / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [paragraph for line in lines for paragraph in json.loads(line)["text"].split("\n\n")]
    return tuple(text.strip() for text in texts if len(text.split()) >= 20)


def form(*turns: Turn, tools: str | None = None, listed: str = "") -> PromptForm:
    """Turns as ChatML writes them; `listed` is what the template makes of the tools. About four characters a token."""
    before = f"<|im_start|>system\n{listed}<|im_end|>\n" if listed else ""
    body = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    text = f"{before}{body}<|im_start|>assistant\n"
    user_text = next((content for role, content in reversed(turns) if role == "user"), turns[-1][1])
    return PromptForm(
        text=text, tokens=(len(text) + 3) // 4, roles=tuple(role for role, _ in turns), user_text=user_text, tools=tools
    )


def question(random: Random) -> str:
    return random.choice(questions())


def passage(random: Random, most: int = 1) -> str:
    return "\n\n".join(random.sample(passages(), random.randint(1, most)))


def closed_book(random: Random) -> PromptForm:
    return form(("user", question(random)))


def instructed(random: Random) -> PromptForm:
    request = f"Please directly answer the following question with one or few words:\n{question(random)}"
    return form(("user", request))


def with_system(random: Random) -> PromptForm:
    date = f"Today is {random.choice(['Monday', 'Friday'])}, {random.randint(1, 28)} March 2026."
    return form(("system", f"You are a terse assistant.\n{date}\nNever guess."), ("user", question(random)))


def rag(random: Random) -> PromptForm:
    """LangChain's well-known RAG prompt."""
    request = (
        "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer "
        "the question. If you don't know the answer, just say that you don't know. Use three sentences maximum and "
        f"keep the answer concise.\nQuestion: {question(random)} \nContext: {passage(random, 4)} \nAnswer:"
    )
    return form(("user", request))


def rag_before(random: Random) -> PromptForm:
    """LlamaIndex's text-QA prompt, with its system turn."""
    system = (
        "You are an expert Q&A system that is trusted around the world.\nAlways answer the query using the provided "
        "context information, and not prior knowledge.\nSome rules to follow:\n1. Never directly reference the given "
        "context in your answer.\n2. Avoid statements like 'Based on the context, ...'."
    )
    request = (
        f"Context information is below.\n---------------------\n{passage(random, 2)}\n---------------------\nGiven the "
        "context information and not prior knowledge, answer the query.\n"
        f"Query: {question(random)}\nAnswer: "
    )
    return form(("system", system), ("user", request))


def one_line_rag(random: Random) -> PromptForm:
    return form(("user", f"Question: {question(random)}\nContext: {random.choice(passages())}"))


def chat(random: Random) -> PromptForm:
    """One to six turns of the user's, with answers of a few words between them."""
    turns: list[Turn] = []
    for _ in range(random.randint(0, 5)):
        turns += [("user", question(random)), ("assistant", random.choice(passages()).split(".")[0] + ".")]
    return form(("system", "You are a helpful guide."), *turns, ("user", question(random)))


def with_tools(random: Random) -> PromptForm:
    listed = '# Tools\n<tools>\n{"name": "search", "parameters": {"query": "string"}}\n</tools>'
    return form(("user", question(random)), tools="0123456789ab", listed=listed)


def agent(random: Random) -> PromptForm:
    """A turn with up to three calls of a tool behind it."""
    listed = '# Tools\n<tools>\n{"name": "search", "parameters": {"query": "string"}}\n</tools>'
    turns: list[Turn] = [("user", question(random))]
    for _ in range(random.randint(0, 3)):
        call = json.dumps({"name": "search", "arguments": {"query": question(random)}})
        turns += [("assistant", f"<tool_call>\n{call}\n</tool_call>"), ("tool", random.choice(passages()))]
    return form(*turns, tools="0123456789ab", listed=listed)


def few_shot(random: Random) -> PromptForm:
    shown = (
        "Question: Which gas do plants take in?\nAnswer: carbon dioxide\n\nQuestion: Who wrote Emma?\nAnswer: Austen"
    )
    return form(("user", f"{shown}\n\nQuestion: {question(random)}\nAnswer:"))


def filled_in(random: Random) -> PromptForm:
    """A form with many fields."""
    fields = [f"Field {letter}: {question(random)}" for letter in "ABCDEFGHIJKLMNOPQR"]
    return form(("user", "\n".join([*fields, "Which of these fields is the odd one?"])))


FAMILIES: tuple[Callable[[Random], PromptForm], ...] = (
    closed_book, instructed, with_system, rag, rag_before, one_line_rag, chat, with_tools, agent, few_shot, filled_in,
)  # fmt: skip


def drawn(family: Callable[[Random], PromptForm], n: int, seed: int) -> Sequence[PromptForm]:
    """Independent prompts of one family."""
    random = Random(seed)
    return [family(random) for _ in range(n)]
