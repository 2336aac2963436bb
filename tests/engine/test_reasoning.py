"""Where an answer begins behind its reasoning: marks of documented families, in tokens as tokenizers have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.writing import CertainText, Piece, ThoughtPiece, Visible, answered
from semgrad_guard.engine.prompts.prompt import Prompt, render, template_fingerprint
from semgrad_guard.engine.prompts.thoughts import EVERY, Codec, Foreign, HeldText, Marks, Thinking, doubted_from
from semgrad_guard.errors import InputError
from tests.thoughts import DOUBTED, GLUED, MARKS, OWN, WRITTEN, Written

from .chat_templates import FOLDER, PUBLISHED, with_template

THINK = ("<think>", "</think>")
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>') | last }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def turns(user: str, end: str, header: str) -> str:
    """A template with these marks around the user's text, and this header."""
    return (
        f"{{% for m in messages %}}{user}{{{{ m.content }}}}{end}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{header}{{% endif %}}"
    )


@dataclass(frozen=True)
class Family:
    """A template, the tokens of its marks (seen in text, or control tokens), and its options."""

    template: str
    seen: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


FAMILIES = {
    "qwen3": Family(QWEN, THINK, ("<|im_start|>", "<|im_end|>")),
    "qwen3 off": Family(QWEN, THINK, ("<|im_start|>", "<|im_end|>"), (("enable_thinking", False),)),
    "r1": Family(turns("<u>", "", "<a><think>\n") + "{# </think> #}", THINK, ("<u>", "<a>")),
    "r1 first": Family(turns("<u>", "", "<a>") + "{# </think> #}", THINK, ("<u>", "<a>")),
    "v3.1 off": Family(turns("<u>", "", "<a></think>") + "{# <think> #}", THINK, ("<u>", "<a>")),
    "magistral": Family(turns("[INST]", "[/INST]", "") + "{# [THINK][/THINK] #}", (), ("[THINK]", "[/THINK]")),
    "seed-oss": Family(turns("<u>", "", "<a>") + "{# <seed:think></seed:think> #}", ("<seed:think>", "</seed:think>")),
    "seed-oss, budget 0": Family(
        turns("<u>", "", "<a><seed:think><seed:cot_budget_reflect>0</seed:cot_budget_reflect>") + "{# </seed:think> #}",
        ("<seed:think>", "</seed:think>"),
    ),
    "gpt-oss": Family(
        turns("<|start|>user<|message|>", "<|end|>", "<|start|>assistant") + "{# <|channel|> #}",
        (),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    ),
    "gemma 4": Family(turns("<u>", "", "<a>") + "{# <|channel>thought <channel|> #}", (), ("<|channel>", "<channel|>")),
    "granite": Family(turns("<u>", "", "<a>") + "{# <think></think><response></response> #}"),
    "nemotron": Family(turns("<u>", "", "<a><think>\n") + "{# </think> #}"),
    "apriel": Family(turns("<u>", "", "<a>Here are my reasoning steps:\n") + "{# [BEGIN FINAL RESPONSE] #}"),
    "apriel 1.5": Family(turns("<u>", "", "<a>") + "{# [BEGIN FINAL RESPONSE] <thinking></thinking> #}"),
    "kimi k3": Family(
        turns("<u>", "", "<a>{{ '<|open|>' + 'think' + '<|sep|>' }}"), (), ("<|open|>", "<|close|>", "<|sep|>")
    ),
    "command a": Family(
        turns("<u>", "", "<a>") + "{# <|END_THINKING|><|START_RESPONSE|> #}",
        (),
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "r7b off": Family(
        turns("<u>", "", "") + "<a><|START_THINKING|><|END_THINKING|>{# <|START_RESPONSE|> #}",
        (),
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "plain": Family(turns("<u>", "", "<a>")),
}


def speaking(header: str, thought: str, answer: str, end: str) -> str:
    """A template that writes an earlier thought out, with these marks behind its header."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}<u>{{{{ m.content }}}}{{% else %}}{header}"
        f"{{% if m.reasoning_content %}}{thought.replace('THOUGHT', '{{ m.reasoning_content }}')}{{% endif %}}"
        f"{answer}{{{{ m.content }}}}{end}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{header}{{% endif %}}"
    )


SHOWN = {
    "namespaced": speaking("<a>\n", "<mm:think>THOUGHT</mm:think>", "", "[e]"),
    "suffixed": speaking("<a><think:open>", "\nTHOUGHT\n</think:open>\n", "", "<end>"),
    "turns": speaking("<|begin|>assistant", "<|think|>THOUGHT<|end|><|begin|>assistant", "<|content|>", "<|end|>"),
    "recipients": speaking(
        "<|start|>assistant", " to=self<|message|>THOUGHT<|eom|><|start|>assistant", " to=user<|message|>", "<|eot|>"
    ),
    **{path.stem: path.read_text() for path in sorted(Path(PUBLISHED or FOLDER).glob("thinking/*.jinja"))},
}
"""Templates with marks of no known family, and the published ones where `make check-templates` has found them."""

THOUGHT = "It is Rome."


def rendered(name: str, question: str = "What is it?", **how: Any) -> tuple[Prompt, Codec]:
    family = FAMILIES[name]
    tokenizer = with_template(family.template, family.control)
    tokenizer.add_tokens(list(family.seen))
    return render(tokenizer, question, template_options=dict(family.options), **how), Codec(tokenizer)


def read(name: str, text: str, *, cut: bool, stop: tuple[str, ...] = ()) -> tuple[Visible, list[int], Codec]:
    prompt, codec = rendered(name)
    ids = list(codec.encode(text))
    return answered(ids, stop, codec, prompt.thinking, cut=cut), ids, codec


@pytest.mark.parametrize(("name", "text", "answer", "thought", "cut"), OWN)
def test_an_answer_begins_behind_its_reasoning(
    name: str, text: str, answer: str, thought: str | None, cut: bool
) -> None:
    found, ids, codec = read(name, text, cut=cut)
    assert found.text == answer
    assert (None if found.reasoning is None else found.reasoning.text) == thought
    assert tuple(ids)[: len(found.preceding) + len(found.ids)] == found.preceding + found.ids
    assert codec.decode(found.ids).strip() == answer.strip()
    if found.reasoning is not None:
        unfinished = "within its reasoning" in (found.reasoning.why_unscored or "")
        assert unfinished == (not answer and not text.endswith("</think>"))
        begin, end = found.reasoning.span
        in_tokens = FAMILIES[name].seen or FAMILIES[name].control  # so that no other token holds a part of a mark
        if thought and "\n\n" not in thought and in_tokens:
            assert codec.decode(found.preceding[begin:end]).strip() == thought
    has_mark = thought == "" or any(mark in answer for mark in (*THINK, "[THINK]"))
    assert found.scored_ids == (() if has_mark else found.ids), "an answer with a mark in it is not scored"


def parts(pieces: Sequence[Piece]) -> tuple[str, str]:
    """The text and the thought in pieces, of which none is empty."""
    assert all(piece if isinstance(piece, str) else piece.text for piece in pieces)
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, "".join(piece.text for piece in pieces if isinstance(piece, ThoughtPiece))


@pytest.mark.parametrize(("name", "text", "answer", "thought", "cut"), OWN)
def test_a_stream_shows_the_answer_and_its_thought(
    name: str, text: str, answer: str, thought: str | None, cut: bool
) -> None:
    prompt, codec = rendered(name)
    certain = CertainText(codec.decode, GenerationOptions(), prompt.thinking)
    ids = codec.encode(text)
    pieces = [*chain.from_iterable(map(certain.add, ids))]
    live = parts(pieces)
    assert answer.startswith(live[0])
    assert (thought or "").startswith(live[1]), "the record holds all that was shown"
    reasoning = answered(ids, (), codec, prompt.thinking, cut=cut).reasoning
    assert parts([*pieces, *certain.rest(answer, reasoning)]) == (answer, thought or "")
    if thought and answer and (name, text[:7]) not in (("qwen3", "[THINK]"), ("magistral", "<think>")):
        assert len([piece for piece in pieces if isinstance(piece, str)]) > 1, "it streams once the thought has ended"


@pytest.mark.parametrize("name", ["qwen3", "r1", "gpt-oss", "granite"])
def test_a_stream_goes_on_behind_a_long_thought(name: str) -> None:
    begin, end = {
        "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        "r1": ("", "</think>\n\n"),
    }.get(name, ("<think>", "</think>\n\n"))
    prompt, codec = rendered(name)
    certain = CertainText(codec.decode, GenerationOptions(), prompt.thinking)
    long = THOUGHT * 30
    pieces = [*chain.from_iterable(map(certain.add, codec.encode(f"{begin}{long}{end}Milan is it.")))]
    assert parts(pieces) == ("Milan is it.", long.strip())
    thoughts = [piece for piece in pieces if isinstance(piece, ThoughtPiece)]
    assert len(thoughts) > 100, "the thought is live"
    assert len(pieces) - len(thoughts) > 3


@pytest.mark.parametrize(
    ("header", "written", "answer", "thought"),
    [
        ("<t>", "It is Rome.</t><r>Milan</r>", "Milan", "It is Rome."),
        ("<t>", "It is", "", "It is"),
        ("<t></t><r>", "Milan</r>", "Milan", None),
        ("<t></t>", "<r>Milan", "Milan", None),
    ],
)
def test_a_header_that_opens_a_region(header: str, written: str, answer: str, thought: str | None) -> None:
    """Kimi K3's form: one region for the thought and one for the answer, either of which the prompt may open."""
    tokenizer = with_template(turns("<u>", "", f"<a>{header}"))
    regions = {"thinking": {"open": "<t>", "close": "</t>"}, "content": {"open": "<r>", "close": "</r>"}}
    tokenizer.response_template = {"fields": regions}
    codec = Codec(tokenizer)
    found = answered(codec.encode(written), (), codec, render(tokenizer, "Hi").thinking, cut=True)
    assert (found.text, found.reasoning and found.reasoning.text) == (answer, thought)


@pytest.mark.parametrize(
    "question", ["Is </think> a mark?", "</think>", "<think>", "<|channel|>final<|message|>", "[/THINK]", "[THINK]"]
)
@pytest.mark.parametrize("how", [{}, {"semantic_token": -1}], ids=["own", "override"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mark_that_the_user_writes_moves_no_border(name: str, question: str, how: dict[str, int]) -> None:
    assert rendered(name, question, **how)[0].thinking == rendered(name)[0].thinking


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it() -> None:
    found, _, _ = read("qwen3", "<think>\na.\n</think>\n\nMilan. Or", cut=False, stop=(".",))
    assert (found.text, found.cut) == ("Milan", "."), "the thought's own full stop is another"
    found, ids, codec = read("qwen3", "<think>a</think> capital it", cut=False, stop=(" ",))
    assert codec.decode(ids[-3:-2]) == " capital", "the white space behind the mark is in the answer's first token"
    assert (found.text, found.cut, codec.decode(found.ids)) == ("capital", " ", " capital")
    found, _, _ = read("qwen3", "<think>\na.", cut=False, stop=(".",))
    assert (found.text, found.cut) == ("", None)
    assert found.reasoning is not None
    assert "within its reasoning" in (found.reasoning.why_unscored or "")


@pytest.mark.parametrize("name", SHOWN)
def test_a_template_that_writes_a_thought_out_shows_its_marks(name: str) -> None:
    """The text that it writes for an earlier turn is the text that its model writes behind the prompt."""
    tokenizer = with_template(SHOWN[name])
    codec, prompt = Codec(tokenizer), render(tokenizer, "What is it?")
    turn = {"role": "assistant", "content": "Milan", "reasoning_content": THOUGHT, "reasoning": THOUGHT}
    rendered_turns: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is it?"}, turn], tokenize=False
    )
    assert THOUGHT in rendered_turns
    assert rendered_turns.startswith(prompt.text)
    found = answered(codec.encode(rendered_turns[len(prompt.text) :]), (), codec, prompt.thinking)
    assert found.text.partition("Milan")[0].strip() == ""
    assert "Milan" in found.text
    assert found.reasoning is not None
    assert (found.reasoning.text, found.reasoning.why_unscored) == (THOUGHT, None)
    assert prompt.thinking is not None
    written = prompt.thinking.written(THOUGHT, "Milan")
    assert written is not None
    assert rendered_turns[len(prompt.text) :].lstrip().startswith(written.lstrip())


def test_a_template_that_writes_no_thought_out_has_no_marks() -> None:
    for template in (
        turns("<u>", "", "<a>") + "{# reasoning_content #}",
        speaking("<a>", "(THOUGHT) ", "", "<end>"),
        speaking("<a>", "{{ raise_exception('no') }}<t>THOUGHT</t>", "", "<end>"),
    ):
        assert render(with_template(template), "What is it?").thinking is None


def test_a_text_from_elsewhere_is_taken_apart() -> None:
    qwen, opened, channels = (rendered(name)[0].thinking for name in ("qwen3", "r1", "gpt-oss"))
    closed = rendered("qwen3 off")[0].thinking
    qwen_text, channel = "<think>\na\n</think>\n\nMilan", "<|channel|>analysis<|message|>"
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    for thinking, text, thought, found in (
        # what the scorer knows, the text, the reasoning apart from it; the answer, its thought, and both as it writes
        (qwen, "<think>a</think>\n\nMilan", None, ("Milan", "a", "<think>a</think>\n\nMilan")),
        (qwen, "Milan", None, ("Milan", None, "Milan")),
        (qwen, "Milan", "", ("Milan", "", None)),
        (qwen, "Milan", "a", ("Milan", "a", qwen_text)),
        (closed, "Milan", "a", ("Milan", "a", None)),
        (opened, "a</think>\n\nMilan", None, ("Milan", "a", "a</think>\n\nMilan")),
        (opened, "Milan", None, ("Milan", "", None)),
        (opened, "Milan", "a", ("Milan", "a", "a\n</think>\n\nMilan")),
        (opened, "<think>a</think>Milan", None, ("Milan", "a", "<think>a</think>Milan")),
        (None, "Milan", "", ("Milan", "", None)),
        (None, "Milan", "a", ("Milan", "a", None)),
        (qwen, "[THINK]a[/THINK]Milan", None, ("Milan", "a", qwen_text)),
        (qwen, "<think></think>Milan", "a", ("Milan", "a", qwen_text)),
        (qwen, "Milan <think>", "a", ("Milan <think>", "a", None)),
        (opened, "[THINK][/THINK]Milan", None, ("Milan", None, "\n</think>\n\nMilan")),
        (channels, "analysisThe user asks.assistantfinalMilan", None, ("Milan", "The user asks.")),
        (channels, "Milan", "a", ("Milan", "a", f"{channel}a{final}Milan")),
    ):
        read_text = Foreign.of(text, thinking, thought=thought)
        reasoning = read_text.reasoning
        known = read_text.answer, None if reasoning is None else reasoning.text, read_text.written
        assert known[: len(found)] == found
        assert (read_text.written is None) == bool(reasoning and reasoning.why_unscored)


@pytest.mark.parametrize("scorer", [None, *EVERY], ids=lambda marks: marks and marks.open)
@pytest.mark.parametrize("header", ["none", "open"])
def test_every_scorer_reads_every_family(scorer: Marks | None, header: Literal["none", "open"]) -> None:
    """And writes it in its own marks, where it has a place for a thought."""
    own = None if scorer is None else Thinking(scorer, header)
    for one in WRITTEN:
        found = Foreign.of(one.text, own)
        is_own = own is not None and (own.marks.first in one.text or own.marks.alone in one.text)
        if is_own and (header == "open" or one.name.startswith(("doubted", "ordinary"))):
            continue  # all of it is in the thought that the prompt has opened, up to its own mark
        unknown = own is not None and header == "open" and one.answer == one.text
        assert found.answer == one.answer, one
        assert (found.reasoning and found.reasoning.text) == ("" if unknown else one.thought), one
        if unknown or (one.thought and scorer is None):
            assert found.written is None, one
        elif one.scored is not None:
            assert (found.written is not None) == one.scored, one
        assert (found.written is None) == bool(found.reasoning and found.reasoning.why_unscored), one
        assert found.written is None or one.answer.strip() in found.written or scorer is None, one
        assert (doubted_from(one.text) is None) == (one.thought is None and one.answer == one.text), one


@pytest.mark.parametrize("one", WRITTEN, ids=lambda one: one.name)
def test_a_stream_from_elsewhere_is_held_while_it_begins_like_a_thought(one: Written) -> None:
    held = HeldText()
    shown = "".join(map(held.add, one.text))
    begins = one.text.lstrip().startswith(tuple(marks["open"] for marks in MARKS.values()))
    assert shown == ("" if begins or held.held else one.text)
    if one.thought is None and not begins:
        is_begun = one.text in ("analysis", "thought")  # of which more may come
        assert shown == one.text or one.answer != one.text or is_begun, "an answer is shown"


@given(st.data())
def test_a_stream_cut_anywhere_shows_nothing_that_begins_like_a_thought(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from([text for text in (*DOUBTED, *GLUED) if doubted_from(text[: len(text) // 2]) == 0])
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    held = HeldText()
    assert "".join(held.add(text[begin:end]) for begin, end in pairwise([0, *cuts, len(text)])) == ""


def test_a_mark_spelled_in_other_tokens_is_text() -> None:
    """A model that quotes a mark may write other tokens than the mark's own."""
    prompt, codec = rendered("qwen3")
    spelled = [token for letter in "</think>" for token in codec.encode(letter)]
    ids = [*codec.encode("<think>I close by "), *spelled, *codec.encode(" then.</think>\n\nMilan "), *spelled]
    assert codec.decode(ids).count("</think>") == 3
    found = answered(ids, (), codec, prompt.thinking)
    assert (found.text, found.reasoning and found.reasoning.text) == ("Milan </think>", "I close by </think> then.")
    assert codec.decode(found.scored_ids) == "Milan </think>"
    certain = CertainText(codec.decode, GenerationOptions(), prompt.thinking)
    pieces = [*chain.from_iterable(map(certain.add, ids)), *certain.rest(found.text, found.reasoning)]
    assert parts(pieces) == ("Milan </think>", "I close by </think> then.")


SWITCHES = {
    "enable_thinking": ("{% if enable_thinking is false %}</think>{% endif %}", {"enable_thinking": False}),
    "thinking": ("{% if thinking is defined and not thinking %}</think>{% endif %}", {"thinking": False}),
    "budget": ("{% if thinking_budget | default(-1) == 0 %}<think>{% endif %}", {"thinking_budget": 0}),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_thinking_is_switched_by_the_templates_own_option(name: str) -> None:
    code, off = SWITCHES[name]
    tokenizer = with_template(turns("<u>", "", "<a>") + code + "{# <think></think> #}{{ 'enable_thinking' }}")
    assert template_fingerprint(tokenizer, {"thinking": "off"}) == template_fingerprint(tokenizer, off)
    assert template_fingerprint(tokenizer, {"thinking": "auto"}) == template_fingerprint(tokenizer)
    assert render(tokenizer, "Hi", template_options={"thinking": "off"}) == render(
        tokenizer, "Hi", template_options=off
    )
    on = {"thinking_budget": -1} if name == "budget" else {next(iter(off)): True}
    assert template_fingerprint(tokenizer, {"thinking": "on"}) == template_fingerprint(tokenizer, on)


# Nemotron's form: the name of a switch, which is set in the template itself.
FIXED = "{% set ns = namespace(enable_thinking=true) %}{% set enable_thinking = true %}" + FAMILIES["r1"].template


@pytest.mark.parametrize(
    ("template", "thinking"),
    [(FAMILIES["r1"].template, "off"), (FIXED, "off"), *((FAMILIES["plain"].template, on) for on in ("on", "off"))],
    ids=["r1", "fixed", "plain on", "plain off"],
)
def test_thinking_without_a_switch_is_refused(template: str, thinking: str) -> None:
    tokenizer = with_template(template)
    with pytest.raises(InputError, match="no switch"):
        render(tokenizer, "Hi", template_options={"thinking": thinking})
    assert render(with_template(FAMILIES["r1"].template), "Hi", template_options={"thinking": "on"})
