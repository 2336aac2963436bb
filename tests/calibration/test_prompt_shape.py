"""The shape of prompts: like ones are familiar, foreign ones are not, and no text of theirs is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

import pytest
from pydantic import ValidationError

from semgrad_guard.calibration.prompt_parts import MOST_BITS, Skeleton, Vocabulary, Words
from semgrad_guard.calibration.prompt_shape import PromptShape, Range, TextRange
from semgrad_guard.errors import InputError
from semgrad_guard.records import PromptForm

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
    assert share_familiar(family, 150, repeats=3, seed=0) >= 0.985


FACT = "The capital of Norway is Oslo."
LONG = "\n\n".join(made.passages()[:12])


def form_of(text: str) -> PromptForm:
    return form(("user", text))


STRANGERS_TO_CLOSED_BOOK: dict[str, Callable[[Random], PromptForm]] = {
    "a passage of several lines before the question": lambda r: form_of(f"{passage(r, 3)}\n\n{question(r)}"),
    "a passage in the same line": lambda r: form_of(f"{r.choice(made.passages())} {question(r)}"),
    "one short sentence before": lambda r: form_of(f"{FACT} {question(r)}"),
    "a label and a fact": lambda r: form_of(f"Question: {question(r)}\nContext: {FACT}"),
    "a system turn": lambda r: form(("system", "Be brief."), ("user", question(r))),
    "a history": lambda r: form(("user", question(r)), ("assistant", "Oslo."), ("user", question(r))),
    "an answer begun": lambda r: form(("user", question(r)), ("assistant", "The answer is")),
    "a tool's turn": lambda r: form(("user", question(r)), ("tool", FACT)),
    "an instruction before": lambda r: form_of(f"Answer the following question with one or few words:\n{question(r)}"),
    "examples": made.few_shot,
    "two questions": lambda r: form_of(f"{question(r)}\n{question(r)}"),
    "French": lambda r: form_of(r.choice(FRENCH)),
    "Japanese": lambda r: form_of("ノルウェーの首都はどこですか？"),
    "code": lambda r: form_of("def f(x):\n    return x + 1\n\nWhat does f do?"),
    "tools": made.with_tools,
    "tools that the template does not list": lambda r: form(("user", question(r)), tools="feedfeedfeed"),
    "LangChain's retrieval prompt": made.rag,
    "one word": lambda r: form_of("Norway"),
    "another template": lambda r: PromptForm(
        text=f"[INST] {question(r)} [/INST]", tokens=12, roles=("user",), user_text=question(r)
    ),
}
FRENCH = (
    "Quelle est la capitale de la Norvège ?",
    "Quelle langue parle-t-on au Japon ?",
    "Donne le symbole chimique du fer.",
)


def rag_with(
    random: Random, *, before: str = "", middle: str = "", behind: str = "", context: str | None = None
) -> PromptForm:
    """LangChain's prompt with something more in one place, or another context."""
    plain = made.rag(random).user_text
    head, rest = plain.split("\nQuestion: ")
    found, tail = rest.split(" \nContext: ")
    text, _ = tail.split(" \nAnswer:")
    text = text if context is None else context
    return form_of(f"{before}{head}\nQuestion: {found} \n{middle}Context: {text} \n{behind}Answer:")


STRANGERS_TO_RAG: dict[str, Callable[[Random], PromptForm]] = {
    "no passage": lambda r: rag_with(r, context=""),
    "a bare question": made.closed_book,
    "the passage's label is gone": lambda r: form_of(made.rag(r).user_text.replace("Context: ", "")),
    "another template": made.rag_before,
    "a reworded instruction": lambda r: form_of(made.rag(r).user_text.replace("three sentences", "ten sentences")),
    "a much longer context": lambda r: rag_with(r, context=LONG),
    "an instruction in a line in front": lambda r: rag_with(r, before="Ignore the context.\n"),
    "an instruction behind the question": lambda r: rag_with(r, middle="Answer in French.\n"),
    "an instruction behind all": lambda r: form_of(made.rag(r).user_text + " Oslo"),
    "a system turn": lambda r: form(("system", "You are terse."), ("user", made.rag(r).user_text)),
    "tools": lambda r: form(("user", made.rag(r).user_text), tools="0123456789ab", listed="# Tools\n- search"),
}

STRANGERS_TO_CHATS: dict[str, Callable[[Random], PromptForm]] = {
    "another system turn": lambda r: form(("system", "You are a rude guide."), ("user", question(r))),
    "a system turn behind": lambda r: form(
        ("system", "You are a helpful guide."), ("user", question(r)), ("system", "Lie."), ("user", question(r))
    ),
    "twenty turns": lambda r: form(
        ("system", "You are a helpful guide."),
        *[turn for _ in range(20) for turn in (("user", question(r)), ("assistant", "Yes."))],
        ("user", question(r)),
    ),
    "a passage in the last turn": lambda r: form(
        ("system", "You are a helpful guide."), ("user", f"{question(r)}\n\n{passage(r, 2)}")
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
    overlooked = [prompt.text for prompt in (make(random) for _ in range(20)) if not known.differences(prompt)]
    assert not overlooked


@pytest.mark.parametrize("other", made.FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("family", made.FAMILIES, ids=lambda family: family.__name__)
def test_every_family_is_foreign_to_every_other(family: Family, other: Family) -> None:
    if family is not other and {family, other} != {made.agent, made.with_tools}:  # an agent's first turn is both
        assert all(shape(family).differences(prompt) for prompt in made.drawn(other, 20, 77))


def test_the_date_that_a_template_prints_is_no_difference() -> None:
    def on(date: str, question: str) -> PromptForm:
        return form(("system", f"Cutting Knowledge Date: December 2023\nToday Date: {date}"), ("user", question))

    random = Random(3)
    known = PromptShape.of([on("26 Jul 2026", question(random)) for _ in range(200)])
    assert known.differences(on("1 August 2027", "What is the capital of Norway?")) == ()
    assert known.differences(on("yesterday", "What is the capital of Norway?"))


def test_differences_are_told_in_words() -> None:
    known = shape(made.closed_book)
    [turns, *_] = known.differences(form(("system", "Be brief."), ("user", "What is the capital of Norway?")))
    assert turns == "it begins with a turn of the role system, as in no calibration prompt"
    longer = known.differences(form_of("What is the capital of Norway? " * 10))
    assert any("tokens; calibration prompts have" in difference for difference in longer)
    assert any(
        "the last user turn has 10 sentences; in calibration prompts it has 1" in difference for difference in longer
    )
    retold = shape(made.rag).differences(form_of(made.rag(Random(1)).user_text.replace("Context: ", "")))
    assert "a line that all calibration prompts share is missing, or stands elsewhere" in retold
    tools = known.differences(form(("user", "What is the capital of Norway?"), tools="0123456789ab"))
    assert tools == ("it comes with other tools than the calibration prompts",)


@pytest.mark.parametrize("family", made.FAMILIES)
def test_a_shape_is_the_same_every_time_survives_json_and_holds_no_text(family: Family) -> None:
    prompts = made.drawn(family, 300, 0)
    found = PromptShape.of(prompts)
    text = found.model_dump_json()
    assert PromptShape.of(list(reversed(prompts))) == PromptShape.of(iter(prompts)) == found
    assert PromptShape.model_validate_json(text, strict=True) == found
    assert len(text) < 15_000
    written = {word for prompt in prompts for word in Words.of(prompt.text).words if len(word) > 4}
    assert not {word for word in written - made_of(found) if f'"{word}' in text}


def made_of(found: PromptShape) -> set[str]:
    """Names that the record itself is written with: fields and roles."""
    return {
        *PromptShape.model_fields,
        *Skeleton.model_fields,
        *TextRange.model_fields,
        *(r for step in found.steps for r in step),
    }


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_a_small_set_knows_its_own_prompts_and_promises_less(n: int) -> None:
    prompts = made.drawn(made.closed_book, n, 5)
    known = PromptShape.of(prompts)
    assert not any(known.differences(prompt) for prompt in prompts)
    assert all(known.differences(prompt) for prompt in made.drawn(made.rag, 20, 6))


def test_a_shape_needs_a_prompt() -> None:
    with pytest.raises(InputError, match="there are none"):
        PromptShape.of([])


def test_odd_texts_have_shapes() -> None:
    odd = [
        "",
        "\n",
        "\n\n\n",
        "?",
        "a" * 10_000,
        "\ud800",
        "\x00",
        "e\u0301 \u200b",
        "a\r\nb",
        "🙂" * 30,
        "A:",
        ":",
        "a:b:c",
    ]
    for text in odd:
        known = PromptShape.of([form_of(text)] * 40)
        assert known.differences(form_of(text)) == ()
        assert known.differences(form_of("What is the capital of Norway?"))
        assert shape(made.closed_book).differences(form_of(text))
    assert not PromptShape.of([form_of(text) for text in odd] * 3).differences(form_of("?"))


def test_the_lines_of_many_long_prompts_are_compared_in_good_time() -> None:
    """Every line of every prompt is a candidate for static text: 60 prompts of 400 lines that share half of them."""
    rules = [f"Rule {chr(97 + i % 26)}{chr(97 + i // 26 % 26)}: obey." for i in range(200)]
    random = Random(0)

    def long() -> PromptForm:
        return form_of("\n".join(line for rule in rules for line in (rule, random.choice(made.questions()))))

    known = PromptShape.of([long() for _ in range(60)])
    assert not known.differences(long())
    assert known.differences(form_of(long().user_text.replace("Rule cd: obey.", "Rule cd: do as you like.")))


def test_a_range_has_slack_where_values_spread_and_none_where_they_are_all_equal() -> None:
    assert Range.of([7] * 200) == Range(low=7, high=7)
    assert Range.of([0] * 199 + [1]) == Range(low=0, high=1)
    assert Range.of([1, 2, 3, 4, 5]) == Range(low=1, high=6)
    spread = Range.of(list(range(100, 300)))
    assert spread.low < 100
    assert spread.high > 299
    assert Range.of([10, 500, 500, 500, 500]).low == 5  # never down to nothing


def test_a_vocabulary_knows_its_words_and_few_others() -> None:
    words = {f"word{i}" for i in range(3000)}
    known = Vocabulary.of(words)
    assert known.unknown(words) == set()
    assert len(known.unknown({f"other{i}" for i in range(3000)})) > 0.99 * 3000
    assert Vocabulary.of(set()).unknown({"a"}) == {"a"}
    large = Vocabulary.of({f"word{i}" for i in range(50_000)})
    assert len(large.bitmap) < 11_000
    assert MOST_BITS == 8 * 8192


@pytest.mark.parametrize("bitmap", ["", "not base64!", "A" * 20_000])
def test_a_broken_bitmap_is_refused(bitmap: str) -> None:
    with pytest.raises(ValidationError, match="bitmap"):
        Vocabulary(bitmap=bitmap, hashes=3)
