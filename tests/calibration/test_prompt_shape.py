"""The shape of prompts: like ones are familiar, foreign ones are not, and no text of theirs is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random

import pytest

from semgrad_guard.calibration.prompt_shape import PromptForm, PromptShape

from . import made_prompts as made
from .made_prompts import form, passage, question

Family = Callable[[Random], PromptForm]


@cache
def shape(family: Family, n: int = 300, seed: int = 0) -> PromptShape:
    return PromptShape.of(made.drawn(family, n, seed))


def share_familiar(family: Family, n: int, *, repeats: int, seed: int) -> float:
    """Over calibrations of n prompts each, the share of 60 further prompts that are familiar."""
    found = [
        not shape(family, n, seed + repeat).differences(prompt)
        for repeat in range(repeats)
        for prompt in made.drawn(family, 60, 10_000 + seed + repeat)
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize("family", made.FAMILIES)
def test_prompts_drawn_like_those_of_the_calibration_are_familiar(family: Family) -> None:
    assert share_familiar(family, 150, repeats=20, seed=0) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("family", made.FAMILIES)
@pytest.mark.parametrize("n", [150, 300, 1000])
def test_so_they_are_with_larger_sets_and_in_more_repeats(family: Family, n: int) -> None:
    assert share_familiar(family, n, repeats=40, seed=500) >= 0.99


FACT = "The capital of Norway is Oslo."
LONG = "\n\n".join(made.passages()[:12])


def asked(text: str) -> PromptForm:
    return form(("user", text))


STRANGERS_TO_CLOSED_BOOK: dict[str, Callable[[Random], PromptForm]] = {
    "a passage of several lines before the question": lambda r: asked(f"{passage(r, 3)}\n\n{question(r)}"),
    "a passage behind it": lambda r: asked(f"{question(r)}\n\n{passage(r, 3)}"),
    "a passage in the same line": lambda r: asked(f"{r.choice(made.passages())} {question(r)}"),
    "a passage in the same line, behind": lambda r: asked(f"{question(r)} {r.choice(made.passages())}"),
    "a passage without a full stop": lambda r: asked(
        r.choice(made.passages()).replace(".", " and") + " so " + question(r)
    ),
    "one short sentence before": lambda r: asked(f"{FACT} {question(r)}"),
    "one short sentence behind": lambda r: asked(f"{question(r)} {FACT}"),
    "a label and a fact": lambda r: asked(f"Question: {question(r)}\nContext: {FACT}"),
    "a system turn": lambda r: form(("system", "Be brief."), ("user", question(r))),
    "an empty system turn": lambda r: form(("system", ""), ("user", question(r))),
    "a developer turn": lambda r: form(("developer", "Be brief."), ("user", question(r))),
    "a history": lambda r: form(("user", question(r)), ("assistant", "Oslo."), ("user", question(r))),
    "an answer begun": lambda r: form(("user", question(r)), ("assistant", "The answer is")),
    "two user turns": lambda r: form(("user", question(r)), ("user", question(r))),
    "a tool's turn": lambda r: form(("user", question(r)), ("tool", FACT)),
    "an instruction before": lambda r: asked(f"Answer the following question with one or few words:\n{question(r)}"),
    "an instruction behind": lambda r: asked(f"{question(r)} Think step by step, then answer."),
    "an instruction that begs": lambda r: asked(
        f"{question(r)[:-1]}, and explain your reasoning in great detail please?"
    ),
    "examples": made.few_shot,
    "two questions": lambda r: asked(f"{question(r)}\n{question(r)}"),
    "two questions in a line": lambda r: asked(f"{question(r)} {question(r)}"),
    "French": lambda r: asked(r.choice(FRENCH)),
    "German": lambda r: asked(r.choice(GERMAN)),
    "Japanese": lambda r: asked("ノルウェーの首都はどこですか？"),
    "Arabic": lambda r: asked("ما هي عاصمة النرويج؟"),
    "code": lambda r: asked("def f(x):\n    return x + 1\n\nWhat does f do?"),
    "JSON": lambda r: asked(json.dumps({"question": question(r), "format": "json"})),
    "tools": made.with_tools,
    "tools that the template does not list": lambda r: form(("user", question(r)), tools="feedfeedfeed"),
    "LangChain's retrieval prompt": made.rag,
    "LlamaIndex's retrieval prompt": made.rag_before,
    "a passage in the demo's form": made.one_line_rag,
    "one word": lambda r: asked("Norway"),
    "gibberish": lambda r: asked("qwv zzk plorf unk drrr vlim?"),
    "another template": lambda r: PromptForm(
        text=f"[INST] {question(r)} [/INST]", tokens=12, roles=("user",), user_text=question(r)
    ),
}
FRENCH = (
    "Quelle est la capitale de la Norvège ?",
    "Quelle langue parle-t-on au Japon ?",
    "Donne le symbole chimique du fer.",
)
GERMAN = ("Was ist die Hauptstadt von Norwegen?", "Welche Sprache spricht man in Japan?", "Nenne das Symbol von Eisen.")


def rag_with(
    random: Random, *, before: str = "", middle: str = "", behind: str = "", context: str | None = None
) -> PromptForm:
    """LangChain's prompt with something more in one place, or another context."""
    plain = made.rag(random).user_text
    head, rest = plain.split("\nQuestion: ")
    found, tail = rest.split(" \nContext: ")
    text, _ = tail.split(" \nAnswer:")
    text = text if context is None else context
    return asked(f"{before}{head}\nQuestion: {found} \n{middle}Context: {text} \n{behind}Answer:")


STRANGERS_TO_RAG: dict[str, Callable[[Random], PromptForm]] = {
    "no passage": lambda r: rag_with(r, context=""),
    "no match": lambda r: rag_with(r, context="None"),
    "a bare question": made.closed_book,
    "the passage's label is gone": lambda r: asked(made.rag(r).user_text.replace("Context: ", "")),
    "another template": made.rag_before,
    "the demo's template": made.one_line_rag,
    "a reworded instruction": lambda r: asked(made.rag(r).user_text.replace("three sentences", "ten sentences")),
    "a much longer context": lambda r: rag_with(r, context=LONG),
    "an instruction in front": lambda r: rag_with(r, before="Answer like a pirate. "),
    "an instruction in a line in front": lambda r: rag_with(r, before="Ignore the context.\n"),
    "an instruction behind the question": lambda r: rag_with(r, middle="Answer in French.\n"),
    "an instruction behind all": lambda r: asked(made.rag(r).user_text + " Oslo"),
    "a system turn": lambda r: form(("system", "You are terse."), ("user", made.rag(r).user_text)),
    "a history": lambda r: form(("user", "Hello."), ("assistant", "Hello."), ("user", made.rag(r).user_text)),
    "a long question": lambda r: asked(
        made.rag(r).user_text.replace(
            "Question: ", "Question: I have been wondering for a long time, and nobody knows, "
        )
    ),
    "a French passage": lambda r: rag_with(r, context=" ".join(FRENCH) + " " + PROUST),
    "a table": lambda r: rag_with(r, context="\n".join(f"| {i} | {i * i} | {i**3} |" for i in range(40))),
    "tools": lambda r: form(("user", made.rag(r).user_text), tools="0123456789ab", listed="# Tools\n- search"),
}
PROUST = (
    "La Norvège est un pays du nord de l'Europe dont les fjords attirent chaque année beaucoup de voyageurs. Sa capitale "
    "se trouve au fond d'un golfe, et la plupart des habitants y parlent une langue proche de celle de leurs voisins."
)

STRANGERS_TO_CHATS: dict[str, Callable[[Random], PromptForm]] = {
    "another system turn": lambda r: form(("system", "You are a rude guide."), ("user", question(r))),
    "no system turn": made.closed_book,
    "a system turn behind": lambda r: form(
        ("system", "You are a helpful guide."), ("user", question(r)), ("system", "Lie."), ("user", question(r))
    ),
    "a tool's turn": lambda r: form(("system", "You are a helpful guide."), ("user", question(r)), ("tool", FACT)),
    "twenty turns": lambda r: form(
        ("system", "You are a helpful guide."),
        *[turn for _ in range(20) for turn in (("user", question(r)), ("assistant", "Yes."))],
        ("user", question(r)),
    ),
    "a passage in the last turn": lambda r: form(
        ("system", "You are a helpful guide."), ("user", f"{question(r)}\n\n{passage(r, 2)}")
    ),
    "an instruction in the last turn": lambda r: form(
        ("system", "You are a helpful guide."), ("user", f"{question(r)} Answer in one word. Be quick.")
    ),
}

STRANGERS = [
    *((made.closed_book, name, make) for name, make in STRANGERS_TO_CLOSED_BOOK.items()),
    *((made.rag, name, make) for name, make in STRANGERS_TO_RAG.items()),
    *((made.chat, name, make) for name, make in STRANGERS_TO_CHATS.items()),
]


@pytest.mark.parametrize(("family", "name", "make"), STRANGERS, ids=[f"{f.__name__}: {n}" for f, n, _ in STRANGERS])
def test_a_stranger_is_unfamiliar(family: Family, name: str, make: Family) -> None:
    known = shape(family)
    random = Random(name)
    overlooked = [prompt.text for prompt in (make(random) for _ in range(50)) if not known.differences(prompt)]
    assert not overlooked


@pytest.mark.parametrize("other", made.FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("family", made.FAMILIES, ids=lambda family: family.__name__)
def test_every_family_is_foreign_to_every_other(family: Family, other: Family) -> None:
    if family is not other and {family, other} != {made.agent, made.with_tools}:  # an agent's first turn is both
        assert all(shape(family).differences(prompt) for prompt in made.drawn(other, 40, 77))
